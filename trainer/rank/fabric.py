"""One process a host: a small all-reduce and messages to the neighbours on a ring, timed.

    python -m trainer.rank.fabric --check N --rank R --address A --port P --until T <<< "A B C"

Its last line is a `Checked` as JSON, in time whatever the others do: a watchdog gives the verdict
when the main thread is stuck. By signs of life in the store every one of them can then tell which
others are alive and wait as it does, and which gave none (`signs.py`).
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
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from orchestrator.contract.codec import encode
from orchestrator.contract.files.env import hides_gpus
from orchestrator.contract.messages.agent_protocol import Checked, Link
from trainer.rank.devices import device_of
from trainer.rank.heartbeat_store import ANSWER_S, Signs, all_gone, pause, prepare, watch
from trainer.rank.stores import serve

LEAVE_S = 1.0
"""For the store to hear that a process leaves."""
VERDICT_S = ANSWER_S + 0.5
"""Before the end, when the watchdog begins to find out who is missing."""
NAMED = 8
"""More hosts than that are counted, in words for people."""
STAY_POLL_S = 0.05
SIZES = (1 << 12, 1 << 20, 1 << 24)
"""Bytes that are reduced."""
LINK_BYTES = 1 << 22
TIMES = 5

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
    """Monotonic."""
    stage: str = "meeting the others"
    server: Store | None = None
    """Of rank 0, which lives as long as this does."""
    signs: Signs = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.signs = Signs(self.rank, lambda: _store(self, self.left()))

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
        _beside(lambda: watch(_store(check, check.left()), len(check.hosts)))
    _beside(check.signs.beat)
    _beside(lambda: _call_time(check))
    try:
        _say(check, _take_part(check, device_of(0, hidden=hidden)))
    except (RuntimeError, ValueError) as exc:  # torch's words for peers that went or never came
        _give_up(check, str(exc).split("\n")[0])
    return 0


def _check(argv: Sequence[str]) -> Check:
    parser = argparse.ArgumentParser(prog="trainer.rank.fabric")
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
    """A connection of its own: a wait on one blocks whoever else uses it."""
    return TCPStore(check.address, check.port, None, False, _seconds(seconds))


# The main thread


def _take_part(check: Check, device: torch.device) -> Checked:
    store = PrefixStore("group", _store(check, check.left()))
    check.stage = "connecting to all"
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
    took = {size: min(_all_reduce(size, device) for _ in range(TIMES)) for size in SIZES}
    return Checked(
        check=check.number,
        host=check.host,
        state="ok",
        seconds=min(took.values()),
        bytes_per_second=SIZES[-1] / took[SIZES[-1]],
        links=links,
    )


def _timed(work: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _all_reduce(size: int, device: torch.device) -> float:
    data = torch.ones(size // 4, device=device)
    took = _timed(lambda: dist.all_reduce(data), device)
    if data[0].item() != dist.get_world_size():
        raise RuntimeError(f"the sum of {dist.get_world_size()} ones is {data[0].item()}")
    return took


def _links(check: Check, device: torch.device) -> tuple[Link, ...]:
    """Every link alone with its two hosts: those at even places first, then the others."""
    count = len(check.hosts)
    if count < 2:
        return ()
    data = torch.zeros(LINK_BYTES // 4, device=device)
    found = []
    for first, second in turns(count):
        if check.rank in (first, second):
            leads = check.rank == first
            took = sorted(
                _there_and_back(data, leads, first + second - check.rank, device)
                for _ in range(TIMES + 1)
            )
            peer = check.hosts[first + second - check.rank]
            found.append(Link(peer=peer, seconds=took[TIMES // 2]))
    return tuple(found)


def turns(count: int) -> list[tuple[int, int]]:
    """The links of a ring of `count`, in an order in which neighbours do not wait in a circle."""
    ring = [(i, (i + 1) % count) for i in range(count if count > 2 else 1)]
    last = count - 1 if count % 2 else count  # of an odd ring, the link that fits in neither turn
    return sorted(ring, key=lambda pair: (pair[0] == last, pair[0] % 2))


def _there_and_back(data: torch.Tensor, leads: bool, peer: int, device: torch.device) -> float:
    def work() -> None:
        for sends in (leads, not leads):
            if sends:
                dist.send(data, peer)
            else:
                dist.recv(data, peer)

    return _timed(work, device)


# The verdict


def _call_time(check: Check) -> None:
    pause(check.left() - VERDICT_S)
    _give_up(check, "time is over")


def _give_up(check: Check, why: str) -> NoReturn:
    missing, words = find_missing(check)
    checked = Checked(
        check=check.number,
        host=check.host,
        state="waited",
        seconds=None,
        waited_for=missing,
        why=f"{why} while {check.stage}; {words}",
    )
    _say(check, checked)


def find_missing(check: Check, limit_s: float = ANSWER_S) -> tuple[tuple[str, ...], str]:
    """The hosts that never came, or whose beat has stopped without a verdict, and words for it.

    Only a store that was never reached speaks against the first host, which holds it: one that
    does not answer in time may have too much to do, and what became of it its own agent knows.
    """
    found = _within(limit_s, check.signs.ask)
    if not check.signs.connected.is_set() and check.rank:
        return (check.hosts[0],), f"{check.hosts[0]}, where all meet, cannot be reached"
    if found is None:
        return (), "who is missing could not be found out in time"
    missing = tuple(check.hosts[rank] for rank in found if rank != check.rank)
    if not missing:
        return (), "all the others are alive"
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return missing, f"no sign of life from {', '.join(missing[:NAMED])}{more}"


def _say(check: Check, checked: Checked) -> NoReturn:
    """The last word of this process, said once."""
    check.lock.acquire()  # for good: main thread and watchdog may both come here
    sys.stdout.write(json.dumps(encode(checked)) + "\n")
    sys.stdout.flush()
    _within(LEAVE_S if check.rank else check.left(), lambda: _leave(check))
    os._exit(0)  # whatever other threads are stuck in


def _leave(check: Check) -> None:
    """Be no longer missed. Rank 0, which holds the store, stays for the others to have read it."""
    check.signs.leave()
    if check.rank == 0:
        store = _store(check, check.left())
        while not all_gone(store, len(check.hosts)):
            pause(STAY_POLL_S)


def _beside(work: Callable[[], None]) -> None:
    """In a thread that ends when the store is gone: the verdict will say so."""

    def try_it() -> None:
        with contextlib.suppress(RuntimeError):
            work()

    threading.Thread(target=try_it, daemon=True).start()


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What `ask` answers; None where it fails, or still waits after so long."""
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
