"""The network check of a job: one process per host times an all-reduce and its ring neighbours.

    python -m trainer.rank.allreduce_check --check N --rank R --address A --port P --until T <<< "A
    B C"

Its last line of output is a `Checked` as JSON. It is printed before the deadline in any case: if
the main thread is stuck in a collective, a watchdog thread prints it. Heartbeats in the store
(`heartbeat_store.py`) show which hosts are alive and wait too, and which are missing.
"""

import argparse
import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median_low
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from orchestrator.contract.codec import encode
from orchestrator.contract.files.env import hides_gpus
from orchestrator.contract.messages.agent_protocol import Checked, Link
from trainer.rank.devices import device_of
from trainer.rank.heartbeat_store import ANSWER_S, HeartbeatClient, all_gone, pause, prepare, watch
from trainer.rank.stores import serve

LEAVE_S = 1.0
"""Time to tell the store that this process leaves."""
VERDICT_S = ANSWER_S + 0.5
"""So long before the deadline the watchdog starts to look for missing hosts."""
NAMED = 8
"""A message names at most so many hosts and counts the rest."""
STAY_POLL_S = 0.05
SIZES = (1 << 12, 1 << 20, 1 << 24)
"""Bytes per all-reduce."""
LINK_BYTES = 1 << 22
ROUND_TRIPS = 6
"""Per link. The first one also connects."""

T = TypeVar("T")


@dataclass
class Check:
    """One process of the check."""

    number: int
    rank: int
    hosts: tuple[str, ...]
    address: str
    port: int
    ends: float
    """Deadline on the monotonic clock."""
    stage: str = "connecting to the store"
    server: Store | None = None
    """On rank 0: the store's server, which lives as long as this object."""
    heartbeat: HeartbeatClient = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.heartbeat = HeartbeatClient(self.rank, lambda: _store(self, self.left()))

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    def left(self) -> float:
        return max(0.1, self.ends - time.monotonic())


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    check = _check(argv)
    hidden = hides_gpus(environ)
    if check.rank == 0:
        check.server = serve(check.address, check.port, _seconds(check.left()), shared=False)
        prepare(check.server, len(check.hosts))
        _in_thread(lambda: watch(_store(check, check.left()), len(check.hosts)))
    _in_thread(check.heartbeat.beat)
    _in_thread(lambda: _watchdog(check))
    try:
        _report(check, _take_part(check, device_of(0, hidden=hidden)))
    except (RuntimeError, ValueError) as exc:  # torch raises these if a peer is lost or missing
        _give_up(check, str(exc).split("\n")[0])
    return 0


