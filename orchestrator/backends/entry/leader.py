"""An agent that leads as well: the leader and the agent of its own host, in one process.

Imported late: an agent that only follows needs nothing of it, and all begin at the same time.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from orchestrator import host_strikes
from orchestrator.agent.agent import WARNINGS, Agent, AgentConfig
from orchestrator.agent.processes.fork_server_client import Standby
from orchestrator.agent.processes.torchrun import with_defaults
from orchestrator.backends.by_name import backend_named
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.fence import GivenUp, check_leader, take_over
from orchestrator.contract.files.last_metric import last_reached
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.actions import EndJob, Requeue
from orchestrator.contract.messages.events import LeaderStarted
from orchestrator.contract.plan import Plan
from orchestrator.errors import BackendError, CannotLead, Unanswered
from orchestrator.failover.ask_scheduler import RETRY_S
from orchestrator.failover.leader_lost import Claim
from orchestrator.failover.stale_launch import later_launch
from orchestrator.failover.takeover import leave_to_the_leader
from orchestrator.job.plans import JobPlan, Refit, Shortage
from orchestrator.job.reports.job_news import TellsCluster
from orchestrator.job.state import Run
from orchestrator.journal import snapshot
from orchestrator.journal.journal import LOCK_PATIENCE_S, Journal
from orchestrator.journal.supervisor import OpenJournal, Supervisor
from orchestrator.leader.backend_calls import Planners
from orchestrator.leader.leader import Granted, Leader
from orchestrator.posix.retry_io import TAKE_OVER_S, once_it_serves
from orchestrator.seams import AllocationBackend, Clock
from orchestrator.system import run_command

log = logging.getLogger(__name__)

Switches = Mapping[str, tuple[str, ...]]
PLANNING = "orchestrator.app.planning.replan"


async def lead(
    config: AgentConfig,
    bind: str,
    scheduled: bool,
    environ: Mapping[str, str],
    clock: Clock,
    port: int = 0,
) -> int:
    """Run the leader, and beside it the agent of its own host."""
    place = config.place
    patience_s = TAKE_OVER_S if scheduled else LOCK_PATIENCE_S
    name = secrets.token_hex(8)
    taking = partial(take_over, place.run_dir.fence, name)
    once_it_serves(taking, "the fence cannot be taken", clock)
    guard = partial(check_leader, place.run_dir.fence, name)
    with Journal(place.run_dir.journal, clock, patience_s, guard) as journal:
        supervisor = Supervisor(journal, known=snapshot.load(place.run_dir))
        job = supervisor.run.job
        assert job is not None
        if job.launch.launch != config.term.launch:  # submitted again since it was looked
            log.error("leaving: %s", later_launch(job.launch, config.term))
            return exit_codes.NOT_ADMITTED
        backend = backend_named(job.backend, environ, clock, run_command)
        # First of all: it imports while the scheduler is asked.
        standby = Standby(place, with_defaults(environ))
        await standby.prepare()
        granted = _granted_at_last(config, backend, supervisor, clock)
        if granted is None:
            await standby.close()
            return exit_codes.FAILED
        # Not when it is needed: what an upgrade has changed by then would not fit together.
        planning = asyncio.create_task(asyncio.to_thread(import_module, PLANNING))
        planners = _planners(place.run_dir, environ)
        leader = Leader(
            supervisor, place.run_dir, config.secret, backend, clock, granted, planners, name
        )
        agent = Agent(config, environ, clock, standby)
        _hear_signals(leader, scheduled)
        serving = leader.serve(place.host, bind, place.address, place.socket.parent, port)
        try:
            with _told(backend, supervisor, place.run_dir, guard):
                return await _run_both(serving, agent, asyncio.create_task(agent.run()))
        finally:
            await planning


async def lead_on(
    agent: Agent,
    following: asyncio.Task[int],
    claim: Claim,
    bind: str,
    environ: Mapping[str, str],
    clock: Clock,
) -> int | None:
    """Have an agent that followed a leader lead from now on, as `claim` lets it; `following` is its
    own run, which goes on beside. None: another agent has claimed the job as well, and leads it
    before this one began."""
    config, place = agent.config, agent.config.place
    with contextlib.closing(claim.turn), claim.journal as journal:
        known = await asyncio.to_thread(snapshot.load, place.run_dir)
        supervisor = await asyncio.to_thread(partial(Supervisor, journal, known=known))
        job, begun = supervisor.run.job, journal.seq
        assert job is not None
        backend = backend_named(job.backend, environ, clock, run_command)
        asking = partial(_granted_at_last, config, backend, supervisor, clock, claim.how)
        granted = await asyncio.to_thread(asking)
        if granted is None:
            agent.leave(exit_codes.FAILED)
            return await following
        planning = asyncio.create_task(asyncio.to_thread(import_module, PLANNING))
        planners = _planners(place.run_dir, environ)
        leader = Leader(
            supervisor, place.run_dir, config.secret, backend, clock, granted, planners, claim.name
        )
        _hear_signals(leader, scheduled=True)
        serving = leader.serve(place.host, bind, place.address, place.socket.parent)
        letting_go = asyncio.create_task(_begun(leader, claim, agent.unheeded))
        try:
            lost = partial(_has_lost, journal, begun)
            return await _run_both(serving, agent, following, lost)
        except _Outrun:
            leave_to_the_leader(agent)
            return None
        finally:
            letting_go.cancel()
            await planning


class _Outrun(Exception):
    """Another agent was faster, and nothing was done."""


def _has_lost(journal: OpenJournal, begun: int) -> None:
    """Raises _Outrun where no line was written yet."""
    if journal.seq == begun:
        raise _Outrun


async def _begun(leader: Leader, claim: Claim, unheeded: str) -> None:
    """The other agents find the new leader: should it end now, the next one's turn has come.
    `unheeded`: the signal that the former leader was too late for."""
    await leader.announced.wait()
    claim.turn.close()
    if unheeded:
        leader.warned(unheeded)


def _hear_signals(leader: Leader, scheduled: bool) -> None:
    loop = asyncio.get_running_loop()
    if not scheduled:
        loop.add_signal_handler(signal.SIGTERM, leader.cancel, "SIGTERM to the leader")
        return
    for number in WARNINGS:
        loop.add_signal_handler(number, leader.warned, number.name)


@contextmanager
def _told(
    backend: AllocationBackend, supervisor: Supervisor, run_dir: RunDir, guard: Callable[[], None]
) -> Iterator[None]:
    """A cluster that shows how its jobs go hears of each line of the journal."""
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
    """They take long to import, and nobody needs them before ranks have run."""

    def fewer(former: Plan, hosts: Sequence[str], switches: Switches) -> JobPlan:
        from orchestrator.app.planning.replan import replan

        return replan(run_dir, former, hosts, switches, environ)

    def less(former: Plan, hosts: Sequence[str], switches: Switches, short: Shortage) -> Refit:
        from orchestrator.app.planning.replan import refit

        return refit(run_dir, former, hosts, switches, short, environ)

    return Planners(fewer=fewer, less=less)


async def _run_both(
    serving: Coroutine[Any, Any, EndJob | Requeue],
    agent: Agent,
    following: asyncio.Task[int],
    given_up: Callable[[], None] = lambda: None,
) -> int:
    """The leader and its own agent: neither outlives the other, unless `given_up`, which is called
    where another leader has taken over, raises."""
    leading = asyncio.create_task(serving)
    stays = False
    try:
        await asyncio.wait([leading, following], return_when=asyncio.FIRST_COMPLETED)
        if not leading.done() and following.result() != exit_codes.OK:
            log.critical("the leader's own agent left: so does the leader")
            return exit_codes.FAILED
        return _exit_code(await leading)
    except GivenUp as exc:
        try:
            given_up()
        except _Outrun:
            stays = True
            log.warning("following again: %s", exc)
            raise
        log.error("leaving: %s", exc)
        return exit_codes.LEADER_LOST
    finally:
        leading.cancel()
        if stays:
            await asyncio.gather(leading, return_exceptions=True)
        else:
            agent.leave(exit_codes.LEADER_LOST)
            await asyncio.gather(leading, following, return_exceptions=True)


def _granted_at_last(
    config: AgentConfig,
    backend: AllocationBackend,
    supervisor: Supervisor,
    clock: Clock,
    former: str = "",
) -> Granted | None:
    """A scheduler that is away comes back; until then nothing can begin, and nothing is lost.
    None: from this place it cannot be asked, and the job ends with that."""
    while True:
        try:
            return _granted(config, backend, supervisor.run, clock, former)
        except Unanswered as exc:
            log.error("what was granted is not known yet, asking again: %s", exc)
            clock.sleep(RETRY_S)
        except CannotLead as exc:
            log.critical("the leader cannot begin: %s", exc)
            at, why = clock.now(), f"{exc.message}; {exc.fix}"
            host, pid = config.place.host, os.getpid()
            supervisor.feed(LeaderStarted(at=at, host=host, pid=pid, unable=why))
            return None


def _granted(
    config: AgentConfig, backend: AllocationBackend, run: Run, clock: Clock, former: str
) -> Granted:
    assert run.job is not None
    launch, reached = run.job.launch, last_reached(config.place.run_dir.metrics)
    if backend.granted is None:
        return Granted(term=config.term, reached=reached)
    allocation = backend.granted.allocation(launch)
    silent_s = {run.leader: max(0.0, clock.now() - run.last_at)} if run.leader else {}
    taken: Mapping[str, str] = {}
    if silent_s and backend.successors is not None:
        try:
            taken = backend.successors.taken(launch, silent_s)
        except BackendError as exc:
            log.warning("why the leader before went is not known: %s", exc)
    path = host_strikes.path_of(config.place.run_dir.path.parent, backend.cluster())
    return Granted(
        term=config.term,
        allocation=allocation,
        exclude=host_strikes.excluded(path, clock.now()),
        always=host_strikes.always(path, clock.now()),
        cleared=host_strikes.cleared(path),
        taken=taken.get(run.leader, ""),
        former=former,
        reached=reached,
        strikes=path,
    )


def _exit_code(ending: EndJob | Requeue) -> int:
    if isinstance(ending, Requeue):
        return exit_codes.REQUEUED
    return exit_codes.FAILED if ending.state == "FAILED" else exit_codes.OK
