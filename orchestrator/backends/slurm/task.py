"""What runs on each node of the allocation: the agent, in the process that Slurm started.

submitit pickles an AgentTask by name and calls it. `python -m orchestrator.backends.slurm.task`
is the same for an agent that is started again, which never leads.
"""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.slurm import address
from orchestrator.cluster.slurm.hostlist import expand
from orchestrator.cluster.slurm.nodes import parse_nodes
from orchestrator.contract.rundir import RunDir
from orchestrator.system import run_command

log = logging.getLogger(__name__)

ASK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """One launch's agent, on whatever node it finds itself."""

    run_dir: str
    launch: int
    devices: int
    agent_timeout: float

    def __call__(self) -> None:
        self.run(lead=os.environ.get("SLURM_NODEID") == "0")

    def run(self, *, lead: bool) -> None:
        """Be the agent, to its end; does not return."""
        _forget_handlers()
        environ = dict(os.environ)
        host = environ.get("SLURMD_NODENAME") or socket.gethostname()
        log_to(RunDir(Path(self.run_dir)).agent_log(host))
        reached = _address(host, environ)
        from orchestrator.agent.__main__ import main

        argv = [
            f"--run-dir={self.run_dir}",
            f"--host={host}",
            f"--address={reached}",
            f"--launch={self.launch}",
            f"--devices={self.devices}",
            f"--agent-timeout={self.agent_timeout}",
            f"--restarts={environ.get('SLURM_RESTART_COUNT', '0')}",
            *(["--lead"] if lead else []),
        ]
        sys.exit(main(argv, _for_gloo(environ, reached)))


def _forget_handlers() -> None:
    """submitit's own would swallow SIGTERM, and requeue at SIGUSR2; the agent sets its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    # A notice that comes before the agent listens must not kill it; the end itself is announced
    # by SIGTERM.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def log_to(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as exc:  # no room, say: then it is in the log of the step
        sys.stderr.write(f"{path} cannot be opened, so the log is here: {exc}\n")
        return
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _address(host: str, environ: Mapping[str, str]) -> str:
    """Raises OSError when there is none: nobody could reach this host."""
    resolved = address.resolve(host)
    if resolved and not address.is_loopback(resolved):
        return resolved
    hosts = expand(environ.get("SLURM_JOB_NODELIST", ""))
    others = [name for name in hosts if name != host]
    routed = address.routed_towards(others)
    found = address.choose_address(resolved, _node_addr(host), routed, address.resolve)
    if found is None:
        raise OSError(f"{host}, the name of this host, means nothing here, nor does its NodeAddr")
    return found


def _node_addr(host: str) -> str:
    with contextlib.suppress(TimeoutError):
        said = run_command(["scontrol", "show", "node", "-a", "-o", host], timeout=ASK_S)
        return next((node.address for node in parse_nodes(said.out)), "")
    return ""


def _for_gloo(environ: Mapping[str, str], reached: str) -> Mapping[str, str]:
    """gloo takes what the machine's own name means; where that is no use, its interface is said."""
    own = address.resolve(socket.gethostname())
    known = any(name in environ for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"))
    if known or own == reached:
        return environ
    interface = address.interface_of(reached)
    return {**environ, "GLOO_SOCKET_IFNAME": interface} if interface else environ


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.slurm.task")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--agent-timeout", type=float, required=True)
    AgentTask(**vars(parser.parse_args(argv))).run(lead=False)


if __name__ == "__main__":
    main(sys.argv[1:])
