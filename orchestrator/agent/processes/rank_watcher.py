"""Runs one rank, and reports to the agent how it ended.

    rank_watcher.py --lock FILE --log-dir DIR -- COMMAND ...

torchrun forks it in place of the rank. It redirects the output to the rank's own log, forks again
for COMMAND, and reports how COMMAND ended, because torchrun does not. Each process dies with the
one above it: agent, fork server, torchrun, rank watcher, rank. So no rank survives when any of them
is killed. The watcher and all that it starts hold a shared lock on FILE.
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

from ndctl.rank.parent_death import die_with_parent
from orchestrator.agent.processes.exec_in_fork import (
    become,
    find_name,
    leave_network,
)
from orchestrator.contract.files import progress
from orchestrator.contract.files.env import (
    DUMP_SIGNAL,
    PROGRESS_FD,
    STACKS_IN_C,
    STACKS_SIGNAL,
    TORCHRUN_PID,
    RankEnv,
)
from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.messages.rank_messages import Datagram, RankStarted, to_bytes
from orchestrator.posix.locks import share


def keep_rank(env: RankEnv, log: Path, command: Sequence[str], lock: Path) -> tuple[int, int]:
    """Run `command` with its output in `log`. Returns its wait status, and the number of steps that
    it had done."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    watcher, steps = os.getpid(), progress.shared()
    # This process must outlive the rank to report how it ended, so it forwards SIGTERM instead of
    # dying from it. SIGTERM is blocked until the handler is installed, so that none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        _run_rank(watcher, env, command, lock, steps)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    tell(
        env.heartbeat_socket,
        RankStarted(attempt=env.attempt, rank=env.rank, local_rank=env.local_rank, pid=child),
    )
    # Wait without reaping: until the handler is removed, it may still signal this pid.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, status = os.waitpid(child, 0)
    return status, progress.read(steps)


def _run_rank(
    watcher: int, env: RankEnv, command: Sequence[str], lock: Path, steps: int
) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # By default these signals kill. They may come before the trainer has installed its handlers.
    for number in (signal.SIGUSR1, signal.SIGUSR2, DUMP_SIGNAL, STACKS_SIGNAL, STACKS_IN_C):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    title = f"{shlex.join(command)} (rank {env.rank})"
    environ = {**os.environ, PROGRESS_FD: str(steps)}
    become(command, environ, title=title, parent=watcher, lock=lock)


def tell(path: str, datagram: Datagram) -> None:
    """Send one datagram to the agent. A failure is only logged."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(to_bytes(datagram), path)
        except OSError as exc:
            sys.stderr.write(f"failed to send a message to the agent: {exc}\n")


def report_end(env: RankEnv, status: int, step: int) -> int:
    """Report the end to the agent. Returns this process's own exit code."""
    killed = os.WIFSIGNALED(status)
    code = None if killed else os.WEXITSTATUS(status)
    number = os.WTERMSIG(status) if killed else None
    tell(
        env.heartbeat_socket,
        RankExited(attempt=env.attempt, rank=env.rank, exit_code=code, signal=number, step=step),
    )
    # Not the signal itself: to torchrun it would look as if this watcher had been killed.
    return 128 + os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.agent.processes.rank_watcher")
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    # torchrun may have ended by now. `getppid` would then name another process as the parent.
    die_with_parent(int(environ.get(TORCHRUN_PID, os.getppid())))
    leave_network()  # the fork inherited the sockets of torchrun's store
    share(args.lock)
    env = RankEnv.from_mapping(environ)
    log = args.log_dir / f"rank-{env.rank}.log"
    find_name()
    setproctitle.setproctitle(f"orchestrator.agent.processes.rank_watcher of {log}")
    status, step = keep_rank(env, log, args.command, args.lock)
    return report_end(env, status, step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
