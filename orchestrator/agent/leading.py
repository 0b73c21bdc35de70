"""An agent that leads as well: the leader and the agent of its own host, in one process.

Imported late: an agent that only follows needs nothing of it, and all begin at the same time.
"""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from orchestrator import strikes
from orchestrator.agent.agent import WARNINGS, Agent, AgentConfig
from orchestrator.agent.errands import Planners
from orchestrator.agent.leader import Granted, Leader, take_over
from orchestrator.agent.leaderless import RETRY_S
from orchestrator.agent.patience import TAKE_OVER_S, once_it_serves
from orchestrator.agent.standby import Standby
from orchestrator.agent.superseding import later_launch
from orchestrator.agent.torchrun import with_defaults
from orchestrator.backends import backend_named
from orchestrator.contract import exits
from orchestrator.contract.actions import EndJob, Requeue
from orchestrator.contract.events import LeaderStarted
from orchestrator.contract.fence import GivenUp, check_leader
from orchestrator.contract.plan import Plan
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, CannotLead, Unanswered
from orchestrator.seams import Backend, Clock
from orchestrator.supervise import snapshot
from orchestrator.supervise.log import LOCK_PATIENCE_S, Journal
from orchestrator.supervise.loop import Supervisor
from orchestrator.supervise.state import JobPlan, Refit, Run, Shortage
from orchestrator.system import run_command

log = logging.getLogger(__name__)

Switches = Mapping[str, tuple[str, ...]]
PLANNING = "orchestrator.app.replanning"


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
    once_it_serves(partial(take_over, place.run_dir, name), "the fence cannot be taken", clock)
    guard = partial(check_leader, place.run_dir.fence, name)
    with Journal(place.run_dir.journal, clock, patience_s, guard) as journal:
        supervisor = Supervisor(journal, known=snapshot.load(place.run_dir))
        job = supervisor.run.job
        assert job is not None
        if job.launch.launch != config.term.launch:  # submitted again since it was looked
            log.error("leaving: %s", later_launch(job.launch, config.term))
            return exits.NOT_ADMITTED
        backend = backend_named(job.backend, environ, clock, run_command)
        # First of all: it imports while the scheduler is asked.
        standby = Standby(place, with_defaults(environ))
        await standby.prepare()
        try:
            granted = _granted_at_last(config, backend, supervisor.run, clock)
        except CannotLead as exc:
            await standby.close()
            log.critical("the leader cannot begin: %s", exc)
            at, why = clock.now(), f"{exc.message}; {exc.fix}"
            started = LeaderStarted(at=at, host=place.host, pid=os.getpid(), unable=why)
            supervisor.feed(started)
            return exits.FAILED
        # Not when it is needed: what an upgrade has changed by then would not fit together.
        planning = asyncio.create_task(asyncio.to_thread(import_module, PLANNING))
        planners = _planners(place.run_dir, environ)
        leader = Leader(
            supervisor, place.run_dir, config.secret, backend, clock, granted, planners, name
        )
        agent = Agent(config, environ, clock, standby)
        loop = asyncio.get_running_loop()
        if scheduled:
            for number in WARNINGS:
                loop.add_signal_handler(number, leader.warned, number.name)
        else:
            loop.add_signal_handler(signal.SIGTERM, leader.cancel, "SIGTERM to the leader")
        serving = leader.serve(place.host, bind, place.address, place.socket.parent, port)
        try:
            return await _run_both(serving, agent)
        finally:
            await planning


def _planners(run_dir: RunDir, environ: Mapping[str, str]) -> Planners:
    """They take long to import, and nobody needs them before ranks have run."""

    def fewer(former: Plan, hosts: Sequence[str], switches: Switches) -> JobPlan:
        from orchestrator.app.replanning import replan

        return replan(run_dir, former, hosts, switches, environ)

    def less(former: Plan, hosts: Sequence[str], switches: Switches, short: Shortage) -> Refit:
        from orchestrator.app.replanning import refit

        return refit(run_dir, former, hosts, switches, short, environ)

    return Planners(fewer=fewer, less=less)


async def _run_both(serving: Coroutine[Any, Any, EndJob | Requeue], agent: Agent) -> int:
    """The leader and its own agent: neither outlives the other."""
    following, leading = asyncio.create_task(agent.run()), asyncio.create_task(serving)
    try:
        await asyncio.wait([leading, following], return_when=asyncio.FIRST_COMPLETED)
        if not leading.done() and following.result() != exits.OK:
            log.critical("the leader's own agent left: so does the leader")
            return exits.FAILED
        return _exit_code(await leading)
    except GivenUp as exc:
        log.error("leaving: %s", exc)
        return exits.LEADER_LOST
    finally:
        leading.cancel()
        agent.leave(exits.LEADER_LOST)
        await asyncio.gather(leading, following, return_exceptions=True)


def _granted_at_last(config: AgentConfig, backend: Backend, run: Run, clock: Clock) -> Granted:
    """A scheduler that is away comes back; until then nothing can begin, and nothing is lost."""
    while True:
        try:
            return _granted(config, backend, run, clock)
        except Unanswered as exc:
            log.error("what was granted is not known yet, asking again: %s", exc)
            clock.sleep(RETRY_S)


def _granted(config: AgentConfig, backend: Backend, run: Run, clock: Clock) -> Granted:
    assert run.job is not None
    launch = run.job.launch
    allocation = backend.allocation(launch)
    if allocation is None:
        return Granted(term=config.term)
    silent_s = {run.leader: max(0.0, clock.now() - run.last_at)} if run.leader else {}
    taken: Mapping[str, str] = {}
    if silent_s and allocation.successor_s is not None:
        try:
            taken = backend.taken(launch, silent_s)
        except BackendError as exc:
            log.warning("why the leader before went is not known: %s", exc)
    path = strikes.path_of(config.place.run_dir.path.parent, backend.cluster())
    return Granted(
        term=config.term,
        allocation=allocation,
        exclude=strikes.excluded(path, clock.now()),
        always=strikes.always(path, clock.now()),
        cleared=strikes.cleared(path),
        taken=taken.get(run.leader, ""),
        strikes=path,
    )


def _exit_code(ending: EndJob | Requeue) -> int:
    if isinstance(ending, Requeue):
        return exits.REQUEUED
    return exits.FAILED if ending.state == "FAILED" else exits.OK
