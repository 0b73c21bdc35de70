"""Entry of an agent: `python -m orchestrator.agent --run-dir DIR --host NAME [--lead]`."""

import argparse
import asyncio
import hashlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from orchestrator.agent.agent import Agent, AgentConfig
from orchestrator.agent.evidence import holders, send_signal
from orchestrator.agent.leader import Leader
from orchestrator.agent.torchrun import HostPlace
from orchestrator.backends import backend_named
from orchestrator.contract import env, exits
from orchestrator.contract.rundir import RunDir
from orchestrator.locks import is_free, try_lock
from orchestrator.seams import Clock
from orchestrator.supervise.log import Journal
from orchestrator.supervise.loop import Supervisor
from orchestrator.system import SystemClock, run_command

log = logging.getLogger("orchestrator.agent")

LOCK_WAIT_S = 60.0
"""For a former agent of this host, or what it left running, to be gone."""
LOCK_POLL_S = 0.1
ORPHANS_S = 5.0
"""The kernel ends what a former agent left running; what then still runs, a rank left itself."""


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    clock = SystemClock()
    run_dir = RunDir(args.run_dir)
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    if not _hold_host(run_dir, args.host, clock):
        return exits.NOT_ADMITTED
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
        launch=args.launch,
        devices=args.devices,
        agent_timeout=args.agent_timeout,
    )
    try:
        if args.lead:
            return asyncio.run(_lead(config, args.bind, environ, clock))
        return asyncio.run(_follow(config, environ, clock))
    finally:
        shutil.rmtree(config.place.socket.parent, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator.agent")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--address", required=True, help="where other hosts reach this one")
    parser.add_argument("--bind", default="0.0.0.0", help="where the leader listens")
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--agent-timeout", type=float, required=True)
    parser.add_argument("--lead", action="store_true")
    return parser


async def _follow(config: AgentConfig, environ: Mapping[str, str], clock: Clock) -> int:
    """Run a mere agent; SIGTERM ends its ranks and it."""
    agent = Agent(config, environ, clock)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, agent.leave, exits.LEADER_LOST)
    return await agent.run()


async def _lead(config: AgentConfig, bind: str, environ: Mapping[str, str], clock: Clock) -> int:
    """Run the leader, and beside it the agent of its own host."""
    place = config.place
    with Journal(place.run_dir.journal, clock) as journal:
        supervisor = Supervisor(journal)
        assert supervisor.run.job is not None
        backend = backend_named(supervisor.run.job.backend, environ, clock, run_command)
        leader = Leader(supervisor, place.run_dir, config.token, backend, clock)
        agent = Agent(config, environ, clock)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, leader.cancel, "SIGTERM to the leader")
        following = asyncio.create_task(agent.run())
        leading = asyncio.create_task(leader.serve(place.host, bind, place.address, os.getpid()))
        try:
            await asyncio.wait([leading, following], return_when=asyncio.FIRST_COMPLETED)
            if not leading.done() and following.result() != exits.OK:
                log.critical("the leader's own agent left: so does the leader")
                return exits.FAILED
            ending = await leading
        finally:
            leading.cancel()
            agent.leave(exits.LEADER_LOST)
            await asyncio.gather(leading, following, return_exceptions=True)
    return exits.FAILED if ending.state == "FAILED" else exits.OK


def _hold_host(run_dir: RunDir, host: str, clock: Clock) -> bool:
    """Be the only agent of this host, with no process of a former one left."""
    fd = os.open(run_dir.agent_lock(host), os.O_RDWR | os.O_CREAT, 0o644)
    begun = clock.monotonic()
    while not try_lock(fd):
        if clock.monotonic() - begun > LOCK_WAIT_S:
            log.error("%s cannot be taken over: another agent holds it", host)
            return False
        clock.sleep(LOCK_POLL_S)
    # At once: whoever wants to end the holder of the lock reads here which process that is.
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
