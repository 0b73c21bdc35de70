"""A run directory that is moved, replaced or deleted is detected at the second look."""

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.contract.files.fence import Fence, write_fence
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.failover.run_dir_watch import SURE_S, RunDirGone, RunDirWatch


class ManualClock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return 1_800_000_000.0 + self.seconds

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def a_run(folder: Path) -> RunDir:
    run_dir = RunDir(folder / "runs" / "job")
    run_dir.path.mkdir(parents=True)
    run_dir.journal.write_text("{}\n")
    write_fence(run_dir.fence, Fence(leader="a", attempt=1))
    return run_dir


def watch_of(run_dir: RunDir) -> tuple[RunDirWatch, ManualClock]:
    clock = ManualClock()
    return RunDirWatch(run_dir, clock), clock


def move(run_dir: RunDir) -> None:
    run_dir.path.rename(run_dir.path.with_name("elsewhere"))


def replace_by_new_run(run_dir: RunDir) -> None:
    move(run_dir)
    run_dir.path.mkdir()
    run_dir.journal.write_text("{}\n")
    write_fence(run_dir.fence, Fence(leader="a", attempt=1))


def remove_fence(run_dir: RunDir) -> None:
    run_dir.fence.unlink()


def replace_by_file(run_dir: RunDir) -> None:
    move(run_dir)
    run_dir.path.write_text("no folder\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (move, r"runs/job/journal\.jsonl is gone since 2027-01-15 08:00:01 UTC"),
        (move, r"If it was moved, move away what is at \S+runs/job now"),
        (replace_by_new_run, r"journal\.jsonl is another file than this job's since"),
        (remove_fence, r"fence\.json is gone since"),
        (replace_by_file, r"journal\.jsonl is gone since"),
    ],
)
def test_a_lost_directory_is_reported_at_the_second_look(
    tmp_path: Path, change: Callable[[RunDir], None], words: str
) -> None:
    run_dir = a_run(tmp_path)
    watch, clock = watch_of(run_dir)
    watch.look()
    change(run_dir)
    clock.sleep(1.0)
    watch.look()
    clock.sleep(SURE_S)
    with pytest.raises(RunDirGone, match=words):
        watch.look()


def test_a_directory_that_is_back_at_the_second_look_is_not_lost(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    watch, clock = watch_of(run_dir)
    for _ in range(3):
        move(run_dir)
        watch.look()
        clock.sleep(SURE_S)
        run_dir.path.with_name("elsewhere").rename(run_dir.path)
        watch.look()
    assert watch.lost is None


def test_a_new_fence_and_longer_journal_are_no_loss(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    watch, clock = watch_of(run_dir)
    for attempt in range(2, 5):
        write_fence(run_dir.fence, Fence(leader="a", attempt=attempt))
        with run_dir.journal.open("a") as file:
            file.write("{}\n")
        watch.look()
        clock.sleep(SURE_S)


def test_an_unreadable_directory_is_not_lost(tmp_path: Path) -> None:
    """A loop of symbolic links gives an error other than "no such file"."""
    run_dir = a_run(tmp_path)
    watch, clock = watch_of(run_dir)
    move(run_dir)
    run_dir.path.symlink_to(run_dir.path)
    for _ in range(3):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            watch.look()
        clock.sleep(SURE_S)
    assert watch.lost is None
