"""A leading process from start to exit: fence, journal, `Leader` and the agent of its host.

`backends/entry/leader.py` passes the real seams, and the simulation passes simulated ones, so that
both run the same code.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from ndctl.rank.fence import GivenUp
from orchestrator.agent.agent import WARNINGS, Agent, AgentConfig
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.messages.actions import EndJob, Requeue
from orchestrator.contract.messages.events import LeaderStarted
from orchestrator.errors import BackendError, CannotLead, Unanswered
from orchestrator.failover.ask_scheduler import RETRY_S
from orchestrator.failover.leader_lost import Claim
from orchestrator.failover.stale_launch import later_launch
from orchestrator.failover.storage import FailoverStorage
from orchestrator.failover.takeover import handle_signals
from orchestrator.job.state import Run
from orchestrator.journal.journal import LOCK_PATIENCE_S
from orchestrator.journal.supervisor import OpenJournal, Supervisor
from orchestrator.leader.backend_calls import Planners
from orchestrator.leader.leader import Granted, HostRecords, Leader, LeaderSeams, Lost
from orchestrator.posix.retry_io import TAKE_OVER_S, retry_io_in
from orchestrator.seams import AllocationBackend, Clock, Worker

log = logging.getLogger(__name__)

ORDERED = (exit_codes.OK, exit_codes.REQUEUED)
"""Exit codes of an agent that its leader ordered to exit."""


class LeadingSeams(Struct, frozen=True, kw_only=True):
    """What a leading process uses of the world outside it. The worker runs all that may block."""

    storage: FailoverStorage
    backend_named: Callable[[str], AllocationBackend]
    supervisor: Callable[[OpenJournal], Supervisor]
    """Reads the whole journal. May block."""
    reached: Callable[[], Reached | None]
    """The progress that the newest attempt has logged. May block."""
    records: Callable[[AllocationBackend], HostRecords]
    """Called only if a scheduler granted the hosts. May block."""
    planners: Planners
    clock: Clock
    while_leading: Callable[[Leader], AbstractAsyncContextManager[None]]
    """Entered as long as the leader runs."""
    leader: LeaderSeams | None = None
    """None: the real ones."""
    worker: Worker = asyncio.to_thread


class Listening(Struct, frozen=True, kw_only=True):
    """Where the leader listens for agents."""

    bind: str
    folder: Path
    """For files of this process only."""
    port: int = 0
    """0: any free port."""


async def lead(
    config: AgentConfig,
    listening: Listening,
    seams: LeadingSeams,
    new_agent: Callable[[], Agent],
    *,
    prepare: Callable[[], Awaitable[None]],
) -> int:
    """Run the leader and the agent of its host; return the exit code.

    `new_agent` is called when the scheduler has granted the hosts, because an agent counts the
    time in which it finds no leader. `prepare` is called as soon as this process has the journal.

    Raises:
        InUse: another process keeps the journal.
    """
    worker, storage, name = seams.worker, seams.storage, secrets.token_hex(8)
    # First the fence: a former leader that still runs sees it, exits, and so releases the journal.
    taking = partial(storage.take_over, name)
    await retry_io_in(worker, taking, "failed to take the fence", asyncio.sleep)
    # A leader that was replaced needs time to see the fence and to close the journal.
    patience_s = TAKE_OVER_S if config.scheduled else LOCK_PATIENCE_S
    opening = partial(storage.open_journal, name, patience_s)
    what = "failed to open the journal"
    with await retry_io_in(worker, opening, what, asyncio.sleep) as journal:
        supervisor = await _supervisor(journal, seams)
        job = supervisor.run.job
        assert job is not None
        if job.launch.launch != config.term.launch:
            # The job was submitted again after this agent had checked that its launch is current.
            log.error("exiting: %s", later_launch(job.launch, config.term))
            return exit_codes.NOT_ADMITTED
        await prepare()
        leader = await _granted_leader(config, supervisor, seams, name)
        if leader is None:
            return exit_codes.FAILED
        agent = new_agent()
        _handle_signals(leader, config.scheduled)
        async with seams.while_leading(leader):
            serving = _serve(leader, config, listening)
            return await _run_both(serving, agent, asyncio.create_task(agent.run()))


async def lead_on(
    agent: Agent,
    following: asyncio.Task[int],
    claim: Claim,
    listening: Listening,
    seams: LeadingSeams,
) -> int | None:
    """Make an agent that followed a leader the leader. `following`: its running agent task.

    Returns the exit code; None: another agent took over before this one wrote to the journal, so
    this one continues to follow.
    """
    config = agent.config
    # The turn is released also when this agent fails to lead. Else no other agent could take over.
    with contextlib.closing(claim.turn), claim.journal as journal:
        # A longer journal shows later that this leader has already changed the job.
        supervisor, begun = await _supervisor(journal, seams), journal.seq
        former = Lost(
            how=claim.lost.how,
            host_works=claim.lost.host_works,
            heard=seams.clock.now() - agent.silent_for(),
        )
        leader = await _granted_leader(config, supervisor, seams, claim.name, former)
        if leader is None:
            agent.leave(exit_codes.FAILED)
            return await following
        _handle_signals(leader, config.scheduled)
        letting_go = asyncio.create_task(_begun(leader, claim, agent.unheeded))
        try:
            async with seams.while_leading(leader):
                serving = _serve(leader, config, listening)
                lost = partial(_has_lost, journal, begun)
                return await _run_both(serving, agent, following, lost)
        except _LostRace:
            handle_signals(agent)
            return None
        finally:
            letting_go.cancel()


async def _supervisor(journal: OpenJournal, seams: LeadingSeams) -> Supervisor:
    reading = partial(seams.supervisor, journal)
    what = "failed to read the journal"
    return await retry_io_in(seams.worker, reading, what, asyncio.sleep)


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
        # Without a scheduler only a person sends SIGTERM, to end the job.
        loop.add_signal_handler(signal.SIGTERM, leader.cancel, "SIGTERM to the leader")
        return
    for number in WARNINGS:
        loop.add_signal_handler(number, leader.warned, number.name)


async def _serve(leader: Leader, config: AgentConfig, listening: Listening) -> EndJob | Requeue:
    place = config.place
    return await leader.serve(
        place.host,
        listening.bind,
        place.address,
        listening.folder,
        listening.port,
        config.boot,
    )


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
        # At the end the leader orders its own agent to exit before it returns itself: with OK, or
        # with REQUEUED where hosts are replaced one by one. With any other exit this host has lost
        # its agent.
        if not leading.done() and following.result() not in ORDERED:
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


async def _granted_leader(
    config: AgentConfig,
    supervisor: Supervisor,
    seams: LeadingSeams,
    name: str,
    former: Lost | None = None,
) -> Leader | None:
    """The leader, with what the scheduler granted. Retries while the scheduler is unreachable,
    because the job cannot start without the answer. None: this host cannot ask the scheduler, so
    the job ends. `former`: the leader whose agent this was."""
    job = supervisor.run.job
    assert job is not None
    backend = seams.backend_named(job.backend)
    while True:
        try:
            granted = await _granted(config, backend, supervisor.run, seams, former)
            break
        # An exit now would count as one more allocation in which no leader started.
        except Unanswered as exc:
            log.error("failed to read the allocation, retrying: %s", exc)
            await asyncio.sleep(RETRY_S)
        except CannotLead as exc:
            log.critical("the leader cannot start: %s", exc)
            at, why = seams.clock.now(), f"{exc.message}; {exc.fix}"
            host, pid = config.place.host, os.getpid()
            # The job ends with this event. Without it the other agents would find that no leader
            # has started here, and have the job requeued.
            unable = LeaderStarted(at=at, host=host, pid=pid, unable=why)
            await seams.worker(supervisor.feed, unable)
            return None
    return Leader(
        supervisor,
        config.place.run_dir,
        config.secret,
        backend,
        seams.clock,
        granted,
        seams.planners,
        name,
        seams.leader,
    )


async def _granted(
    config: AgentConfig,
    backend: AllocationBackend,
    run: Run,
    seams: LeadingSeams,
    former: Lost | None,
) -> Granted:
    assert run.job is not None
    launch, reached = run.job.launch, await seams.worker(seams.reached)
    if backend.granted is None:
        return Granted(term=config.term, former=former, reached=reached)
    allocation = await seams.worker(backend.granted.allocation, launch)
    leader = run.scheduler.leader
    taken: Mapping[str, str] = {}
    # The scheduler may have taken the former leader's host itself, for example to preempt the job.
    # Then the host is not at fault.
    if leader and backend.successors is not None:
        # The last line of the journal is the last sign of life of the former leader.
        silent_s = {leader: max(0.0, seams.clock.now() - run.last_at)}
        try:
            taken = await seams.worker(backend.successors.taken, launch, silent_s)
        except BackendError as exc:
            log.warning("failed to find out why the former leader was lost: %s", exc)
    return Granted(
        term=config.term,
        allocation=allocation,
        records=await seams.worker(seams.records, backend),
        taken=taken.get(leader, ""),
        former=former,
        reached=reached,
    )


def _exit_code(ending: EndJob | Requeue) -> int:
    if isinstance(ending, Requeue):
        return exit_codes.REQUEUED
    return exit_codes.FAILED if ending.state == "FAILED" else exit_codes.OK
