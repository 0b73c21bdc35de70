"""The leader and the agent of its host, in one process: the real seams of `leader_main.py`.

Imported only by an agent that leads, so that the other agents start faster.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib import import_module

from orchestrator import host_strikes
from orchestrator.agent.agent import Agent, AgentConfig
from orchestrator.agent.processes.fork_server_client import Standby
from orchestrator.agent.processes.torchrun import with_defaults
from orchestrator.backends.by_name import backend_named
from orchestrator.contract.files.last_metric import last_reached
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import NoticeSent
from orchestrator.contract.plan import Plan
from orchestrator.failover.leader_lost import Claim
from orchestrator.failover.storage import FailoverFiles
from orchestrator.job.plans import JobPlan, Refit, Shortage
from orchestrator.job.reports.job_news import TellsCluster
from orchestrator.journal import snapshot
from orchestrator.journal.journal import entries_of
from orchestrator.journal.supervisor import OpenJournal, Supervisor
from orchestrator.leader import leader_main
from orchestrator.leader.backend_calls import Planners
from orchestrator.leader.leader import HostRecords, Leader
from orchestrator.leader.leader_main import LeadingSeams, Listening
from orchestrator.leader.records.index_writer import publishing
from orchestrator.seams import AllocationBackend, Clock
from orchestrator.system import run_command

Switches = Mapping[str, tuple[str, ...]]
LATE_IMPORTS = ("orchestrator.app.planning.replan", "orchestrator.leader.records.speed_writer")
"""Modules that a leader may need only after weeks."""


async def lead(
    config: AgentConfig, bind: str, environ: Mapping[str, str], clock: Clock, port: int = 0
) -> int:
    """Run the leader and the agent of its host."""
    place = config.place
    standby = Standby(place, with_defaults(environ))
    try:
        return await leader_main.lead(
            config,
            Listening(bind=bind, folder=place.socket.parent, port=port),
            _seams(config, environ, clock),
            partial(Agent, config, environ, clock, standby),
            # Prepared before the scheduler is asked, because it imports torch meanwhile.
            prepare=standby.prepare,
        )
    finally:
        await standby.close()


async def lead_on(
    agent: Agent,
    following: asyncio.Task[int],
    claim: Claim,
    bind: str,
    environ: Mapping[str, str],
    clock: Clock,
) -> int | None:
    """Make an agent that followed a leader the leader."""
    listening = Listening(bind=bind, folder=agent.config.place.socket.parent)
    seams = _seams(agent.config, environ, clock)
    return await leader_main.lead_on(agent, following, claim, listening, seams)


def _seams(config: AgentConfig, environ: Mapping[str, str], clock: Clock) -> LeadingSeams:
    run_dir = config.place.run_dir
    return LeadingSeams(
        storage=FailoverFiles(run_dir, clock),
        backend_named=lambda name: backend_named(name, environ, clock, run_command),
        supervisor=partial(_supervisor, run_dir),
        reached=partial(last_reached, run_dir.metrics),
        records=partial(_records, run_dir, clock),
        planners=_planners(run_dir, environ),
        clock=clock,
        while_leading=partial(_while_leading, config, environ, clock),
    )


def _supervisor(run_dir: RunDir, journal: OpenJournal) -> Supervisor:
    return Supervisor(journal, known=snapshot.load(run_dir))


def _records(run_dir: RunDir, clock: Clock, backend: AllocationBackend) -> HostRecords:
    path, now = host_strikes.path_of(run_dir.path.parent, backend.cluster()), clock.now()
    return HostRecords(
        path=path,
        exclude=host_strikes.excluded(path, now),
        always=host_strikes.always(path, now),
        cleared=host_strikes.cleared(path),
    )


@asynccontextmanager
async def _while_leading(
    config: AgentConfig, environ: Mapping[str, str], clock: Clock, leader: Leader
) -> AsyncIterator[None]:
    # Imported now and not when it is needed: an upgrade until then could mix two versions.
    importing = asyncio.create_task(asyncio.to_thread(_import_late))
    run_dir = config.place.run_dir
    try:
        async with publishing(leader.supervisor, run_dir, environ, clock):
            with _reporting(leader.backend, leader.supervisor, run_dir, leader.right_to_lead.guard):
                async with (
                    _serving(config, leader, environ, clock),
                    _notifying(run_dir, leader, environ),
                    _exporting(run_dir, leader, environ),
                ):
                    yield
    finally:
        await importing


def _import_late() -> None:
    for name in LATE_IMPORTS:
        import_module(name)


@asynccontextmanager
async def _serving(
    config: AgentConfig, leader: Leader, environ: Mapping[str, str], clock: Clock
) -> AsyncIterator[None]:
    """Serve metrics and pages, if the spec asks for it."""
    if leader.job.web is None:
        yield
        return
    # Few jobs need it, and the others start faster without it.
    from orchestrator.web.of_leader import LeaderWeb, serving_job

    needed = LeaderWeb(
        run_dir=config.place.run_dir,
        secret=config.secret,
        folder=config.place.socket.parent,
        figures=lambda: leader.monitor.rank_figures(clock.monotonic()),
    )
    async with serving_job(leader.job.web, needed, environ, clock):
        yield


@asynccontextmanager
async def _notifying(
    run_dir: RunDir, leader: Leader, environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Tell people of incidents and of the end, if the spec asks for it."""
    if not leader.job.notify:
        yield
        return
    from orchestrator.notify.notifier import Notifier, notifying

    async def finish() -> None:
        await notifier.finish()
        if leader.ending is None:
            return  # the run directory is gone, and its journal with it
        # After the ending nothing takes events from the queue, not even those that came before it.
        # More may come during each write.
        while leader.events.waiting:
            event = leader.events.waiting.popleft()
            if isinstance(event, NoticeSent):
                await leader.worker(leader.supervisor.feed, event)

    sent = await leader.worker(_notices_sent, run_dir)
    supervisor, happened = leader.supervisor, leader.events.happened
    notifier = Notifier(
        leader.job.notify,
        run_dir,
        lambda: supervisor.run,
        leader.steady.now,
        happened,
        environ,
        sent,
    )
    leader.before_release = finish
    async with notifying(notifier):
        yield


