"""Ties a rank to torchrun's life, and waits for it on behalf of the agent.

    python -m orchestrator.agent.keeper --lock FILE --log-dir DIR -- COMMAND …

It is what torchrun starts: it writes the rank's output to its own log, runs COMMAND as a child that
dies with it, and tells the agent how the child ended, which torchrun keeps to itself. torchrun dies
with the agent (`launcher`), this with torchrun: whichever of them is killed, nothing below it
survives. It holds a shared lock on FILE, and so does all that it starts.
"""

import argparse
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from orchestrator.contract.datagrams import Datagram, RankEnded, RankStarted, to_bytes
from orchestrator.contract.env import DUMP_SIGNAL, TORCHRUN_PID, RankEnv
from orchestrator.locks import share

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL when the parent ends; leave at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def keep_rank(env: RankEnv, log: Path, command: Sequence[str]) -> int:
    """Run `command` with its output in `log`; the wait status of its end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    keeper = os.getpid()
    # torchrun signals the whole process group: the child takes SIGTERM as it likes, the keeper
    # must outlive it to tell how it ended. Blocked meanwhile, none that comes early is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        _become(keeper, command)
    if signal.SIGTERM in signal.sigpending():  # perhaps from before there was a child
        os.kill(child, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    tell(
        env.heartbeat_socket,
        RankStarted(attempt=env.attempt, rank=env.rank, local_rank=env.local_rank, pid=child),
    )
    _, status = os.waitpid(child, 0)
    return status


def _become(parent: int, command: Sequence[str]) -> NoReturn:
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # To be asked to leave or for stacks must not kill a program that has yet to learn how.
        for number in (signal.SIGUSR1, signal.SIGUSR2, DUMP_SIGNAL):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execvp(command[0], list(command))
    except OSError as exc:
        sys.stderr.write(f"{command[0]} could not be started: {exc}\n")
        sys.stderr.flush()
    os._exit(127)


def tell(path: str, datagram: Datagram) -> None:
    """Send one datagram; nobody listening is no error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(to_bytes(datagram), path)
        except OSError as exc:
            sys.stderr.write(f"the agent could not be told: {exc}\n")


def report_end(env: RankEnv, status: int) -> int:
    """Tell the agent; the exit code to leave with."""
    killed = os.WIFSIGNALED(status)
    code = None if killed else os.WEXITSTATUS(status)
    number = os.WTERMSIG(status) if killed else None
    tell(
        env.heartbeat_socket,
        RankEnded(attempt=env.attempt, rank=env.rank, exit_code=code, signal=number),
    )
    return 128 + os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.agent.keeper")
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    die_with_parent(int(environ.get(TORCHRUN_PID, os.getppid())))
    share(args.lock)
    env = RankEnv.from_mapping(environ)
    status = keep_rank(env, args.log_dir / f"rank-{env.rank}.log", args.command)
    return report_end(env, status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
