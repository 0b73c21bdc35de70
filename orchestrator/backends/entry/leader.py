"""The leader and the agent of its host, in one process.

Imported only by an agent that leads, so that the other agents start faster.
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
from orchestrator.posix.retry_io import TAKE_OVER_S, retry_io
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
    """Run the leader and the agent of its host."""
    place = config.place
    patience_s = TAKE_OVER_S if scheduled else LOCK_PATIENCE_S
    name = secrets.token_hex(8)
    taking = partial(take_over, place.run_dir.fence, name)
    retry_io(taking, "failed to take the fence", clock)
    guard = partial(check_leader, place.run_dir.fence, name)
    with Journal(place.run_dir.journal, clock, patience_s, guard) as journal:
        supervisor = Supervisor(journal, known=snapshot.load(place.run_dir))
        job = supervisor.run.job
        assert job is not None
        if job.launch.launch != config.term.launch:  # submitted again since the check in `agent.py`
            log.error("exiting: %s", later_launch(job.launch, config.term))
            return exit_codes.NOT_ADMITTED
        backend = backend_named(job.backend, environ, clock, run_command)
        # Started first, because it imports torch while the scheduler is asked.
        standby = Standby(place, with_defaults(environ))
        await standby.prepare()
        granted = _await_granted(config, backend, supervisor, clock)
        if granted is None:
            await standby.close()
            return exit_codes.FAILED
        # Imported now and not when it is needed: an upgrade until then could mix two versions.
        planning = asyncio.create_task(asyncio.to_thread(import_module, PLANNING))
        planners = _planners(place.run_dir, environ)
        leader = Leader(
            supervisor, place.run_dir, config.secret, backend, clock, granted, planners, name
        )
        agent = Agent(config, environ, clock, standby)
        _handle_signals(leader, scheduled)
        serving = leader.serve(place.host, bind, place.address, place.socket.parent, port)
        try:
            with _reporting(backend, supervisor, place.run_dir, guard):
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
    """Make an agent that followed a leader the leader. `following`: its running agent task.

    Returns the exit code; None: another agent took over before this one wrote to the journal, so
    this one continues to follow.
    """
    config, place = agent.config, agent.config.place
    with contextlib.closing(claim.turn), claim.journal as journal:
        known = await asyncio.to_thread(snapshot.load, place.run_dir)
        supervisor = await asyncio.to_thread(partial(Supervisor, journal, known=known))
        job, begun = supervisor.run.job, journal.seq
        assert job is not None
        backend = backend_named(job.backend, environ, clock, run_command)
        asking = partial(_await_granted, config, backend, supervisor, clock, claim.how)
        granted = await asyncio.to_thread(asking)
        if granted is None:
            agent.leave(exit_codes.FAILED)
            return await following
        planning = asyncio.create_task(asyncio.to_thread(import_module, PLANNING))
        planners = _planners(place.run_dir, environ)
        leader = Leader(
            supervisor, place.run_dir, config.secret, backend, clock, granted, planners, claim.name
        )
        _handle_signals(leader, scheduled=True)
        serving = leader.serve(place.host, bind, place.address, place.socket.parent)
        letting_go = asyncio.create_task(_begun(leader, claim, agent.unheeded))
        try:
            lost = partial(_has_lost, journal, begun)
            return await _run_both(serving, agent, following, lost)
        except _LostRace:
            leave_to_the_leader(agent)
            return None
        finally:
            letting_go.cancel()
            await planning


class _LostRace(Exception):
    """Another agent took over first, and this one did nothing yet."""


def _has_lost(journal: OpenJournal, begun: int) -> None:
    """Raises _LostRace if this leader wrote no journal line yet."""
    if journal.seq == begun:
        raise _LostRace


async def _begun(leader: Leader, claim: Claim, unheeded: str) -> None:
    """When the other agents can find the new leader, release the turn, so that the next agent can
    take over if this one dies. `unheeded`: a signal that the former leader did not handle."""
    await leader.announced.wait()
    claim.turn.close()
    if unheeded:
        leader.warned(unheeded)


def _handle_signals(leader: Leader, scheduled: bool) -> None:
    loop = asyncio.get_running_loop()
    if not scheduled:
        loop.add_signal_handler(signal.SIGTERM, leader.cancel, "SIGTERM to the leader")
        return
    for number in WARNINGS:
        loop.add_signal_handler(number, leader.warned, number.name)


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


async def _run_both(
    serving: Coroutine[Any, Any, EndJob | Requeue],
    agent: Agent,
    following: asyncio.Task[int],
    given_up: Callable[[], None] = lambda: None,
) -> int:
    """Run the leader and its agent until one ends, and end the other.

    `given_up` is called if another leader has taken over. If it raises _LostRace, the agent
    continues.
    """
    leading = asyncio.create_task(serving)
    stays = False
    try:
        await asyncio.wait([leading, following], return_when=asyncio.FIRST_COMPLETED)
        if not leading.done() and following.result() != exit_codes.OK:
            log.critical("exiting: the agent of the leader's host exited")
            return exit_codes.FAILED
        return _exit_code(await leading)
    except GivenUp as exc:
        try:
            given_up()
        except _LostRace:
            stays = True
            log.warning("following again: %s", exc)
            raise
        log.error("exiting: %s", exc)
        return exit_codes.LEADER_LOST
    finally:
        leading.cancel()
        if stays:
            await asyncio.gather(leading, return_exceptions=True)
        else:
            agent.leave(exit_codes.LEADER_LOST)
            await asyncio.gather(leading, following, return_exceptions=True)


def _await_granted(
    config: AgentConfig,
    backend: AllocationBackend,
    supervisor: Supervisor,
    clock: Clock,
    former: str = "",
) -> Granted | None:
    """What the scheduler granted. Retries while the scheduler is unreachable, because the job
    cannot start without the answer. None: this host cannot ask the scheduler, so the job ends."""
    while True:
        try:
            return _granted(config, backend, supervisor.run, clock, former)
        except Unanswered as exc:
            log.error("failed to read the allocation, retrying: %s", exc)
            clock.sleep(RETRY_S)
        except CannotLead as exc:
            log.critical("the leader cannot start: %s", exc)
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
    leader, silent = run.scheduler.leader, max(0.0, clock.now() - run.history.last_at)
    silent_s = {leader: silent} if leader else {}
    taken: Mapping[str, str] = {}
    if silent_s and backend.successors is not None:
        try:
            taken = backend.successors.taken(launch, silent_s)
        except BackendError as exc:
            log.warning("failed to find out why the former leader was lost: %s", exc)
    path = host_strikes.path_of(config.place.run_dir.path.parent, backend.cluster())
    return Granted(
        term=config.term,
        allocation=allocation,
        exclude=host_strikes.excluded(path, clock.now()),
        always=host_strikes.always(path, clock.now()),
        cleared=host_strikes.cleared(path),
        taken=taken.get(run.scheduler.leader, ""),
        former=former,
        reached=reached,
        strikes=path,
    )


def _exit_code(ending: EndJob | Requeue) -> int:
    if isinstance(ending, Requeue):
        return exit_codes.REQUEUED
    return exit_codes.FAILED if ending.state == "FAILED" else exit_codes.OK
