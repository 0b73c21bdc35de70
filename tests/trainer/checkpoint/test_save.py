"""A save that fails costs a warning and a retry, never the training or the checkpoint before."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.files.checkpoint_names import newest_complete
from orchestrator.contract.messages.events import CheckpointFailed, CheckpointSaved
from tests.trainer.checkpoint.checkpoint_launch import led, listening
from tests.trainer.trainer_launch import losses_of, tiny, work

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("saves")]

STEPS = 22
FROM, UNTIL = 9, 14
"""Regular saves are due at steps 10 and 20."""
FOREVER = {"from": STEPS - 1, "until": STEPS + 1}
CASES: Mapping[str, dict[str, Any]] = {
    "none": {"trouble": "too large", "from": 0, "until": 0, "async": True},
    "file in place": {"trouble": "file in place", "async": False},
    "not permitted": {"trouble": "not permitted", "async": False},
    "vanishing": {"trouble": "vanishing", "async": True},
    "too large": {"trouble": "too large", "async": True},
    "unknown": {"trouble": "unknown", "async": False},
    "to the end": {"trouble": "file in place", "async": False, **FOREVER},
}


@dataclass(frozen=True)
class Told:
    """Results of the cases."""

    folder: Path
    answers: Mapping[str, dict[str, Any]]
    saved: Mapping[str, list[int]]
    failed: Mapping[str, list[CheckpointFailed]]

    def checkpoints(self, name: str) -> Path:
        return self.folder / name / "checkpoints"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """All cases one after the other on the same two ranks, with an agent listening."""
    folder = tmp_path_factory.mktemp("saves")
    cases = []
    for name, case in CASES.items():
        checkpoint = {"every_steps": 10, "async": case["async"]}
        config = tiny(folder / name, steps=STEPS, parallel={"dp_shard": 2}, checkpoint=checkpoint)
        cases.append({"from": FROM, "until": UNTIL, **case, "config": led(config)})
    env = {"NDCTL_HEARTBEAT_SOCKET": str(folder / "agent")}
    with listening(folder / "agent") as heard:
        answers = work(folder, 2, cases, worker="tests.trainer.checkpoint.save_worker", env=env)
    saved: dict[str, list[int]] = {name: [] for name in CASES}
    failed: dict[str, list[CheckpointFailed]] = {name: [] for name in CASES}
    names = iter(CASES)
    name = next(names)
    for datagram in heard:
        if isinstance(datagram, CheckpointSaved):
            saved[name].append(datagram.step)
        if isinstance(datagram, CheckpointFailed):
            failed[name].append(datagram)
        tries = sum(failure.step == STEPS for failure in failed[name])
        if saved[name][-1:] == [STEPS] or tries == 4:
            name = next(names, "")
    return Told(folder, dict(zip(CASES, answers, strict=True)), saved, failed)


def test_without_a_fault_only_saves_are_reported(told: Told) -> None:
    assert told.saved["none"] == [10, 20, STEPS]
    assert told.failed["none"] == []


def test_the_cost_of_a_save_is_reported_on_every_rank(told: Told) -> None:
    reports = told.answers["none"]["reports"]
    files = [p for p in (told.checkpoints("none") / f"step-{STEPS}").iterdir() if p.name[0] in "_."]
    assert [report["step"] for report in reports] == [STEPS] * 2
    assert [report["num_bytes"] for report in reports] == [
        sum(path.stat().st_size for path in files)
    ] * 2
    assert all(0 < report["block_s"] <= report["write_s"] for report in reports)


def test_a_failed_save_is_retried_1_2_and_4_steps_later(told: Told) -> None:
    failed = told.failed["file in place"]
    assert [failure.step for failure in failed] == [10, 11, 13]
    assert told.saved["file in place"] == [17, 20, STEPS]
    why = failed[0].why
    partial = told.checkpoints("file in place") / "step-10.partial-1"
    assert why == f"rank 0: Not a directory: {partial}"


def test_a_missing_permission_is_reported_with_the_path(told: Told) -> None:
    failed = told.failed["not permitted"]
    assert [failure.step for failure in failed] == [10, 11, 13]
    assert failed[0].why.startswith("rank 0: Permission denied: ")
    assert "step-10.partial-1" in failed[0].why
    assert told.saved["not permitted"] == [17, 20, STEPS]


def test_a_checkpoint_is_not_completed_while_the_fence_cannot_be_read(told: Told) -> None:
    failed = told.failed["unknown"]
    assert [failure.step for failure in failed] == [10, 11, 13]
    assert failed[0].why.endswith("fence.json")
    assert told.saved["unknown"] == [17, 20, STEPS]


@pytest.mark.parametrize(
    ("name", "words"),
    [("vanishing", "No such file or directory"), ("too large", "rank 1: File too large")],
)
def test_a_save_that_fails_in_the_background_is_retried(told: Told, name: str, words: str) -> None:
    """When its failure is known is for the disk to say, and all ranks try again at one step."""
    steps = [failure.step for failure in told.failed[name]]
    assert steps[0] == 10
    assert words in told.failed[name][0].why
    assert "step-10.partial-1" in told.failed[name][0].why
    assert told.saved[name][-2:] == [20, STEPS]
    assert all(step < 20 for step in steps)


@pytest.mark.parametrize("name", list(CASES))
def test_faults_change_no_loss_and_leave_no_half_written_folder(told: Told, name: str) -> None:
    assert losses_of(told.folder / name) == losses_of(told.folder / "none")
    if name != "to the end":
        assert told.answers[name]["code"] == 0
        left = {path.name for path in told.checkpoints(name).iterdir()}
        assert left == {"step-20", f"step-{STEPS}"}


def test_the_last_save_is_retried_and_then_fails_on_every_rank(told: Told) -> None:
    failed = told.failed["to the end"]
    assert [failure.step for failure in failed] == [STEPS] * 4
    errors = told.answers["to the end"]["errors"]
    assert errors[0] == errors[1]
    assert f"the checkpoint of step {STEPS} failed 4 times: rank 0: Not a directory" in errors[0]


def test_a_failed_save_never_damages_the_previous_checkpoint(told: Told) -> None:
    newest, _ = newest_complete(told.checkpoints("to the end").with_name("aside"))
    assert newest is not None
    assert newest.name == "step-20"
