"""Ties a rank to torchrun's life, and waits for it on behalf of the agent.

    rank_watcher.py --lock FILE --log-dir DIR -- COMMAND …

It is what torchrun forks: it writes the rank's output to its own log, forks once more for COMMAND,
which dies with it, and tells the agent how that ended, which torchrun keeps to itself. It dies with
torchrun, that with its launcher, and that with the agent: whichever of them is killed, nothing
below it survives. It holds a shared lock on FILE, and so does all that it starts.
"""

import argparse
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import setproctitle

from orchestrator.agent.processes.exec_in_fork import (
    become,
    die_with_parent,
    find_name,
    leave_network,
)
from orchestrator.contract.files import progress
from orchestrator.contract.files.env import DUMP_SIGNAL, PROGRESS_FD, TORCHRUN_PID, RankEnv
from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.messages.rank_messages import Datagram, RankStarted, to_bytes
from orchestrator.posix.locks import share


def keep_rank(env: RankEnv, log: Path, command: Sequence[str], lock: Path) -> tuple[int, int]:
    """Run `command` with its output in `log`; the wait status of its end, and how many steps it had
    done by then."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    keeper, steps = os.getpid(), progress.shared()
    # torchrun signals this process, a scheduler all of them: the child takes SIGTERM as it likes,
    # the keeper must outlive it to tell how it ended. Blocked meanwhile, none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        _train(keeper, env, command, lock, steps)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    tell(
        env.heartbeat_socket,
        RankStarted(attempt=env.attempt, rank=env.rank, local_rank=env.local_rank, pid=child),
    )
    # Not reaped before nobody sends it anything any more.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, status = os.waitpid(child, 0)
    return status, progress.read(steps)


def _train(keeper: int, env: RankEnv, command: Sequence[str], lock: Path, steps: int) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # To be asked to leave or for stacks must not kill a program that has yet to learn how.
    for number in (signal.SIGUSR1, signal.SIGUSR2, DUMP_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    title = f"{shlex.join(command)} (rank {env.rank})"
    environ = {**os.environ, PROGRESS_FD: str(steps)}
    become(command, environ, title=title, parent=keeper, lock=lock)


def tell(path: str, datagram: Datagram) -> None:
    """Send one datagram; nobody listening is no error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(to_bytes(datagram), path)
        except OSError as exc:
            sys.stderr.write(f"the agent could not be told: {exc}\n")


def report_end(env: RankEnv, status: int, step: int) -> int:
    """Tell the agent; the exit code to leave with."""
    killed = os.WIFSIGNALED(status)
    code = None if killed else os.WEXITSTATUS(status)
    number = os.WTERMSIG(status) if killed else None
    tell(
        env.heartbeat_socket,
        RankExited(attempt=env.attempt, rank=env.rank, exit_code=code, signal=number, step=step),
    )
    return 128 + os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.agent.processes.rank_watcher")
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    die_with_parent(int(environ.get(TORCHRUN_PID, os.getppid())))
    leave_network()  # torchrun's store, which its forks have as well
    share(args.lock)
    env = RankEnv.from_mapping(environ)
    log = args.log_dir / f"rank-{env.rank}.log"
    find_name()
    setproctitle.setproctitle(f"orchestrator.agent.processes.rank_watcher of {log}")
    status, step = keep_rank(env, log, args.command, args.lock)
    return report_end(env, status, step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
