"""Runs an agent of an allocation through all its leaders: when one is gone, the agent follows the
next leader or becomes it.

The fence, the lock on the journal and the order of turns ensure that only one agent leads: a second
one finds the fence changed, and follows.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

from msgspec import Struct

from orchestrator.agent.agent import WARNINGS, Agent
from orchestrator.contract.files import exit_codes
from orchestrator.failover.ask_scheduler import RETRY_S
from orchestrator.failover.leader_lost import Claim, Leaderless, Outcome, see_to_the_leader
from orchestrator.failover.storage import FailoverFiles, FailoverStorage
from orchestrator.seams import AllocationBackend, Clock

log = logging.getLogger(__name__)

Lead = Callable[[Agent, "asyncio.Task[int]", Claim], Awaitable[int | None]]
"""Leads the job with what the agent has claimed. Returns the exit code, or None if the agent must
follow another leader again."""


class FollowingSeams(Struct, frozen=True, kw_only=True):
    """What an agent that does not lead uses of the world outside it, besides the agent's seams."""

    backend_named: Callable[[str], AllocationBackend]
    clock: Clock
    storage: FailoverStorage
    lead: Lead


async def run_follower(agent: Agent, seams: FollowingSeams, *, turn: int) -> int:
    """Run an agent that does not lead; return the exit code. SIGTERM ends it and its ranks.

    If the scheduler sends SIGTERM, the leader also gets it or is told, and decides: ranks have
    until SIGKILL to write a checkpoint. If the leader is lost, an agent takes over, or follows
    the agent that did, or requeues the job.
    """
    loop = asyncio.get_running_loop()
    if agent.config.patience_s:
        # The cluster replaces lost hosts, and ends each of them alone.
        loop.add_signal_handler(signal.SIGTERM, agent.warned, signal.SIGTERM.name)
        seeing = asyncio.create_task(
            see_to_the_leader(agent, turn, seams.backend_named, seams.storage, agent.worker)
        )
        try:
            return await agent.run()
        finally:
            seeing.cancel()
    handle_signals(agent)
    return await follow(agent, seams.backend_named, seams.clock, seams.lead, seams.storage)


async def follow(
    agent: Agent,
    backend_named: Callable[[str], AllocationBackend],
    clock: Clock,
    lead: Lead,
    storage: FailoverStorage | None = None,
) -> int:
    """Run an agent that outlives its leaders. Returns the exit code."""
    storage = storage or FailoverFiles(agent.config.place.run_dir, clock)
    following = asyncio.create_task(agent.run())
    before = agent.last_heard
    while not await _is_over(agent, following):
        heard, before = agent.last_heard > before, agent.last_heard
        outcome = await _settle(agent, backend_named, clock, storage, heard=heard)
        if isinstance(outcome, Claim):
            code = await lead(agent, following, outcome)
            if code is not None:
                return code
        elif outcome == "leave":
            agent.leave(exit_codes.LEADER_LOST)
        else:
            await asyncio.sleep(RETRY_S)  # give the agent time to connect to the leader
    return await following


def handle_signals(agent: Agent) -> None:
    """Let the leader react to signals of the scheduler, because it gets them as well. The agent
    only remembers the last one, in case the leader was gone and this agent becomes the leader."""
    loop = asyncio.get_running_loop()
    if not agent.config.scheduled:
        # Without a scheduler SIGTERM comes from a person and ends this agent.
        loop.add_signal_handler(signal.SIGTERM, agent.leave, exit_codes.LEADER_LOST)
        return
    for number in WARNINGS:
        loop.add_signal_handler(number, _hears, agent, number.name)


def _hears(agent: Agent, signal_name: str) -> None:
    log.info("%s: the leader decides", signal_name)
    agent.unheeded = signal_name


async def _is_over(agent: Agent, following: "asyncio.Task[int]") -> bool:
    """Wait until the agent has lost its leader or ends. Returns whether it ends."""
    alone = asyncio.create_task(agent.alone.wait())
    try:
        await asyncio.wait([alone, following], return_when=asyncio.FIRST_COMPLETED)
    finally:
        alone.cancel()
    # The agent may get the order to leave while it is alone. Then no leader is needed.
    return following.done() or agent.exit_code is not None


async def _settle(
    agent: Agent,
    backend_named: Callable[[str], AllocationBackend],
    clock: Clock,
    storage: FailoverStorage,
    *,
    heard: bool,
) -> Outcome:
    leaderless = Leaderless(
        storage,
        agent.config.term,
        agent.config.place.host,
        backend_named,
        clock,
        is_alone=lambda: agent.exit_code is None and agent.alone.is_set(),
        heard=heard,
        worker=agent.worker,
    )
    return await leaderless.settle()
