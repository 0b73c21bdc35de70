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
from tests.leader.leader_world import LedJob, run_script


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def supervisor(run_dir: RunDir) -> Iterator[Supervisor]:
    with Journal(run_dir.journal, SystemClock()) as journal:
        yield Supervisor(journal)


def feed(supervisor: Supervisor, job: Job, fed: int = 0) -> int:
    for event, _ in job.all[fed:]:
        supervisor.feed(event)
    return len(job.all)


def write(writer: SnapshotWriter) -> None:
    asyncio.run(writer.remember(writer.supervisor.folded))


def test_a_snapshot_is_due_after_enough_lines_if_nothing_is_urgent(
    supervisor: Supervisor, run_dir: RunDir
) -> None:
    job = Job().running()
    fed = feed(supervisor, job)
    writer = SnapshotWriter(supervisor, run_dir, lambda: None, every=fed + 2)
    assert not writer.is_due()
    job.steps(2)
    job.exits(1)
    fed = feed(supervisor, job, fed)
    assert isinstance(supervisor.run.stage, Stopping)
    assert not isinstance(supervisor.run.stage, CALM)
    assert not writer.is_due(), "the order to stop comes first"
    job.stops()
    job.trains()
    fed = feed(supervisor, job, fed)
    assert writer.is_due()
    write(writer)
    assert not writer.is_due()
    assert snapshot.load(run_dir) == supervisor.folded
    for number in range(3, 3 + writer.every):
        assert not writer.is_due()
        job.steps(number)
        fed = feed(supervisor, job, fed)
    assert writer.is_due()


def failing_guard(code: int) -> Callable[[], None]:
    def guard() -> None:
        raise OSError(code, "the disk refuses it")

    return guard


def test_a_failed_write_does_not_stop_the_leader(
    supervisor: Supervisor, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    fed = feed(supervisor, Job().running())
    writer = SnapshotWriter(supervisor, run_dir, failing_guard(errno.ENOSPC), every=fed)
    with caplog.at_level(logging.WARNING):
        write(writer)
    assert "failed to write snapshot: [Errno 28]" in caplog.text
    assert not writer.is_due(), "the write is not repeated at every line"
    assert snapshot.load(run_dir) is NOTHING


def test_a_replaced_leader_does_not_overwrite_the_next_snapshot(
    supervisor: Supervisor, run_dir: RunDir
) -> None:
    job = Job().running()
    fed = feed(supervisor, job)
    guard = partial(check_leader, run_dir.fence, "me")
    writer = SnapshotWriter(supervisor, run_dir, guard, every=1)
    write(writer)
    before = run_dir.state.read_bytes()
    write_fence(run_dir.fence, Fence(leader="another", attempt=1))
    job.steps(2)
    feed(supervisor, job, fed)
    write(writer)
    assert run_dir.state.read_bytes() == before


def test_a_leader_writes_a_snapshot_between_two_decisions(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        job.leader.snapshots.every = 1
        await job.agent("host-1")
        run_dir = job.run_dir

        def is_known() -> bool:
            return snapshot.load(run_dir).place.lines == len(read(run_dir.journal)) == 3

        await until(is_known, "a snapshot of three lines")
        replayed = fold(entry.event for entry in read(run_dir.journal))
        assert snapshot.load(run_dir).run == replayed

    run_script(tmp_path, script)
