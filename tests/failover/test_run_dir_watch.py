from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.contract.files.fence import Fence, write_fence
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.failover.run_dir_watch import SURE_S, RunDirGone, RunDirWatch


class Time:
    """Passes when it is told to."""

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


def watched(run_dir: RunDir) -> tuple[RunDirWatch, Time]:
    clock = Time()
    return RunDirWatch(run_dir, clock), clock


def moved(run_dir: RunDir) -> None:
    run_dir.path.rename(run_dir.path.with_name("elsewhere"))


def begun_anew(run_dir: RunDir) -> None:
    moved(run_dir)
    run_dir.path.mkdir()
    run_dir.journal.write_text("{}\n")
    write_fence(run_dir.fence, Fence(leader="a", attempt=1))


def fence_removed(run_dir: RunDir) -> None:
    run_dir.fence.unlink()


def made_a_file(run_dir: RunDir) -> None:
    moved(run_dir)
    run_dir.path.write_text("no folder\n")


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (moved, r"runs/job/journal\.jsonl is gone since 2027-01-15 08:00:01 UTC"),
        (begun_anew, r"journal\.jsonl is another file than this job's since"),
        (fence_removed, r"fence\.json is gone since"),
        (made_a_file, r"journal\.jsonl is gone since"),
    ],
)
def test_a_directory_that_is_lost_is_told_at_the_second_look(
    tmp_path: Path, happens: Callable[[RunDir], None], words: str
) -> None:
    run_dir = a_run(tmp_path)
    watch, clock = watched(run_dir)
    watch.look()
    happens(run_dir)
    clock.sleep(1.0)
    watch.look()
    clock.sleep(SURE_S)
    with pytest.raises(RunDirGone, match=words):
        watch.look()


def test_what_is_there_again_at_the_second_look_was_a_hiccup(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    watch, clock = watched(run_dir)
    for _ in range(3):
        moved(run_dir)
        watch.look()
        clock.sleep(SURE_S)
        run_dir.path.with_name("elsewhere").rename(run_dir.path)
        watch.look()
    assert watch.lost is None


def test_a_new_fence_and_longer_journal_are_no_loss(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    watch, clock = watched(run_dir)
    for attempt in range(2, 5):
        write_fence(run_dir.fence, Fence(leader="a", attempt=attempt))
        with run_dir.journal.open("a") as file:
            file.write("{}\n")
        watch.look()
        clock.sleep(SURE_S)


def test_what_cannot_be_read_is_not_gone(tmp_path: Path) -> None:
    """A loop of links, as an error of the file system that is none of "no such file"."""
    run_dir = a_run(tmp_path)
    watch, clock = watched(run_dir)
    moved(run_dir)
    run_dir.path.symlink_to(run_dir.path)
    for _ in range(3):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            watch.look()
        clock.sleep(SURE_S)
    assert watch.lost is None
