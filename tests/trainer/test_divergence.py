"""A training that diverges: how it ends, and how a rollback resumes without the data of the bad
steps. Also: how a rank reports a refused configuration and a full device.
"""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.codec import encode
from orchestrator.contract.drills import parse_drill
from orchestrator.contract.files import exit_codes
from tests.trainer.launch.tiny_runs import finish, losses_of, metrics_of, start_ranks, tiny
from tests.trainer.launch.tiny_runs import work as work_on
from trainer.data.ledger_check import first_mistake, replay

pytestmark = pytest.mark.process

STEPS = 8
SAVING = {"every_steps": 2, "async": False, "keep": 2}


def work(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return work_on(folder, 2, cases, worker="tests.trainer.launch.loop_worker")


def sharded(out: Path, **changes: Any) -> dict[str, Any]:
    values = {"layers": 1, "steps": STEPS, "checkpoint": SAVING, "parallel": {"dp_shard": 2}}
    return tiny(out, **{**values, **changes})


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def skipped_windows(out: Path) -> list[str]:
    """Assert that no sample was lost or read twice; the windows that were skipped."""
    standing = replay((out / "samples.jsonl").read_text().splitlines())
    assert standing is not None
    assert first_mistake(standing, saved=standing.steps) is None
    return [str(window) for window in standing.skipped]


def test_a_rollback_restores_a_bad_weight_and_skips_its_data(tmp_path: Path) -> None:
    spoiled = sharded(tmp_path / "spoiled", max_bad_steps=2)
    never = sharded(tmp_path / "never")
    plain = sharded(tmp_path / "plain")
    moved = {**spoiled, "parallel": {"tp": 2}}
    answers = work(
        tmp_path,
        [
            {"config": spoiled, "drills": ["nan:rank=1@step=6"]},
            {"config": moved, "skip": [(5, 7)], "stop_after": 6},
            {"config": spoiled, "skip": [(5, 7)]},
            {"config": never, "skip": [(5, 7)], "unsaved": True},
            {"config": plain, "unsaved": True},
        ],
    )
    assert (answers[0]["error"], answers[0]["since"]) == ("NotFinite", 6)
    assert [answer.get("code") for answer in answers[1:]] == [exit_codes.CHECKPOINTED, 0, 0, 0]
    steps = [line["step"] for line in metrics_of(tmp_path / "spoiled")]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8], "nothing was saved in a bad step"
    assert (
        skipped_windows(tmp_path / "spoiled") == skipped_windows(tmp_path / "never") == ["5 to 7"]
    )
    losses, expected = losses_of(tmp_path / "spoiled"), losses_of(tmp_path / "never")
    assert losses == pytest.approx(expected, abs=1e-5)
    others = losses_of(tmp_path / "plain")
    assert all(expected[step] == others[step] for step in range(1, 5))
    assert all(expected[step] != others[step] for step in range(5, 9))


def test_windows_skipped_by_a_checkpoint_stay_skipped_unless_already_read(tmp_path: Path) -> None:
    config = sharded(tmp_path / "run", parallel={})
    config["parallel"] = {"dp_shard": 2}
    longer = {**config, "train": {**config["train"], "steps": STEPS + 2}}
    answers = work(
        tmp_path,
        [
            {"config": config, "skip": [(3, 4)]},
            # A start without ndctl gives no `skip`: the windows come from the checkpoint.
            {"config": longer},
            {"config": longer, "skip": [(3, 4), (6, 7)], "refused": True},
        ],
    )
    assert skipped_windows(tmp_path / "run") == ["3 to 4"]
    refused = answers[2]["refused"]
    assert "all checkpoints (step-10; step-8) have read some of the batches to skip" in refused
    assert "(3 to 4, 6 to 7)" in refused
    assert checkpoints(tmp_path / "run") == ["step-10", "step-8"]


def test_a_lasting_loss_spike_ends_the_ranks_and_is_stored_in_a_checkpoint(tmp_path: Path) -> None:
    """The weight decay is far too high: from step 13 on, lr x weight_decay is above 2, so each step
    makes the weights larger. The loss then grows from step to step, without chance."""
    spike = {"window": 8, "steps": 3, "deviations": 8.0}
    steep: dict[str, Any] = {
        "steps": 30,
        "optimizer": {"lr": 0.05, "weight_decay": 66.0},
        "schedule": {"kind": "constant", "warmup_steps": 20},
        "grad_clip": None,
        # There are three bad steps, so a save is due in one of them.
        "checkpoint": {**SAVING, "every_steps": spike["steps"]},
    }
    watched = sharded(tmp_path / "watched", spike=spike, **steep)
    cut = sharded(tmp_path / "cut", spike=spike, **steep)
    unwatched = sharded(tmp_path / "unwatched", **steep)
    answers = work(tmp_path, [{"config": watched}, {"config": unwatched, "unsaved": True}])
    found = answers[0]
    assert found["error"] == "LossSpike"
    last = metrics_of(tmp_path / "watched")[-1]
    assert last["step"] == found["since"] + spike["steps"] - 1
    assert answers[1].get("error") != "LossSpike"
    assert metrics_of(tmp_path / "unwatched")[-1]["step"] > last["step"]
    assert max(int(name[5:]) for name in checkpoints(tmp_path / "watched")) < found["since"]
    again = work(tmp_path, [{"config": cut, "stop_after": found["since"] + 1}, {"config": cut}])
    assert again[0]["code"] == exit_codes.CHECKPOINTED
    assert (again[1]["error"], again[1]["since"]) == ("LossSpike", found["since"])
    assert metrics_of(tmp_path / "cut")[-1]["step"] == last["step"]


def test_a_loss_that_is_not_finite_ends_every_rank_with_its_own_exit_code(tmp_path: Path) -> None:
    import json

    config = tmp_path / "config.json"
    config.write_text(json.dumps(sharded(tmp_path / "out", max_bad_steps=1)))
    env = {"NDCTL_DRILLS": json.dumps(encode((parse_drill("nan:rank=0@step=2", 1),)))}
    ranks = start_ranks("trainer", config, 2, env)
    assert finish(ranks) == [exit_codes.UNSTABLE] * 2
    for rank in ranks:
        assert "error: step 2: the loss is nan, not finite" in rank.output
        assert "Traceback" not in rank.output


def test_every_rank_logs_why_a_configuration_is_refused(tmp_path: Path) -> None:
    """The user is sent to the log of the rank whose exit is reported first, which may be any."""
    config = tmp_path / "config.json"
    config.write_text('{"seed": "none"}')
    ranks = start_ranks("trainer", config, 2)
    assert finish(ranks) == [exit_codes.REFUSED] * 2
    for rank in ranks:
        assert "is not a trainer configuration" in rank.output


def test_a_device_without_memory_raises_its_own_error(tmp_path: Path) -> None:
    import json

    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny(tmp_path / "out")))
    env = {"NDCTL_DRILLS": json.dumps(encode((parse_drill("oom:rank=0@step=2", 1),)))}
    ranks = start_ranks("trainer", config, 1, env)
    assert finish(ranks) == [exit_codes.FAILED]
    assert "can't allocate memory" in ranks[0].output
