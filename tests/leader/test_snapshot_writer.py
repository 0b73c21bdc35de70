"""A leader writes a snapshot when it has enough new lines and nothing is urgent."""

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from orchestrator.contract.files.fence import Fence, check_leader, write_fence
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.job.stage import Stopping
from orchestrator.job.transitions import fold
from orchestrator.journal import snapshot
from orchestrator.journal.journal import Journal, read
from orchestrator.journal.supervisor import NOTHING, Supervisor
from orchestrator.leader.records.snapshot_writer import CALM, SnapshotWriter
from orchestrator.system import SystemClock
from tests.agent.world import until
from tests.job.job_driver import Job
from tests.leader.leader_world import Led, play


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def supervisor(run_dir: RunDir) -> Iterator[Supervisor]:
    with Journal(run_dir.journal, SystemClock()) as journal:
        yield Supervisor(journal)


def feed(supervisor: Supervisor, job: Job, told: int = 0) -> int:
    for event, _ in job.all[told:]:
        supervisor.feed(event)
    return len(job.all)


def remember(remembering: SnapshotWriter) -> None:
    asyncio.run(remembering.remember(remembering.supervisor.folded))


def test_it_is_due_after_so_many_lines_when_nothing_is_urgent(
    supervisor: Supervisor, run_dir: RunDir
) -> None:
    job = Job().running()
    told = feed(supervisor, job)
    remembering = SnapshotWriter(supervisor, run_dir, lambda: None, every=told + 2)
    assert not remembering.is_due()
    job.steps(2)
    job.exits(1)
    told = feed(supervisor, job, told)
    assert isinstance(supervisor.run.stage, Stopping)
    assert not isinstance(supervisor.run.stage, CALM)
    assert not remembering.is_due(), "hosts are to be told to stop"
    job.stops()
    job.trains()
    told = feed(supervisor, job, told)
    assert remembering.is_due()
    remember(remembering)
    assert not remembering.is_due()
    assert snapshot.load(run_dir) == supervisor.folded
    for number in range(3, 3 + remembering.every):
        assert not remembering.is_due()
        job.steps(number)
        told = feed(supervisor, job, told)
    assert remembering.is_due()


def refuses(code: int) -> Callable[[], None]:
    def guard() -> None:
        raise OSError(code, "the disk does not take it")

    return guard


def test_a_disk_that_does_not_take_it_hinders_no_leader(
    supervisor: Supervisor, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    told = feed(supervisor, Job().running())
    remembering = SnapshotWriter(supervisor, run_dir, refuses(errno.ENOSPC), every=told)
    with caplog.at_level(logging.WARNING):
        remember(remembering)
    assert "failed to write snapshot: [Errno 28]" in caplog.text
    assert not remembering.is_due(), "not tried again with every line"
    assert snapshot.load(run_dir) is NOTHING


def test_a_leader_whose_time_is_over_leaves_the_next_ones_snapshot(
    supervisor: Supervisor, run_dir: RunDir
) -> None:
    job = Job().running()
    told = feed(supervisor, job)
    guard = partial(check_leader, run_dir.fence, "me")
    remembering = SnapshotWriter(supervisor, run_dir, guard, every=1)
    remember(remembering)
    before = run_dir.state.read_bytes()
    write_fence(run_dir.fence, Fence(leader="another", attempt=1))
    job.steps(2)
    feed(supervisor, job, told)
    remember(remembering)
    assert run_dir.state.read_bytes() == before


def test_a_leader_writes_it_down_between_two_decisions(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        job.leader.snapshots.every = 1
        await job.agent("host-1")
        run_dir = job.run_dir

        def is_known() -> bool:
            return snapshot.load(run_dir).place.lines == len(read(run_dir.journal)) == 3

        await until(is_known, "a snapshot of three lines")
        whole = fold(entry.event for entry in read(run_dir.journal))
        assert snapshot.load(run_dir).run == whole

    play(tmp_path, script)