def _check(argv: Sequence[str]) -> Check:
    parser = argparse.ArgumentParser(prog="trainer.rank.allreduce_check")
    parser.add_argument("--check", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--until", type=float, required=True, help="of the monotonic clock")
    args = parser.parse_args(argv)
    return Check(
        number=args.check,
        rank=args.rank,
        hosts=tuple(sys.stdin.read().split()),
        address=args.address,
        port=args.port,
        ends=args.until,
    )


def _seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def _store(check: Check, seconds: float) -> Store:
    """A new connection, because a wait on one connection blocks all its other users."""
    return TCPStore(check.address, check.port, None, False, _seconds(seconds))


# The main thread


def _take_part(check: Check, device: torch.device) -> Checked:
    store = PrefixStore("group", _store(check, check.left()))
    check.stage = "connecting to all hosts"
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=check.rank,
        world_size=len(check.hosts),
        timeout=_seconds(check.left()),
    )
    check.stage = "in the first all-reduce"
    _all_reduce(SIZES[0], device)
    check.stage = "sending to its neighbours"
    links = _links(check, device)
    check.stage = "in an all-reduce"
    for size in SIZES[1:]:
        _all_reduce(size, device)
    return Checked(check=check.number, host=check.host, state="ok", links=links)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _all_reduce(size: int, device: torch.device) -> None:
    data = torch.ones(size // 4, device=device)
    dist.all_reduce(data)
    if data[0].item() != dist.get_world_size():
        raise RuntimeError(f"the sum of {dist.get_world_size()} ones is {data[0].item()}")


def _links(check: Check, device: torch.device) -> tuple[Link, ...]:
    """Median round-trip time of each ring link of this host, measured one link at a time."""
    count = len(check.hosts)
    if count < 2:
        return ()
    data = torch.zeros(LINK_BYTES // 4, device=device)
    found = []
    for first, second in link_order(count):
        if check.rank in (first, second):
            sends_first = check.rank == first
            peer = first + second - check.rank
            took = [_round_trip(data, sends_first, peer, device) for _ in range(ROUND_TRIPS)]
            found.append(Link(peer=check.hosts[peer], seconds=median_low(took)))
    return tuple(found)


def link_order(count: int) -> list[tuple[int, int]]:
    """The links of a ring of `count` hosts, in an order without circular waits.

    Even links come first, then odd ones, so that a host uses one link at a time. In an odd ring the
    last link shares a host with both kinds and comes at the end.
    """
    ring = [(i, (i + 1) % count) for i in range(count if count > 2 else 1)]
    last = count - 1 if count % 2 else count
    return sorted(ring, key=lambda pair: (pair[0] == last, pair[0] % 2))


def _round_trip(data: torch.Tensor, sends_first: bool, peer: int, device: torch.device) -> float:
    def work() -> None:
        for sends in (sends_first, not sends_first):
            if sends:
                dist.send(data, peer)
            else:
                dist.recv(data, peer)

    return _timed(work, device)


# The verdict


def _watchdog(check: Check) -> None:
    pause(check.left() - VERDICT_S)
    _give_up(check, "the time limit has passed")


def _give_up(check: Check, why: str) -> NoReturn:
    missing, sentence = find_missing(check)
    checked = Checked(
        check=check.number,
        host=check.host,
        state="waited",
        waited_for=missing,
        why=f"{why} while {check.stage}; {sentence}",
    )
    _report(check, checked)


def find_missing(check: Check, limit_s: float = ANSWER_S) -> tuple[tuple[str, ...], str]:
    """Hosts that never connected or whose heartbeat stopped early, and a sentence about them.

    The first host runs the store. It counts as missing only if the store was never reached. A store
    that answers late may be overloaded, and the first host's own agent knows whether it is alive.
    """
    found = _call_with_timeout(limit_s, check.heartbeat.ask)
    if not check.heartbeat.connected.is_set() and check.rank:
        return (check.hosts[0],), f"the store on {check.hosts[0]} is unreachable"
    if found is None:
        return (), "the store did not say in time which hosts are missing"
    missing = tuple(check.hosts[rank] for rank in found if rank != check.rank)
    if not missing:
        return (), "all other hosts are alive"
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return missing, f"no heartbeat from {', '.join(missing[:NAMED])}{more}"


def _report(check: Check, checked: Checked) -> NoReturn:
    """Print the result once and end the process."""
    check.lock.acquire()  # never released: main thread and watchdog may both get here
    sys.stdout.write(json.dumps(encode(checked)) + "\n")
    sys.stdout.flush()
    _call_with_timeout(LEAVE_S if check.rank else check.left(), lambda: _leave(check))
    os._exit(0)  # a normal exit would wait for threads that are stuck in a collective


def _leave(check: Check) -> None:
    """Mark this process as finished. Rank 0 runs the store and stays until all others left."""
    check.heartbeat.leave()
    if check.rank == 0:
        store = _store(check, check.left())
        while not all_gone(store, len(check.hosts)):
            pause(STAY_POLL_S)


def _in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread, which ends quietly if the store is lost: the verdict reports that."""

    def try_it() -> None:
        with contextlib.suppress(RuntimeError):
            work()

    threading.Thread(target=try_it, daemon=True).start()


def _call_with_timeout(seconds: float, ask: Callable[[], T]) -> T | None:
    """The result of `ask`; None if it fails or takes longer than `seconds`."""
    answers: queue.Queue[T | None] = queue.Queue()

    def try_it() -> None:
        try:
            answers.put(ask())
        except RuntimeError:
            answers.put(None)

    threading.Thread(target=try_it, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return None


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
