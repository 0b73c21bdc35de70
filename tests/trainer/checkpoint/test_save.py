"""A failed save leads to a warning and a retry. Training and the previous checkpoint survive."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ndctl.rank.priority import NICE
from orchestrator.contract.files.checkpoint_names import newest_complete
from orchestrator.contract.messages.events import CheckpointFailed, CheckpointSaved
from tests.trainer.checkpoint.checkpoint_launch import listening, with_fence
from tests.trainer.launch.tiny_runs import LIGHT, losses_of, tiny, work

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("saves")]

STEPS = 22
FROM, UNTIL = 9, 14
"""Regular saves are due at steps 10 and 20."""
FOREVER = {"from": STEPS - 1, "until": STEPS + 1}
CASES: Mapping[str, dict[str, Any]] = {
    "none": {"fault": "too large", "from": 0, "until": 0, "async": True},
    "file in place": {"fault": "file in place", "async": False},
    "not permitted": {"fault": "not permitted", "async": False},
    "vanishing": {"fault": "vanishing", "async": True},
    "too large": {"fault": "too large", "async": True},
    "unreadable fence": {"fault": "unreadable fence", "async": False},
    "to the end": {"fault": "file in place", "async": False, **FOREVER},
}


@dataclass(frozen=True)
class SaveResults:
    """The answers of all cases, and the saves and failures that rank 0 reported."""

    folder: Path
    answers: Mapping[str, dict[str, Any]]
    saved: Mapping[str, list[int]]
    failed: Mapping[str, list[CheckpointFailed]]

    def checkpoints(self, name: str) -> Path:
        return self.folder / name / "checkpoints"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> SaveResults:
    """Run all cases in order on the same two ranks, with the socket of an agent."""
    folder = tmp_path_factory.mktemp("saves")
    cases = []
    for name, case in CASES.items():
        checkpoint = {"every_steps": 10, "async": case["async"]}
        two = {"parallel": {"dp_shard": 2}, "checkpoint": checkpoint}
        config = tiny(folder / name, steps=STEPS, **two, **LIGHT)
        cases.append({"from": FROM, "until": UNTIL, **case, "config": with_fence(config)})
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
    return SaveResults(folder, dict(zip(CASES, answers, strict=True)), saved, failed)


def test_without_a_fault_only_saves_are_reported(results: SaveResults) -> None:
    assert results.saved["none"] == [10, 20, STEPS]
    assert results.failed["none"] == []


def test_the_cost_of_a_save_is_reported_on_every_rank(results: SaveResults) -> None:
    reports = results.answers["none"]["reports"]
    files = [
        p for p in (results.checkpoints("none") / f"step-{STEPS}").iterdir() if p.name[0] in "_."
    ]
    assert [report["step"] for report in reports] == [STEPS] * 2
    assert [report["num_bytes"] for report in reports] == [
        sum(path.stat().st_size for path in files)
    ] * 2
    assert all(0 < report["block_s"] <= report["write_s"] for report in reports)


def test_threads_that_write_give_way_to_training(results: SaveResults) -> None:
    *saves, own = results.answers["none"]["nice"]
    background = max(own, NICE)
    assert saves == [background, background, own], "training waits for its last save"


def test_a_failed_save_is_retried_1_2_and_4_steps_later(results: SaveResults) -> None:
    failed = results.failed["file in place"]
    assert [failure.step for failure in failed] == [10, 11, 13]
    assert results.saved["file in place"] == [17, 20, STEPS]
    why = failed[0].why
    partial = results.checkpoints("file in place") / "step-10.partial-1"
    assert why == f"rank 0: Not a directory: {partial}"


def test_a_missing_permission_is_reported_with_the_path(results: SaveResults) -> None:
    failed = results.failed["not permitted"]
    assert [failure.step for failure in failed] == [10, 11, 13]
    assert failed[0].why.startswith("rank 0: Permission denied: ")
    assert "step-10.partial-1" in failed[0].why
    assert results.saved["not permitted"] == [17, 20, STEPS]


def test_a_checkpoint_is_not_completed_while_the_fence_cannot_be_read(results: SaveResults) -> None:
    failed = results.failed["unreadable fence"]
    assert [failure.step for failure in failed] == [10, 11, 13]
    assert failed[0].why.endswith("fence.json")
    assert results.saved["unreadable fence"] == [17, 20, STEPS]


@pytest.mark.parametrize(
    ("name", "words"),
    [("vanishing", "No such file or directory"), ("too large", "rank 1: File too large")],
)
def test_a_save_that_fails_in_the_background_is_retried(
    results: SaveResults, name: str, words: str
) -> None:
    """The disk decides when the failure is known. All ranks retry at the same step."""
    steps = [failure.step for failure in results.failed[name]]
    assert steps[0] == 10
    assert words in results.failed[name][0].why
    assert "step-10.partial-1" in results.failed[name][0].why
    assert results.saved[name][-2:] == [20, STEPS]
    assert all(step < 20 for step in steps)


@pytest.mark.parametrize("name", list(CASES))
def test_faults_change_no_loss_and_leave_no_half_written_folder(
    results: SaveResults, name: str
) -> None:
    assert losses_of(results.folder / name) == losses_of(results.folder / "none")
    if name != "to the end":
        assert results.answers[name]["code"] == 0
        left = {path.name for path in results.checkpoints(name).iterdir()}
        assert left == {"step-20", f"step-{STEPS}"}


def test_the_last_save_is_retried_and_then_fails_on_every_rank(results: SaveResults) -> None:
    failed = results.failed["to the end"]
    assert [failure.step for failure in failed] == [STEPS] * 4
    errors = results.answers["to the end"]["errors"]
    assert errors[0] == errors[1]
    assert f"the checkpoint of step {STEPS} failed 4 times: rank 0: Not a directory" in errors[0]


def test_a_failed_save_never_damages_the_previous_checkpoint(results: SaveResults) -> None:
    newest, _ = newest_complete(results.checkpoints("to the end").with_name("aside"))
    assert newest is not None
    assert newest.name == "step-20"
