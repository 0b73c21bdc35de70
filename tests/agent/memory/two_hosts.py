"""Hosts of one job in this process, each with slots that a test fills as ranks would."""

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import msgspec
from msgspec.structs import replace

from orchestrator.agent.memory.digest import digest_of
from orchestrator.agent.memory.host_copies import HostCopies, Where
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan, HostMemory, Peer, SlotsOffered, Wanted
from orchestrator.contract.memory.slot_file import (
    BEGIN,
    SENDING,
    Label,
    Sealed,
    clear,
    complete,
    label_of,
    mark_of,
)
from orchestrator.contract.messages.agent_protocol import Claim
from orchestrator.contract.messages.rank_messages import CopyReady
from orchestrator.job_secret import JobSecret
from tests.agent.processes.test_torchrun import START
from tests.agent.world import SECRET

SLOT_BYTES = 3 << 20
TENSORS_AT = 1 << 20
LIMIT_S = 60.0
P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an asynchronous test."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def host(name: str, folder: Path, secret: JobSecret = SECRET, launch: int = 1) -> HostCopies:
    folder.mkdir(exist_ok=True)
    claim = Claim(purpose="memory", launch=launch, host=name, incarnation=name)
    return HostCopies(Where(address="127.0.0.1", folder=folder, secret=secret, claim=claim))


def label(rank: int, step: int, attempt: int = 1, shared: int | None = None) -> Label:
    return Label(
        lineage=1,
        made=Made(step=step, attempt=attempt),
        rank=rank,
        ranks=2,
        config="c",
        shared=None if shared is None else Made(step=shared, attempt=attempt),
    )


def content(rank: int, step: int) -> bytes:
    """What the tensors of a slot are here: other bytes for each rank and step."""
    return bytes([rank + 1, step % 251]) * 1000


def fill(file: int, whose: Label, num_bytes: int = SLOT_BYTES) -> None:
    """Write a complete slot, as the trainer does."""
    clear(file)
    os.ftruncate(file, num_bytes)
    os.pwrite(file, content(whose.rank, whose.made.step), num_bytes - 2000)
    digest = digest_of(file, TENSORS_AT)
    assert digest is not None
    sealed = Sealed(**msgspec.structs.asdict(whose), digest=digest, digest_at=TENSORS_AT)
    text = msgspec.json.encode(sealed)
    os.pwrite(file, text, BEGIN.size)
    complete(file, len(text))


def read(file: int) -> tuple[Label | None, bytes]:
    return label_of(file), os.pread(file, 2000, os.fstat(file).st_size - 2000)


@dataclass
class TwoHosts:
    """Each has one rank, and keeps the copies of the other one."""

    first: HostCopies
    second: HostCopies
    attempt: int = 1

    async def start(self, **changes: Any) -> None:
        """Begin an attempt on both."""
        peers = [await peer_of(one, self.attempt) for one in (self.first, self.second)]
        for node, one in enumerate((self.first, self.second)):
            plan = CopyPlan(partners=(peers[1 - node],), holds=(1 - node,))
            await begin(one, node, replace(plan, **changes), self.attempt)

    def close(self) -> None:
        self.first.close()
        self.second.close()


async def begin(one: HostCopies, node: int, plan: CopyPlan, attempt: int = 1) -> HostMemory:
    start = replace(
        START, attempt=attempt, node_rank=node, nodes=2, ranks_per_host=1, lineage=1, copies=plan
    )
    return await one.prepare(start, plan)


async def peer_of(one: HostCopies, attempt: int = 1) -> Peer:
    offered = await one.offer(attempt)
    return Peer(host=offered.host, address="127.0.0.1", port=offered.port)


def slot_of(one: HostCopies, slot: int) -> int:
    file = one.slots.file(0, slot)
    assert file is not None
    return file


async def send(one: HostCopies, slot: int, whose: Label, copies: int = 1) -> int:
    """Have a complete slot copied to the partners. Returns its mark."""
    file = slot_of(one, slot)
    fill(file, whose)
    made = whose.made
    ready = CopyReady(
        attempt=made.attempt, rank=whose.rank, step=made.step, slot=slot, copies=copies
    )
    async with asyncio.timeout(LIMIT_S):
        while mark_of(file) == SENDING:
            one.ready(ready)
            await asyncio.sleep(0.01)
    return mark_of(file)


def steps(offered: SlotsOffered, rank: int) -> Sequence[int]:
    return sorted(found.made.step for found in offered.slots if found.rank == rank)


def wanted(whose: Label, *peers: Peer) -> Wanted:
    return Wanted(rank=whose.rank, label=whose, peers=peers)
