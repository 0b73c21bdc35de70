"""Tells the site's index how the job is, so that people without access to its run directory see it.

Other users read it, so it has numbers, names of hosts and of failure classes, but no text that a
program printed.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
from msgspec.structs import replace

from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.fleet.summary import JobSummary, summary_of
from orchestrator.dashboard.job_view.replayed_job import ReplayedJob
from orchestrator.dashboard.metrics import read_ends
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.time_spent.account import TimeAccount, TimeSpent
from orchestrator.dashboard.time_spent.pauses import Pause, PauseTail
from orchestrator.errors import JobError
from orchestrator.job.state import Run
from orchestrator.journal.journal import Tail
from orchestrator.journal.supervisor import Supervisor
from orchestrator.registry.store import publish
from orchestrator.registry.submitted import entry_of
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

EVERY_S = 10.0


@asynccontextmanager
async def publishing(
    supervisor: Supervisor, run_dir: RunDir, environ: Mapping[str, str], clock: Clock
) -> AsyncIterator[None]:
    """Publish every `EVERY_S` while the context is active, and once at its end."""
    if not environ.get(env.INDEX):
        yield
        return

    publisher = _Publisher(run_dir, environ, clock)

    async def publish_again() -> None:
        while True:
            await publisher.publish(supervisor.run)
            await asyncio.sleep(EVERY_S)

    task = asyncio.create_task(publish_again())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await publisher.publish(supervisor.run)


class _Publisher:
    """Reads only what was added to the journal and the metrics since the last report."""

    def __init__(self, run_dir: RunDir, environ: Mapping[str, str], clock: Clock) -> None:
        self.run_dir, self.environ, self.clock = run_dir, environ, clock
        self.account, self.entries = TimeAccount(), Tail(run_dir.journal)
        self.pauses, self.paused = PauseTail(run_dir.metrics), list[Pause]()

    async def publish(self, run: Run) -> None:
        """A failure is only logged: the index is for people, and the job needs nothing from it."""
        try:
            await asyncio.to_thread(self._write, run)
        except (OSError, ValueError, JobError) as exc:
            log.info("failed to write the shared index: %s", exc)

    def _write(self, run: Run) -> None:
        if run.job is None:
            return
        now = self.clock.now()
        self.account.add(self.entries.each())
        self.paused += self.pauses.more()
        summary = public_summary(run, self.run_dir, now, self.account.spent(self.paused, now))
        report = msgspec.Raw(msgspec.json.encode(summary))
        entry = replace(entry_of(run.job, self.run_dir.path, run.job.at), report=report)
        publish(entry, self.environ)


def public_summary(
    run: Run, run_dir: RunDir, now: float, spent: TimeSpent | None = None
) -> JobSummary:
    snapshot = Snapshot(
        run_dir=run_dir,
        seen=ReplayedJob(run=run),
        progress=read_ends(run_dir.metrics),
        leader_alive=True,
        now=now,
    )
    summary = summary_of(snapshot, spent)
    note = _failure(run) if summary.state in ("RECOVERING", "FAILED") else ""
    return replace(summary, reason=note, note=note, scheduler=None, loss=None, updated_at=now)


def _failure(run: Run) -> str:
    if not run.history.incidents:
        return ""
    last = run.history.incidents[-1]
    return f"{last.failure or last.kind}: {last.culprit}"
