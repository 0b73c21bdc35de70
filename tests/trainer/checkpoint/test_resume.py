"""A run that resumes from a checkpoint computes the same losses as a run that never stopped."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import trainer
from ndctl.rank.checkpoint_files import MARKER, damage, read_marker
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.checkpoint_names import newest_complete
from orchestrator.contract.files.env import STACKS_SIGNAL, RankEnv
from orchestrator.contract.messages.events import CheckpointSaved, DrillHappened, TrainingResumed
from orchestrator.contract.messages.rank_messages import Beat, RankRaised
from orchestrator.errors import TrainingError
from tests.trainer.checkpoint.checkpoint_launch import listening, train_alone, with_fence
from tests.trainer.launch.tiny_runs import (
    finish,
    losses_of,
    metrics_of,
    start_torchrun,
    tiny,
    train,
    work,
)

pytestmark = pytest.mark.process

STEPS = 8
SHARDED: dict[str, Any] = {"parallel": {"dp_shard": 2}, "steps": STEPS, "layers": 1}


def copies_of(out: Path, **changes: Any) -> dict[str, Any]:
    return tiny(out, **{**SHARDED, **changes})


def test_a_run_that_was_asked_to_stop_resumes_bitwise_equal(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "whole", **SHARDED)
    background = tiny(tmp_path / "background", **SHARDED, checkpoint={"every_steps": 2})
    parts = tiny(tmp_path / "parts", **SHARDED, checkpoint={"every_steps": 3, "async": False})
    answers = work(
        tmp_path,
        2,
        [
            {"config": whole, "unsaved": True},
            {"config": background},
            {"config": parts, "stop_after": 5},
            {"config": parts},
            {"config": parts},
        ],
    )
    expected = losses_of(tmp_path / "whole")
    assert losses_of(tmp_path / "background") == expected
    assert [answer["code"] for answer in answers] == [0, 0, exit_codes.CHECKPOINTED, 0, 0]
    assert [line["step"] for line in metrics_of(tmp_path / "parts")] == [*range(1, STEPS + 1)]
    assert losses_of(tmp_path / "parts") == expected
    left = {path.name for path in (tmp_path / "background" / "checkpoints").iterdir()}
    assert left == {"step-6", "step-8"}


def test_a_run_resumes_on_another_mesh_and_skips_torn_checkpoints(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "whole", model="qwen3", **SHARDED)
    out = tmp_path / "moved"
    first = tiny(out, model="qwen3", **SHARDED)
    second = {**first, "parallel": {"tp": 2}}
    work(
        tmp_path,
        2,
        [
            {"config": whole, "unsaved": True},
            {"config": first, "stop_after": 3},
            {"config": second, "stop_after": 6},
        ],
    )
    (out / "checkpoints" / "step-6" / MARKER).unlink()
    third = train({**first, "parallel": {}}, 1)
    assert finish(third) == [0]
    assert "not using checkpoint step-6: COMPLETE is missing" in third[0].output
    assert [line["step"] for line in metrics_of(out)] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]
    expected = losses_of(tmp_path / "whole")
    assert all(abs(loss - expected[step]) <= 1e-5 for step, loss in losses_of(out).items())


def write(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


def test_after_a_killed_rank_only_steps_since_the_checkpoint_are_repeated(tmp_path: Path) -> None:
    """Under torchrun, with the socket of an agent."""
    drill = [{"id": 7, "fault": "kill", "target": "rank", "index": 1, "step": 6}]
    whole = tiny(tmp_path / "whole", **SHARDED)
    config = tiny(tmp_path / "killed", **SHARDED, checkpoint={"every_steps": 2, "async": False})
    with_fence(config)
    with_fence(whole)
    env = {"NDCTL_HEARTBEAT_SOCKET": str(tmp_path / "agent")}
    with listening(tmp_path / "agent") as told:
        work(tmp_path, 2, [{"config": whole, "unsaved": True}])
        killed = finish(train(config, 2, NDCTL_DRILLS=json.dumps(drill), **env))
        env["NDCTL_ATTEMPT"] = "2"
        program = Path(trainer.__file__).with_name("__main__.py")
        again = start_torchrun(program, write(tmp_path / "again.json", config), env=env)
        assert finish([again]) == [exit_codes.OK], again.output
    assert killed[1] == -signal.SIGKILL
    assert killed[0] in (exit_codes.FAILED, -signal.SIGABRT)
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")
    assert DrillHappened(attempt=1, rank=1, drill=7, step=6) in told
    assert [d.step for d in told if isinstance(d, TrainingResumed)] == [0, 4]
    assert [d.step for d in told if isinstance(d, CheckpointSaved)] == [2, 4, 6, 8]
    assert check_beats([d for d in told if isinstance(d, Beat) and (d.attempt, d.rank) == (2, 1)])


def check_beats(beats: list[Beat]) -> bool:
    """Assert the phases of a rank's second attempt: start, steps and saves, end."""
    phases = [(beat.phase, beat.step) for beat in beats if beat.loss is None]
    assert phases[:2] == [("init", 0), ("train", 4)]
    assert [step for phase, step in phases if phase == "checkpoint"] == [6, 8]
    done = [beat for beat in beats if beat.loss is not None]
    assert [beat.step for beat in done] == [5, 6, 7, 8]
    return all(beat.tokens_per_second for beat in done)


