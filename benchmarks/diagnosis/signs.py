"""What one host spends to find out which of thousands of hosts are alive, if a check of all fails.

    python -m benchmarks.diagnosis.signs [HOSTS ...]

The TCPStores are real. Rank 0 is a process of its own, as in a check. The other hosts are threads
of a few processes, each with its own connection and heartbeat. A few never connect. Then all ask at
the same time which hosts are missing, as they do when the limit is over.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

from torch._C._distributed_c10d import TCPStore

from benchmarks.measure.timing import machine
from orchestrator.posix.fd_limit import allow_files
from trainer.rank.heartbeat_store import HeartbeatClient, pause, prepare, watch

PROCESSES = 4
DEAD = 3
SETTLED_S = 5.0
LIMIT_S = timedelta(seconds=300)
Answer = tuple[tuple[int, ...] | None, float]


def serve(say: Connection, count: int) -> None:
    server = TCPStore("127.0.0.1", 0, None, True, LIMIT_S, wait_for_workers=False)
    prepare(server, count)
    say.send((server.port, os.getpid()))
    with contextlib.suppress(RuntimeError):
        watch(TCPStore("127.0.0.1", server.port, None, False, LIMIT_S), count)


def take_part(talk: Connection, port: int, ranks: Sequence[int]) -> None:
    """Beat; once told, ask, and say what was answered and after how long."""
    stores = {rank: TCPStore("127.0.0.1", port, None, False, LIMIT_S) for rank in ranks}
    hosts = [HeartbeatClient(rank, partial(stores.__getitem__, rank)) for rank in ranks]
    beating = [threading.Thread(target=host.beat) for host in hosts]
    for thread in beating:
        thread.start()
    for host in hosts:
        host.connected.wait()
    talk.send(len(hosts))
    talk.recv()
    begun, answers = time.monotonic(), []

    def ask(host: HeartbeatClient) -> None:
        answers.append((host.ask(), time.monotonic() - begun))

    asking = [threading.Thread(target=ask, args=(host,)) for host in hosts]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    talk.send(answers)
    for host in hosts:
        host.leave()
    for thread in beating:
        thread.join()
    talk.send("left")


def measure(count: int) -> str:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, count), daemon=True)
    server.start()
    port, pid = ours.recv()
    dead = tuple(range(count - DEAD, count))
    lines = []
    for first in range(PROCESSES):
        line, other = context.Pipe()
        ranks = range(first, count - DEAD, PROCESSES)
        context.Process(target=take_part, args=(other, port, ranks), daemon=True).start()
        lines.append(line)
    for line in lines:
        line.recv()
    spent = _cpu_s(pid)
    pause(SETTLED_S)
    beating = (_cpu_s(pid) - spent) / SETTLED_S
    files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - of another process
    spent = _cpu_s(pid)
    for line in lines:
        line.send("ask")
    answers: list[Answer] = [answer for line in lines for answer in line.recv()]
    asking = _cpu_s(pid) - spent
    for line in lines:
        line.recv()
    server.kill()
    right = sum(found == dead for found, _ in answers)
    last = max(took for _, took in answers)
    return (
        f"{count} hosts: beats take rank 0 {100 * beating:.0f} % of a core and {files} open files;"
        f" {right} of {len(answers)} named the {DEAD} that never came, the last after {last:.1f} s,"
        f" for {asking:.2f} s of CPU at rank 0"
    )


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # else a warning for each end of a connection
    allow_files()
    print(machine())
    for hosts in map(int, sys.argv[1:] or ("1024", "2048")):
        print(measure(hosts))
