"""Entry of an agent: `python -m orchestrator.agent --run-dir DIR --host NAME [--lead]`."""

import argparse
import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator import strikes
from orchestrator.agent.agent import FIND_LEADER_S, Agent, AgentConfig
from orchestrator.agent.errands import Planners
from orchestrator.agent.evidence import holders, send_signal
from orchestrator.agent.leader import Granted, Leader, take_over
from orchestrator.agent.leaderless import RETRY_S, queue_again, see_to_the_leader
from orchestrator.agent.patience import once_it_serves
from orchestrator.agent.probes import prober
from orchestrator.agent.superseding import later_launch, superseded
from orchestrator.agent.torchrun import HostPlace
from orchestrator.agent.whereabouts import Term
from orchestrator.app.replanning import refit, replan
from orchestrator.backends import backend_named
from orchestrator.contract import env, exits
from orchestrator.contract.actions import EndJob, Requeue
from orchestrator.contract.events import LeaderStarted
from orchestrator.contract.fence import GivenUp, check_leader
from orchestrator.contract.findings import Finding, troubles
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, CannotLead, Unanswered
from orchestrator.locks import is_free, try_lock
from orchestrator.preflight.host import Wanted, examine_host, sight
from orchestrator.seams import Backend, Clock
from orchestrator.supervise.log import LOCK_PATIENCE_S, Journal
from orchestrator.supervise.loop import Supervisor
from orchestrator.supervise.state import Run
from orchestrator.system import SystemClock, run_command

log = logging.getLogger("orchestrator.agent")

LOCK_WAIT_S = 60.0
"""For a former agent of this host, or what it left running, to be gone."""
LOCK_POLL_S = 0.1
TAKE_OVER_S = 120.0
"""For a former leader, cut off on its host, to see that it was replaced and to let go of the
journal, or for a file server to take the lock from a host that is gone."""
FIND_ALLOCATED_S = LOCK_WAIT_S + TAKE_OVER_S + 120.0
"""For a leader in an allocation: after both of these, and after its interpreter and its look at its
host, each of which takes a minute on a cold file server."""
ORPHANS_S = 5.0
"""The kernel ends what a former agent left running; what then still runs, a rank left itself."""


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    clock = SystemClock()
    run_dir = RunDir(args.run_dir)
    logs = partial(run_dir.logs.mkdir, parents=True, exist_ok=True)
    once_it_serves(logs, "there is no room for logs", clock)
    if not _hold_host(run_dir, args.host, clock):
        return exits.LEADER_LOST if args.patience else exits.NOT_ADMITTED
    scheduled = args.restarts is not None
    config = AgentConfig(
        place=HostPlace(
            python=sys.executable,
            run_dir=run_dir,
            host=args.host,
            address=args.address,
            socket=_socket_path(run_dir, args.host),
            parent=os.getpid(),
        ),
        token=environ.get(env.TOKEN) or run_dir.token.read_text().strip(),
        term=Term(args.launch, args.restarts or 0),
        devices=args.devices,
        agent_timeout=args.agent_timeout,
        findings=_look_at_host(args, environ),
        find_leader_s=FIND_ALLOCATED_S if scheduled and not args.patience else FIND_LEADER_S,
        patience_s=args.patience,
        leader_at=args.leader_at,
        probe=prober(_wanted(args), environ, sight(run_command)),
    )
    try:
        looked = partial(superseded, run_dir, config.term, _named(environ, clock), clock)
        why = once_it_serves(looked, "whether this host counts is not known", clock)
        if why is not None:
            log.error("leaving: %s", why)
            return exits.NOT_ADMITTED
        if args.lead:
            return asyncio.run(_lead(config, args.bind, scheduled, environ, clock, args.port))
        return asyncio.run(_follow(config, scheduled, args.turn, environ, clock))
    finally:
        shutil.rmtree(config.place.socket.parent, ignore_errors=True)


def _look_at_host(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """What of this host is not in order."""
    found = troubles(examine_host(_wanted(args), environ, sight(run_command)))
    for finding in found:
        log.warning("%s: %s: %s", finding.verdict, finding.what, finding.found)
    return found


def _wanted(args: argparse.Namespace) -> Wanted:
    return Wanted(devices=args.devices, run_dir=args.run_dir, address=args.address)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator.agent")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--address", required=True, help="where other hosts reach this one")
    parser.add_argument("--bind", default="0.0.0.0", help="where the leader listens")
    parser.add_argument("--port", type=int, default=0, help="there, if it is free [any]")
    parser.add_argument(
        "--leader-at", default="", help="HOST:PORT to try where the run directory leads to nobody"
    )
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument(
        "--restarts", type=int, help="how often the scheduler, if there is one, started it again"
    )
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--agent-timeout", type=float, required=True)
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        help="seconds to wait in place for another leader, where the scheduler replaces lost hosts",
    )
    parser.add_argument(
        "--turn",
        type=int,
        default=1,
        help="of hosts that wait so, which one sees to it first that the leader is replaced",
    )
    parser.add_argument("--lead", action="store_true")
    return parser


WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends, to ranks and agents alike, before it takes hosts back."""


async def _follow(
    config: AgentConfig, scheduled: bool, turn: int, environ: Mapping[str, str], clock: Clock
) -> int:
    """Run a mere agent; SIGTERM ends its ranks and it.

    Where a scheduler sends it, the leader has it as well, or is told, and says what is to be done:
    ranks have until SIGKILL to write a checkpoint. A follower whose leader is gone has the job
    queued again, which is when the scheduler ends it, too.
    """
    agent = Agent(config, environ, clock)
    named = _named(environ, clock)
    loop = asyncio.get_running_loop()
    if config.patience_s:
        loop.add_signal_handler(signal.SIGTERM, agent.warned, signal.SIGTERM.name)
        seeing = asyncio.create_task(see_to_the_leader(agent, turn, named))
        try:
            return await agent.run()
        finally:
            seeing.cancel()
    if scheduled:
        for number in WARNINGS:
            loop.add_signal_handler(number, log.info, "%s: the leader decides", number.name)
    else:
        loop.add_signal_handler(signal.SIGTERM, agent.leave, exits.LEADER_LOST)
    code = await agent.run()
    if scheduled and code == exits.LEADER_LOST:
        place = config.place
        asking = partial(queue_again, place.run_dir, config.term, place.host, named, clock)
        await asyncio.to_thread(asking)
    return code


def _named(environ: Mapping[str, str], clock: Clock) -> Callable[[str], Backend]:
    return partial(backend_named, environ=environ, clock=clock, shell=run_command)


async def _lead(
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
        supervisor = Supervisor(journal)
        job = supervisor.run.job
        assert job is not None
        if job.launch.launch != config.term.launch:  # submitted again since it was looked
            log.error("leaving: %s", later_launch(job.launch, config.term))
            return exits.NOT_ADMITTED
        backend = backend_named(job.backend, environ, clock, run_command)
        try:
            granted = _granted_at_last(config, backend, supervisor.run, clock)
        except CannotLead as exc:
            log.critical("the leader cannot begin: %s", exc)
            at, why = clock.now(), f"{exc.message}; {exc.fix}"
            started = LeaderStarted(at=at, host=place.host, pid=os.getpid(), unable=why)
            supervisor.feed(started)
            return exits.FAILED
        planners = Planners(
            fewer=partial(replan, place.run_dir, environ=environ),
            less=partial(refit, place.run_dir, environ=environ),
        )
        leader = Leader(
            supervisor, place.run_dir, config.token, backend, clock, granted, planners, name
        )
        agent = Agent(config, environ, clock)
        loop = asyncio.get_running_loop()
        if scheduled:
            for number in WARNINGS:
                loop.add_signal_handler(number, leader.warned, number.name)
        else:
            loop.add_signal_handler(signal.SIGTERM, leader.cancel, "SIGTERM to the leader")
        serving = leader.serve(place.host, bind, place.address, os.getpid(), port)
        return await _run_both(serving, agent)


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
        taken=taken.get(run.leader, ""),
        strikes=path,
    )


def _exit_code(ending: EndJob | Requeue) -> int:
    if isinstance(ending, Requeue):
        return exits.REQUEUED
    return exits.FAILED if ending.state == "FAILED" else exits.OK


def _hold_host(run_dir: RunDir, host: str, clock: Clock) -> bool:
    """Be the only agent of this host, with no process of a former one left."""
    opened = partial(os.open, run_dir.agent_lock(host), os.O_RDWR | os.O_CREAT, 0o644)
    fd = once_it_serves(opened, f"{host} cannot be taken over", clock)
    begun = clock.monotonic()
    while not try_lock(fd):
        if clock.monotonic() - begun > LOCK_WAIT_S:
            log.error("%s cannot be taken over: another agent holds it", host)
            return False
        clock.sleep(LOCK_POLL_S)
    # At once: whoever wants to end the holder of the lock reads here which process that is.
    with contextlib.suppress(OSError):  # a full disk has no room for it
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
    ranks, begun, patience = run_dir.ranks_lock(host), clock.monotonic(), ORPHANS_S
    while not is_free(ranks):
        waited = clock.monotonic() - begun
        if waited > LOCK_WAIT_S:
            log.error("%s cannot be taken over: ranks of a former agent still run", host)
            return False
        if waited > patience:
            patience += ORPHANS_S
            for pid in holders(ranks):
                log.warning("process %s was left by a former agent: killing it", pid)
                send_signal(pid, signal.SIGKILL)
        clock.sleep(LOCK_POLL_S)
    return True


def _socket_path(run_dir: RunDir, host: str) -> Path:
    """Short enough for a Unix socket, and the same for each agent of this host and job."""
    key = hashlib.sha256(f"{run_dir.path}\0{host}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"ndctl-{os.getuid()}-{key}" / "ranks.sock"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
