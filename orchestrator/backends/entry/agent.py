"""The agent process: `python -m orchestrator.backends.entry.agent --run-dir DIR --host NAME`.

With `--lead` it is also the leader.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from orchestrator.agent.agent import (
    FIND_ALLOCATED_S,
    FIND_LEADER_S,
    LOCK_WAIT_S,
    Agent,
    AgentConfig,
)
from orchestrator.agent.evidence.rank_evidence import send_signal
from orchestrator.agent.processes.left_behind import SLURM_JOB, find_left, marks_of, named
from orchestrator.agent.processes.torchrun import HostPlace
from orchestrator.backends.by_name import backend_named
from orchestrator.backends.host_processes import kill_stopped
from orchestrator.contract.check_results import BEFORE_HOOK, Finding, troubles
from orchestrator.contract.files import env, exit_codes
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.failover.leader_lost import Claim
from orchestrator.failover.stale_launch import superseded
from orchestrator.failover.storage import FailoverFiles
from orchestrator.failover.takeover import FollowingSeams, run_follower
from orchestrator.health.host_check import Wanted, examine_host, sight
from orchestrator.health.host_probes import prober
from orchestrator.health.host_warnings import HostWatch
from orchestrator.job_secret import secret_from
from orchestrator.journal.current_launch import current_launch
from orchestrator.posix.fd_limit import allow_files
from orchestrator.posix.locks import is_free, try_lock
from orchestrator.posix.private_folder import SOCKET, NoPrivateFolder, private_folder
from orchestrator.posix.retry_io import retry_io
from orchestrator.seams import AllocationBackend, Clock
from orchestrator.system import SystemClock, boot_id, log_to_stderr, run_command

log = logging.getLogger("orchestrator.backends.entry.agent")

LOCK_POLL_S = 0.1
STOPPED_S = 5.0
"""Wait for a stopped agent to continue. The leader waits `REPLACE_S` for this one."""
ORPHANS_S = 5.0
"""The kernel kills the children of a dead agent. Processes that run longer belong to a rank."""


class Held(NamedTuple):
    """This agent holds its host."""

    former_stopped: bool = False
    """A signal had stopped the host's former agent, and this one killed it."""


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    args = _parser().parse_args(argv)
    log_to_stderr()
    log.info("open file limit: %s", allow_files())  # fork server, torchrun and ranks inherit it
    clock = SystemClock()
    run_dir = RunDir(args.run_dir)
    retry_io(run_dir.make, "failed to create the run directory", clock)
    slurm_job = environ.get(SLURM_JOB)
    held = _hold_host(run_dir, args.host, clock, args.lock, slurm_job, launch=args.launch)
    if held is None:
        return exit_codes.LEADER_LOST if args.patience else exit_codes.NOT_ADMITTED
    try:
        with private_folder(environ) as folder:
            return _be_agent(args, folder / SOCKET, environ, clock, held)
    except NoPrivateFolder as exc:
        log.error("exiting: no private folder for the socket of the ranks: %s", exc)
        return exit_codes.FAILED


def _be_agent(
    args: argparse.Namespace,
    ranks_socket: Path,
    environ: Mapping[str, str],
    clock: Clock,
    held: Held,
) -> int:
    run_dir = RunDir(args.run_dir)
    scheduled = args.restarts is not None
    place = HostPlace(
        python=sys.executable,
        run_dir=run_dir,
        host=args.host,
        address=args.address,
        socket=ranks_socket,
        parent=os.getpid(),
    )
    config = AgentConfig(
        place=_with_program(place),
        secret=secret_from(environ.get(env.TOKEN) or run_dir.token.read_text()),
        term=Term(args.launch, args.restarts or 0),
        devices=args.devices,
        agent_timeout=args.agent_timeout,
        scheduled=scheduled,
        findings=_look_at_host(args, environ),
        boot=boot_id(),
        former_stopped=held.former_stopped,
        find_leader_s=args.leader_late
        + (FIND_ALLOCATED_S if scheduled and not args.patience else FIND_LEADER_S),
        patience_s=args.patience,
        outlives_leader=not args.patience and not args.lead,
        leader_at=args.leader_at,
        probe=prober(_wanted(args), environ, sight(run_command)),
        watch=HostWatch(Path("/"), run_command),
    )
    # Ranks do not need the secret, and their child processes might log the environment.
    environ = {name: value for name, value in environ.items() if name != env.TOKEN}
    looked = partial(superseded, run_dir, config.term, _named(environ, clock), clock)
    why = retry_io(looked, "failed to check whether the launch is current", clock)
    if why is not None:
        log.error("exiting: %s", why)
        return exit_codes.NOT_ADMITTED
    if args.lead:
        # Imported here, because of 2,048 agents only one leads.
        from orchestrator.backends.entry.leader import lead

        return asyncio.run(lead(config, args.bind, environ, clock, args.port))
    return asyncio.run(_follow(config, args, environ, clock))


def _with_program(place: HostPlace) -> HostPlace:
    """`place` with the modules of the user's program, if the job has one and that is known already:
    a pod may start before the leader has written the run directory."""
    try:
        launched = current_launch(place.run_dir)
    except OSError:
        return place
    return place if launched is None or launched.run is None else place.with_program(launched.run)


