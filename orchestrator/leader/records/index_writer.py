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
from orchestrator.dashboard.metrics import read_ends
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.view import ReplayedJob
from orchestrator.job.state import Run
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

    async def publish_again() -> None:
        while True:
            await _publish(supervisor.run, run_dir, environ, clock)
            await asyncio.sleep(EVERY_S)

    task = asyncio.create_task(publish_again())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await _publish(supervisor.run, run_dir, environ, clock)


async def _publish(run: Run, run_dir: RunDir, environ: Mapping[str, str], clock: Clock) -> None:
    """A failure is only logged: the index is for people, and the job needs nothing from it."""
    if run.job is None:
        return
    try:
        summary = await asyncio.to_thread(public_summary, run, run_dir, clock.now())
        entry = replace(
            entry_of(run.job, run_dir.path, run.job.at),
            report=msgspec.Raw(msgspec.json.encode(summary)),
        )
        await asyncio.to_thread(publish, entry, environ)
    except (OSError, ValueError) as exc:
        log.info("failed to write the shared index: %s", exc)


def public_summary(run: Run, run_dir: RunDir, now: float) -> JobSummary:
    snapshot = Snapshot(
        run_dir=run_dir,
        seen=ReplayedJob(run=run),
        progress=read_ends(run_dir.metrics),
        leader_alive=True,
        now=now,
    )
    summary = summary_of(snapshot)
    note = _failure(run) if summary.state in ("RECOVERING", "FAILED") else ""
    return replace(summary, reason=note, note=note, scheduler=None, loss=None, updated_at=now)


def _failure(run: Run) -> str:
    if not run.history.incidents:
        return ""
    last = run.history.incidents[-1]
    return f"{last.failure or last.kind}: {last.culprit}"