@asynccontextmanager
async def _exporting(
    run_dir: RunDir, leader: Leader, environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Export spans to a collector, if the environment names one."""
    if not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in environ):
        yield
        return
    # Few jobs need it, and the others start faster without it.
    from orchestrator.notify.span_exporter import SpanExporter, collector_of, exporting

    collector = await asyncio.to_thread(collector_of, environ)
    if collector is None:
        yield
        return
    supervisor, before = leader.supervisor, leader.before_release
    exporter = SpanExporter(collector, run_dir, lambda: supervisor.run, environ)

    async def finish() -> None:
        # At the same time, because each of them may take its whole limit.
        await asyncio.gather(before(), exporter.finish())

    leader.before_release = finish
    async with exporting(exporter):
        yield


def _notices_sent(run_dir: RunDir) -> list[NoticeSent]:
    found = (entry.event for entry in entries_of(run_dir.journal, NoticeSent))
    return [event for event in found if isinstance(event, NoticeSent)]


@contextmanager
def _reporting(
    backend: AllocationBackend, supervisor: Supervisor, run_dir: RunDir, guard: Callable[[], None]
) -> Iterator[None]:
    """Report each journal line to a cluster that shows the state of jobs."""
    job = supervisor.run.job
    if job is None or not isinstance(backend, TellsCluster):
        yield
        return
    reporter = backend.reporter(job.launch, run_dir, guard)
    supervisor.tell = reporter.hear
    try:
        yield
    finally:
        reporter.close()


def _planners(run_dir: RunDir, environ: Mapping[str, str]) -> Planners:
    """Planners, imported at the first use because that takes long."""

    def fewer(former: Plan, hosts: Sequence[str], switches: Switches) -> JobPlan:
        from orchestrator.app.planning.replan import replan

        return replan(run_dir, former, hosts, switches, environ)

    def less(former: Plan, hosts: Sequence[str], switches: Switches, short: Shortage) -> Refit:
        from orchestrator.app.planning.replan import refit

        return refit(run_dir, former, hosts, switches, short, environ)

    return Planners(fewer=fewer, less=less)
