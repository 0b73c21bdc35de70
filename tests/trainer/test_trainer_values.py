"""The parts of the trainer that are plain functions: schedule, configuration, drills, datagrams."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.contract.codec import decode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.messages.rank_messages import MAX_BYTES, to_bytes
from orchestrator.contract.spec.drills import parse_drill
from orchestrator.contract.spec.train_spec import TrainSpec
from orchestrator.errors import TrainingError
from tests.trainer.trainer_launch import tiny
from trainer.config import complete, load_config, parse_yaml
from trainer.optimizer import lr_at
from trainer.rank.drills import drills_due, read_drills
from trainer.rank.reporter import Reporter, raised_of
from trainer.rank.signals import StopRequest


def schedule(kind: str, steps: int = 10, warmup_steps: int = 4) -> list[float]:
    data = {
        "steps": steps,
        "global_batch_size": 1,
        "optimizer": {"lr": 1.0},
        "schedule": {"kind": kind, "warmup_steps": warmup_steps},
    }
    spec: TrainSpec = decode(TrainSpec, data)
    return [lr_at(step, spec) for step in range(1, steps + 2)]


def test_every_schedule_warms_up_to_the_peak() -> None:
    for kind in ("constant", "linear", "cosine"):
        assert schedule(kind)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_schedule_falls_to_zero_after_the_last_step() -> None:
    assert schedule("constant")[5:] == [1.0] * 6
    assert schedule("linear")[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
    cosine = schedule("cosine")
    assert cosine[7] == pytest.approx(0.5)
    assert cosine[9] > 0.0
    assert cosine[10] == pytest.approx(0.0)


def test_a_job_of_warm_up_alone_never_divides_by_zero() -> None:
    assert schedule("cosine", steps=2, warmup_steps=2)[:2] == [0.5, 1.0]


def test_yaml_reads_numbers_in_every_notation() -> None:
    assert parse_yaml("[3e-4, 1E3, -2.5e+1, .5e1, 3.0e-4]") == [3e-4, 1e3, -25.0, 5.0, 3e-4]
    assert parse_yaml("[e4, 1e, 3e-4x]") == ["e4", "1e", "3e-4x"]


def test_json_and_yaml_configurations_are_read_equally(tmp_path: Path) -> None:
    config = tiny(tmp_path / "out")
    (tmp_path / "a.json").write_text(yaml.safe_dump(config, default_flow_style=True, width=10**6))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(TrainingError, match="failed to read the configuration"):
        load_config(tmp_path / "a.json")
    assert load_config(tmp_path / "a.yaml") == decode(TrainingConfig, config)


def test_the_example_is_a_valid_configuration() -> None:
    path = Path(__file__).parents[2] / "examples" / "trainer.yaml"
    complete(load_config(path), world_size=4)


def test_all_mistakes_of_a_configuration_are_named_at_once(tmp_path: Path) -> None:
    config = tiny(tmp_path / "out", steps=0, dtype="float8")
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({**config, "extra": 1}))
    with pytest.raises(TrainingError) as caught:
        load_config(tmp_path / "bad.yaml")
    assert all(word in str(caught.value) for word in ("extra", "train.steps", "train.dtype"))


def pipeline(schedule: str, **changes: Any) -> dict[str, Any]:
    return {"parallel": {"pp": 2, "pipeline": {"schedule": schedule}}, **changes}


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        (pipeline("1f1b", micro=8), 2, "be at least 2, one for each stage; it is 1"),
        (
            pipeline("interleaved_1f1b", global_batch_size=10),
            2,
            "equal parts in its 2 rounds",
        ),
        (pipeline("zbv", activation_checkpointing="selective"), 2, "zbv runs two"),
        (pipeline("zbv", compile=True), 2, "cannot split the backward pass of a compiled layer"),
        ({"parallel": {"tp": 2, "dp_shard": 1}}, 4, "for 2 ranks, but torchrun started 4"),
        ({"parallel": {"tp": 2}, "compile": True}, 2, "torch computes wrong gradients"),
        ({"profile": {"at_step": 1, "ranks": [0, 2]}}, 2, "the job has ranks 0 to 1"),
        ({"optimizer": {"name": "adafactor"}}, 2, "fails on sharded parameters"),
        ({"optimizer": {"name": "adafactor"}, "dtype": "bfloat16"}, 1, "sharded parameters"),
    ],
)
def test_settings_that_the_trainer_lacks_are_refused(
    tmp_path: Path, changes: dict[str, Any], world_size: int, message: str
) -> None:
    config: TrainingConfig = decode(TrainingConfig, tiny(tmp_path / "out", **changes))
    with pytest.raises(TrainingError, match=message):
        complete(config, world_size)


def test_a_drill_is_due_for_its_rank_at_its_step() -> None:
    drills = [parse_drill("kill:rank=3@step=5", 1), parse_drill("kill:host=1@step=5", 2)]

    def due(rank: int, step: int) -> list[int]:
        env = RankEnv(rank=rank, local_rank=rank % 2, local_world_size=2)
        return [drill.id for drill in drills_due(drills, env, step)]

    assert [due(rank, 5) for rank in range(4)] == [[], [], [2], [1]]
    assert due(3, 4) == due(3, 6) == []


def test_drills_come_as_json_and_nonsense_is_refused() -> None:
    text = '[{"id": 2, "fault": "stop", "target": "rank", "index": 0, "step": 9}]'
    assert [str(drill) for drill in read_drills(text)] == ["stop:rank=0@step=9"]
    for nonsense in ("[", "{}", '[{"id": 1}]'):
        with pytest.raises(TrainingError, match="NDCTL_DRILLS"):
            read_drills(nonsense)


def test_last_words_fit_a_datagram_and_keep_the_end_of_the_traceback() -> None:
    def deep(depth: int) -> None:
        if depth == 0:
            raise ValueError("\N{SNOWMAN}" * 100_000)
        eval(f"deep({depth - 1}) #" + "x" * 10_000, {"deep": deep})

    with pytest.raises(ValueError, match="\N{SNOWMAN}") as caught:
        deep(20)
    raised = raised_of(caught.value, RankEnv(rank=3), step=7)
    assert len(to_bytes(raised)) <= MAX_BYTES
    error = raised.error
    assert (raised.rank, error.step, error.error) == (3, 7, "ValueError")
    assert error.traceback.endswith("\N{SNOWMAN}\n")


def test_reports_without_a_listener_are_dropped(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "none"), "x" * 500):
        reporter = Reporter(RankEnv(heartbeat_socket=path))
        reporter.beat("train", loss=float("nan"))
        reporter.saved(3)
        reporter.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_the_rank_to_leave(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        stop = StopRequest()
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