def test_sigterm_saves_a_checkpoint_and_another_signal_writes_stacks(tmp_path: Path) -> None:
    config = tiny(tmp_path / "out", parallel={"dp_shard": 2}, steps=100_000)
    ranks = train(config, 2, NDCTL_TRACE_DIR=str(tmp_path / "traces"))
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert all(rank.process.exitcode is None for rank in ranks), finish(ranks)
        time.sleep(0.05)
    ranks[0].kill(STACKS_SIGNAL)
    ranks[1].kill(signal.SIGTERM)
    assert finish(ranks) == [exit_codes.CHECKPOINTED] * 2
    newest, passed_over = newest_complete(tmp_path / "out" / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{metrics_of(tmp_path / 'out')[-1]['step']}"
    assert passed_over == ()
    assert "in train" in (tmp_path / "traces" / "rank-0.stacks").read_text()


def test_a_rank_reports_its_exception_to_its_agent(tmp_path: Path) -> None:
    drill = [{"id": 1, "fault": "raise", "target": "rank", "index": 0, "step": 2}]
    env = {"NDCTL_HEARTBEAT_SOCKET": str(tmp_path / "agent"), "NDCTL_DRILLS": json.dumps(drill)}
    with listening(tmp_path / "agent") as told:
        ranks = train(with_fence(tiny(tmp_path / "out")), 1, **env)
        assert finish(ranks) == [exit_codes.FAILED]
    assert "RuntimeError: drill raise:rank=0@step=2" in ranks[0].output
    raised = told[-1]
    assert isinstance(raised, RankRaised)
    assert (raised.error.step, raised.error.error) == (2, "RuntimeError")
    assert "in inject_fault" in raised.error.traceback


def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    config = tiny(tmp_path / "out")
    assert train_alone(config) == exit_codes.OK
    other = train({**config, "model": {"preset": "llama-tiny"}, "parallel": {"dp_shard": 2}}, 2)
    assert finish(other) == [exit_codes.REFUSED] * 2
    assert "belongs to another model: " in other[0].output
    assert "belongs to another model" in other[1].output, "each rank's log shows it"


def test_a_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path / "out")
    assert train_alone(config) == exit_codes.OK
    (tmp_path / "text" / "0.txt").write_text("other text" * 100)
    with pytest.raises(
        TrainingError, match="belongs to a run with other data or settings: the training files"
    ):
        train_alone(config)


def test_a_file_in_the_place_of_the_checkpoints_is_refused_before_training(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoints").write_text("a file")
    with pytest.raises(TrainingError, match="checkpoints is not a folder"):
        train_alone(tiny(out))
    assert not (out / "metrics.jsonl").exists()


def test_a_finished_job_trains_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny(tmp_path / "out")
    with caplog.at_level("INFO"):
        assert train_alone(config) == exit_codes.OK
        assert train_alone(config) == exit_codes.OK
    assert "nothing left to do: 5 of 5 steps are done" in caplog.text
    assert len(metrics_of(tmp_path / "out")) == 5


def test_a_damaged_checkpoint_is_replaced_by_an_older_one_unless_forbidden(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(tmp_path / "out", steps=4, checkpoint={"every_steps": 2, "async": False})
    assert train_alone(config) == exit_codes.OK
    shard = tmp_path / "out" / "checkpoints" / "step-4" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    trusting = {**config, "checkpoint": {**config["checkpoint"], "verify": False}}
    with pytest.raises(TrainingError, match=r"failed to load .*step-4"):
        train_alone(trusting)
    with caplog.at_level("INFO"):
        assert train_alone(config) == exit_codes.OK
    why = "__0_0.distcp has another checksum than its marker says"
    assert f"not using checkpoint step-4: {why}" in caplog.text
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == [1, 2, 3, 4, 3, 4]
    assert damage_of(shard.parent) is None, "the step was saved again"


def test_a_first_attempt_starts_at_step_0_despite_existing_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(tmp_path / "out", steps=4, checkpoint={"every_steps": 2, "async": False})
    assert train_alone(config) == exit_codes.OK
    with caplog.at_level("INFO"):
        assert train_alone(config, RankEnv(resume=False)) == exit_codes.OK
    assert "starting at step 0" in caplog.text
    why = "it is not in the job's journal"
    assert f"not using checkpoint step-4: {why}" in caplog.text
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == [1, 2, 3, 4, 1, 2, 3, 4]


def damage_of(folder: Path) -> str | None:
    checksums = read_marker(folder)["sha256"]
    return damage(folder, checksums, checksums)