def _look_at_host(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Problems of this host."""
    found = troubles(examine_host(_wanted(args), environ, sight(run_command)))
    if args.hook_failed:
        fix = "if it fails on every host, correct cluster.slurm.hooks.before"
        hook = Finding(what=BEFORE_HOOK, verdict="stops", found=args.hook_failed, fix=fix)
        found = (hook, *found)
    for finding in found:
        log.warning("%s: %s: %s", finding.verdict, finding.what, finding.found)
    return found


def _wanted(args: argparse.Namespace) -> Wanted:
    return Wanted(devices=args.devices, run_dir=args.run_dir, address=args.address)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.entry.agent")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--address", required=True, help="address for other hosts")
    parser.add_argument("--bind", default="0.0.0.0", help="address on which the leader listens")
    parser.add_argument(
        "--port", type=int, default=0, help="port of the leader, if it is free [any]"
    )
    parser.add_argument(
        "--leader-at",
        default="",
        help="HOST:PORT to try if the run directory names no reachable leader",
    )
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument(
        "--restarts", type=int, help="number of restarts by the scheduler, if there is one"
    )
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--agent-timeout", type=float, required=True)
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        help="seconds to wait for another leader, if the scheduler replaces lost hosts",
    )
    parser.add_argument(
        "--turn", type=int, default=1, help="order in which waiting hosts try to replace the leader"
    )
    parser.add_argument("--lead", action="store_true")
    parser.add_argument(
        "--leader-late", type=float, default=0.0, help="extra seconds for the leader to start"
    )
    parser.add_argument(
        "--lock", type=int, help="descriptor of this agent's lock, if the starting process took it"
    )
    parser.add_argument("--hook-failed", default="", help="why the before hook failed on this host")
    return parser


async def _follow(
    config: AgentConfig, args: argparse.Namespace, environ: Mapping[str, str], clock: Clock
) -> int:
    async def lead(agent: Agent, following: "asyncio.Task[int]", claim: Claim) -> int | None:
        # Imported here, because most agents never lead.
        from orchestrator.backends.entry.leader import lead_on

        return await lead_on(agent, following, claim, args.bind, environ, clock)

    seams = FollowingSeams(
        backend_named=_named(environ, clock),
        clock=clock,
        storage=FailoverFiles(config.place.run_dir, clock),
        lead=lead,
    )
    agent = Agent(config, environ, clock)
    return await run_follower(agent, seams, turn=args.turn)


def _named(environ: Mapping[str, str], clock: Clock) -> Callable[[str], AllocationBackend]:
    return partial(backend_named, environ=environ, clock=clock, shell=run_command)


def _hold_host(
    run_dir: RunDir,
    host: str,
    clock: Clock,
    fd: int | None = None,
    slurm_job: str | None = None,
    *,
    launch: int = 0,
) -> Held | None:
    """Lock the host for this agent, and wait until all processes of a former agent exited. None:
    another agent holds it, or ranks of a former agent do not end.

    Args:
        fd: the lock, if the process that started the agent took it.
        slurm_job: the Slurm job of this agent.
        launch: of this agent. A former agent of the same launch that a signal has stopped is
            killed, because it would hold the lock for ever.
    """
    if fd is None:
        opened = partial(os.open, run_dir.agent_lock(host), os.O_RDWR | os.O_CREAT, 0o644)
        fd = retry_io(opened, f"failed to lock {host}", clock)
    os.set_inheritable(fd, False)
    begun = clock.monotonic()
    held = Held()
    while not try_lock(fd):
        waited = clock.monotonic() - begun
        if waited > LOCK_WAIT_S:
            log.error("failed to lock %s: another agent holds it", host)
            return None
        if waited > STOPPED_S and (pid := kill_stopped(run_dir.agent_lock(host), launch)):
            log.warning("killed process %s, the former agent of %s, which was stopped", pid, host)
            held = Held(former_stopped=True)
        clock.sleep(LOCK_POLL_S)
    # Written immediately, because `end_holder` reads here which process holds the lock.
    with contextlib.suppress(OSError):  # the disk may be full
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    return held if _end_former_ranks(run_dir, host, clock, slurm_job) else None


def _end_former_ranks(run_dir: RunDir, host: str, clock: Clock, slurm_job: str | None) -> bool:
    """The kernel kills the ranks of an agent with it, but not what the ranks had started."""
    marks = marks_of(run_dir, host, slurm_job=slurm_job)
    begun, patience = clock.monotonic(), ORPHANS_S
    asked = set[int]()
    while True:
        held, waited = not is_free(run_dir.ranks_lock(host)), clock.monotonic() - begun
        is_over = waited > patience
        # Until then the kernel may still be killing the ranks.
        left = asyncio.run(find_left(marks, held=held)) if is_over or not held else {}
        if not (held or left):
            return True
        if waited > LOCK_WAIT_S:
            why = "ranks of a former agent are still running"
            log.error("failed to lock %s: %s: %s", host, why, named(left))
            return False
        new = {pid: name for pid, name in left.items() if pid not in asked}
        if new:
            log.warning("ending processes of a former agent: %s", named(new))
            asked |= new.keys()
        for pid in left if is_over else new:
            send_signal(pid, signal.SIGKILL if is_over else signal.SIGTERM)
        patience += ORPHANS_S if is_over else 0.0
        clock.sleep(LOCK_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
