import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from ndctl.rank.fence import GivenUp
from orchestrator.backends.entry.agent import _hold_host
from orchestrator.contract.files.fence import read_fence, take_over
from orchestrator.contract.files.leader_file import Term, announce, leader_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.posix.retry_io import retry_io
from tests.agent.world import TurnedClock


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO])
def test_a_temporary_error_is_retried(number: int, caplog: pytest.LogCaptureFixture) -> None:
    clock, left = TurnedClock(), [number] * 3

    def work() -> str:
        if left:
            code = left.pop()
            raise OSError(code, os.strerror(code))
        return "done"

    begun = clock.time
    assert retry_io(work, "the fence cannot be taken", clock) == "done"
    assert clock.time - begun == 3.0
    assert len(caplog.messages) == 3
    assert caplog.messages[0].startswith("the fence cannot be taken, trying again: ")
    assert os.strerror(number) in caplog.messages[0]


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError, GivenUp])
def test_a_lasting_error_is_raised_at_once(error: type[OSError]) -> None:
    def work() -> None:
        raise error("for good")

    with pytest.raises(error, match="for good"):
        retry_io(work, "it fails", TurnedClock())


class Emptied(TurnedClock):
    """A disk that has space again after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self.limits[1]))

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.make_room()

    def make_room(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


def taken_over(run_dir: RunDir) -> None:
    take_over(run_dir.fence, "me")


def announced(run_dir: RunDir) -> None:
    announce(run_dir, Term(1), "::1", 4)


@pytest.mark.parametrize("work", [taken_over, announced])
def test_a_leader_starts_once_the_disk_has_space(
    tmp_path: Path, work: Callable[[RunDir], None]
) -> None:
    run_dir, clock = RunDir(tmp_path), Emptied()
    try:
        with pytest.raises(OSError, match="File too large"):
            work(run_dir)
        retry_io(lambda: work(run_dir), "there is no room", clock)
    finally:
        clock.make_room()
    if work is announced:
        assert leader_of(run_dir, Term(1))["port"] == 4
    else:
        fence = read_fence(run_dir.fence)
        assert fence is not None
        assert fence.leader == "me"


def test_an_agent_takes_its_lock_on_a_full_disk(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    clock = Emptied()
    try:
        assert _hold_host(run_dir, "host-1", clock)
    finally:
        clock.make_room()
