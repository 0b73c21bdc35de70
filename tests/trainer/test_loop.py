"""The training loop: loss counting, skipped steps, evaluation, measurements and metrics."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from orchestrator.contract.files import exit_codes
from tests.trainer.launch.tiny_runs import losses_of, metrics_of, tiny
from tests.trainer.launch.tiny_runs import work as work_on

pytestmark = pytest.mark.process

LOSS, GRAD_NORM = 1e-5, 1e-4
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.0,
}


def work(folder: Path, num_ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return work_on(folder, num_ranks, cases, worker="tests.trainer.launch.loop_worker")


def column(out: Path, name: str) -> list[Any]:
    return [line[name] for line in metrics_of(out)]


def test_the_loss_is_the_mean_over_all_learned_tokens_of_all_ranks(tmp_path: Path) -> None:
    """Ranks and micro batches learn different numbers of tokens. The z-loss is on."""
    meshes: dict[str, dict[str, Any]] = {
        "tp2": {"parallel": {"tp": 2}},
        "pp2": {"parallel": {"pp": 2}},
        "shard2": {"parallel": {"dp_shard": 2}},
        "micro": {"parallel": {"dp_shard": 2}, "micro": 1},
    }
    one = tiny(tmp_path / "one", z_loss=0.1)
    plain = tiny(tmp_path / "plain")
    uneven = {"broken": "uneven", "unsaved": True}
    work(tmp_path, 1, [{"config": one, **uneven}, {"config": plain, **uneven}])
    outs = {name: tiny(tmp_path / name, z_loss=0.1, **mesh) for name, mesh in meshes.items()}
    work(tmp_path, 2, [{"config": config, **uneven} for config in outs.values()])
    expected = metrics_of(tmp_path / "one")
    assert [line["loss"] is None for line in expected] == [False, False, True, False, False]
    assert column(tmp_path / "one", "skipped") == [0, 0, 1, 1, 1]
    for name in meshes:
        found = metrics_of(tmp_path / name)
        assert [line["skipped"] for line in found] == [0, 0, 1, 1, 1], name
        for ours, theirs in zip(found, expected, strict=True):
            if theirs["loss"] is not None:
                assert abs(ours["loss"] - theirs["loss"]) <= LOSS, name
                assert ours["z_loss"] == pytest.approx(theirs["z_loss"], rel=LOSS), name
                assert ours["z_loss"] > 0.1
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=GRAD_NORM), name
    assert column(tmp_path / "plain", "z_loss") == [None] * 5
    first, without = expected[0], metrics_of(tmp_path / "plain")[0]
    assert first["loss"] == without["loss"], "the reported loss is the cross-entropy alone"
    assert first["grad_norm"] != pytest.approx(without["grad_norm"], rel=GRAD_NORM)


def test_all_ranks_skip_a_bad_gradient_and_too_many_end_the_job(tmp_path: Path) -> None:
    """`Watched` compares the bits of weights and optimizer before and after each step."""
    sharded: dict[str, Any] = {"parallel": {"dp_shard": 2}}
    saving = {"every_steps": 1, "async": False, "keep": 1}
    some = tiny(tmp_path / "some", **sharded)
    tensor = tiny(tmp_path / "tensor", parallel={"tp": 2})
    stages = tiny(tmp_path / "stages", parallel={"pp": 2})
    many = tiny(tmp_path / "many", **sharded)
    ahead = tiny(tmp_path / "ahead", **sharded, run_ahead=2)
    cut = tiny(tmp_path / "cut", **sharded, checkpoint=saving)
    always = [2, 3, 4, 5]
    watched = {"broken": "watched"}
    answers = work(
        tmp_path,
        2,
        [
            {"config": some, "poison": [2, 4], "unsaved": True, **watched},
            {"config": tensor, "poison": [2, 3], "unsaved": True, **watched},
            {"config": stages, "poison": [1, 3], "unsaved": True, **watched},
            {"config": many, "poison": always, **watched},
            {"config": cut, "poison": always, "stop_after": 3, **watched},
            {"config": cut, "poison": always, **watched},
            {"config": ahead, "poison": always, **watched},
        ],
    )
    assert [answer.get("code") for answer in answers] == [
        *[0, 0, 0, None, exit_codes.CHECKPOINTED, None, None]
    ]
    assert column(tmp_path / "some", "skipped") == [0, 1, 1, 2, 2]
    assert column(tmp_path / "tensor", "skipped") == [0, 1, 2, 2, 2]
    assert column(tmp_path / "stages", "skipped") == [1, 1, 2, 2, 2]
    assert [norm is None for norm in column(tmp_path / "some", "grad_norm")] == [
        *[False, True, False, True, False]
    ]
    assert column(tmp_path / "many", "step") == [1, 2, 3, 4]
    # Step 5 was queued too, but the job ends at the same step.
    assert metrics_of(tmp_path / "ahead")[-1]["loss"] == metrics_of(tmp_path / "many")[-1]["loss"]
    assert column(tmp_path / "ahead", "step") == [1, 2, 3, 4]
    assert column(tmp_path / "cut", "skipped") == [0, 1, 2, 3], "the count is in the checkpoint"
    for answer in (answers[3], *answers[5:]):
        assert (answer["error"], answer["since"]) == ("NotFinite", 2)
        assert answer["message"].startswith("step 4: the loss is ")
        assert "gradient's norm nan, not finite, for 3 steps" in answer["message"]
        assert "train.optimizer.lr" in answer["message"]


RUN_AHEAD: dict[str, dict[str, Any]] = {
    "shard2": {"parallel": {"dp_shard": 2}, "grad_clip": 0.5},
    "tp2": {"parallel": {"tp": 2}, "grad_clip": None, "z_loss": 0.1},
    "pp2": {"parallel": {"pp": 2}, "optimizer": {"name": "adam", "lr": 1e-2}},
    "zero1": {"parallel": {"dp_replicate": 2, "data": "zero1"}},
    "rounded": {"parallel": {"dp_shard": 2}, "optimizer": {"lr": 1e-2, "state_dtype": "bfloat16"}},
}


@pytest.mark.parametrize(
    "names",
    [("shard2",), pytest.param(("tp2", "pp2", "zero1", "rounded"), marks=pytest.mark.slow)],
    ids=", ".join,
)
def test_steps_that_run_ahead_have_the_same_bits(names: tuple[str, ...], tmp_path: Path) -> None:
    """Losses, norms and weights are those of a job that reads each step at once, with updates that
    are skipped, evaluations, saves and a request to stop."""
    meshes = {name: RUN_AHEAD[name] for name in names}
    cases: list[dict[str, Any]] = []
    for name, mesh in meshes.items():
        for ahead in (0, 2):
            changes = {**mesh, "steps": 13, "run_ahead": ahead, "eval_every": 6}
            out = tmp_path / f"{name}-{ahead}"
            config = tiny(out, **changes, checkpoint={"every_steps": 5})
            config["data"] |= {"validation": {"fraction": 0.1}}
            both = {"config": config, "poison": [2, 6], "broken": "watched"}
            cases += [{**both, "stop_after": 7}, both]
    answers = work(tmp_path, 2, cases)
    assert {answer["code"] for answer in answers} == {0, exit_codes.CHECKPOINTED}
    same = ("step", "loss", "grad_norm", "lr", "eval_loss", "skipped")
    for name in meshes:
        at_once, late = (
            [{key: line[key] for key in same} for line in metrics_of(tmp_path / f"{name}-{count}")]
            for count in (0, 2)
        )
        assert late == at_once, name
        # No step is done twice: the stop saved what was done.
        assert [line["step"] for line in late] == [*range(1, 14)]


def test_evaluation_changes_only_the_metrics(tmp_path: Path) -> None:
    """With dropout, with gathered FSDP weights, and with a save right after an evaluation."""
    changes: dict[str, Any] = {"parallel": {"dp_shard": 2}, "checkpoint": {"every_steps": 2}}
    evaluated = tiny(tmp_path / "evaluated", **changes, eval_every=2, eval_sequences=16)
    without = tiny(tmp_path / "without", **changes)
    tensor = tiny(tmp_path / "tensor", parallel={"tp": 2}, eval_every=4)
    for config in (evaluated, without):
        config["model"] = {"config": GPT2}
    for config in (evaluated, without, tensor):
        config["data"] |= {"validation": {"fraction": 0.1}}
    alone = {**tensor, "parallel": {}, "out": str(tmp_path / "alone")}
    again = {**evaluated, "train": {**evaluated["train"], "steps": 6}}
    longer = {**without, "train": {**without["train"], "steps": 6}}
    held_out = {"broken": "held out"}
    work(
        tmp_path,
        2,
        [
            {"config": evaluated, "stop_after": 4, **held_out},
            {"config": again, **held_out},
            {"config": without, "stop_after": 4, **held_out},
            {"config": longer, **held_out},
            {"config": tensor, "unsaved": True, **held_out},
        ],
    )
    work(tmp_path, 1, [{"config": alone, "unsaved": True, **held_out}])
    assert losses_of(tmp_path / "evaluated") == losses_of(tmp_path / "without")
    # A checkpoint right after an evaluation equals that of a run without evaluations.
    assert saved(tmp_path / "evaluated", 6) == saved(tmp_path / "without", 6)
    losses = column(tmp_path / "evaluated", "eval_loss")
    # The rank was asked to stop at step 4, so it skipped the evaluation.
    assert [loss is not None for loss in losses] == [False, True, False, False, False, True]
    assert 0 < losses[-1] < losses[1]
    assert column(tmp_path / "without", "eval_loss") == [None] * 6
    found, expected = (column(tmp_path / name, "eval_loss") for name in ("tensor", "alone"))
    assert [loss is not None for loss in found] == [False, False, False, True, True]
    assert found[3:] == pytest.approx(expected[3:], abs=LOSS)


def saved(out: Path, step: int) -> set[str]:
    reader = FileSystemReader(out / "checkpoints" / f"step-{step}")
    return {*reader.read_metadata().state_dict_metadata}


def test_every_optimizer_resumes_bitwise_equal(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = []
    parallel: dict[str, dict[str, Any]]
    parallel = {name: {"dp_shard": 2} for name in ("adam", "nadam", "radam", "sgd")}
    parallel["adafactor"] = {"data": "ddp", "dp_replicate": 2}
    names = [*parallel]
    for name in names:
        changes: dict[str, Any] = {
            "parallel": parallel[name],
            "optimizer": {"name": name, "lr": 1e-2},
            "steps": 4,
            "layers": 1,
        }
        parts = tiny(tmp_path / f"{name}-parts", **changes)
        cases += [
            {"config": tiny(tmp_path / name, **changes), "unsaved": True},
            {"config": parts, "stop_after": 2},
            {"config": parts, "unsaved": True},
        ]
    work(tmp_path, 2, cases)
    runs = [losses_of(tmp_path / name) for name in names]
    assert [losses_of(tmp_path / f"{name}-parts") for name in names] == runs
    assert all(run[4] < run[1] for run in runs)
    assert len({tuple(run.values()) for run in runs}) == len(names)


def test_a_step_is_measured_and_recorded(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # The save after step 2 is not recorded: its many events take seconds to write.
    profile = {"at_step": 3, "steps": 2, "ranks": [1]}
    late = {"at_step": 5, "steps": 9, "ranks": [0]}
    saving: dict[str, Any] = {"every_steps": 2, "async": False}
    sharded: dict[str, Any] = {"parallel": {"dp_shard": 2}, "layers": 1}
    config = tiny(out, **sharded, checkpoint=saving, profile=profile, device_tflops=1e-3)
    other = tiny(tmp_path / "other", **sharded, profile=late)
    work(tmp_path, 2, [{"config": config}, {"config": other, "unsaved": True}])
    lines = metrics_of(out)
    for line in lines:
        assert line["forward_s"] + line["backward_s"] <= line["passes_s"]
        assert line["data_s"] + line["passes_s"] + line["optimizer_s"] <= line["step_s"]
        assert min(line["data_s"], line["forward_s"], line["optimizer_s"]) > 0
        assert line["mfu"] / line["tokens_per_second"] == pytest.approx(
            lines[0]["mfu"] / (lines[0]["tokens_per_second"])
        )
        assert line["peak_memory_bytes"] > 100 * 2**20
    # The ranks compare after steps 2, 4 and the last one.
    fullest = [line["fullest_memory_bytes"] for line in lines]
    assert fullest[0] is None
    assert fullest[1] == fullest[2] <= fullest[3] <= fullest[4]
    assert all(line["fullest_rank"] in (0, 1) for line in lines[1:])
    assert fullest[4] >= lines[4]["peak_memory_bytes"]
    assert [line["checkpoint_s"] > 0 for line in lines] == [False, False, True, False, True]
    assert metrics_of(tmp_path / "other")[0]["mfu"] is None
    assert steps_recorded(out, 1) == 2
    assert not (out / "profiles" / "attempt-1" / "rank-0.trace.json.gz").exists()
    assert steps_recorded(tmp_path / "other", 0) == 1, "what there was until the job's end"


def steps_recorded(out: Path, rank: int) -> int:
    """Number of optimizer steps in the trace of `rank`."""
    trace = out / "profiles" / "attempt-1" / f"rank-{rank}.trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "[memory]" for event in events)
    return sum(event.get("name", "").startswith("Optimizer.step#ShardAdam") for event in events)


def test_metrics_also_go_to_tensorboard_and_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing import event_accumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "out"
    config = tiny(out, tensorboard=True, wandb="tiny", steps=4, checkpoint={"every_steps": 3})
    work(tmp_path, 1, [{"config": config, "stop_after": 3}, {"config": config}])
    events = event_accumulator.EventAccumulator(str(out / "tensorboard")).Reload()
    values = {event.step: event.value for event in events.Scalars("loss")}
    assert values == pytest.approx(losses_of(out))
    runs = [*(out / "wandb").glob("offline-run-*/run-*.wandb")]
    assert len({run.stem for run in runs}) == 1, "a job is one run, however often it is started"
    assert all(b"grad_norm" in run.read_bytes() for run in runs)
