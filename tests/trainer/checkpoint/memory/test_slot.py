"""A slot holds a complete checkpoint or none, whatever ends the process that writes it."""

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from orchestrator.agent.memory.digest import digest_of, is_sound
from orchestrator.agent.memory.slots import MemorySlots, paths
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan
from orchestrator.contract.memory.slot_file import header_of as header_of_file
from tests.agent.processes.test_torchrun import START
from trainer.checkpoint.memory.slot import Header, Layout, Slot, layout_of

STATE = {
    "model.weight": torch.arange(5_000, dtype=torch.float32).view(50, 100),
    "model.bias": torch.arange(7).to(torch.bfloat16),
    "optimizer.weight.step": torch.tensor(3.0),
    "model.empty": torch.empty(0, 4),
    "rng.0": torch.get_rng_state(),
}
"""Shards as ranks have them: of several types, one of them empty."""


@pytest.fixture
def memory() -> Iterator[MemorySlots]:
    memory = MemorySlots()
    yield memory
    memory.close()


@pytest.fixture
def slot(memory: MemorySlots) -> Slot:
    start = msgspec.structs.replace(START, ranks_per_host=1)
    return Slot(memory.of_attempt(start, CopyPlan()).slots[0][0])


def header_of(slot: Slot, layout: Layout, step: int = 4, progress: str = "{}") -> Header:
    return Header(
        lineage=1,
        made=Made(step=step, attempt=1),
        rank=0,
        ranks=1,
        config="c",
        history="h",
        digest=slot.digest(layout.table),
        digest_at=layout.table[0].offset,
        progress=progress,
        table=layout.table,
    )


def written(slot: Slot) -> Layout:
    layout = layout_of(STATE)
    slot.reserve(layout)
    slot.write(layout, STATE)
    slot.complete(header_of(slot, layout))
    return layout


def test_every_tensor_comes_back_bit_by_bit(slot: Slot) -> None:
    written(slot)
    found = Slot(slot.path)  # as the rank of the next attempt opens it
    header = found.header()
    assert header is not None
    into = {name: torch.full_like(tensor, 1) for name, tensor in STATE.items()}
    found.read(header.table, into)
    assert all(torch.equal(into[name], STATE[name]) for name in STATE)
    assert found.digest(header.table) == header.digest


def test_a_slot_is_empty_before_and_while_it_is_written(slot: Slot) -> None:
    assert slot.header() is None
    layout = written(slot)
    slot.write(layout, STATE)
    assert slot.header() is None


def test_a_writer_that_is_killed_leaves_an_empty_slot(slot: Slot) -> None:
    layout = written(slot)
    child = os.fork()
    if child == 0:
        slot.write(layout, STATE)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert Slot(slot.path).header() is None


def test_a_flipped_bit_changes_the_digest(slot: Slot) -> None:
    layout = written(slot)
    digest = slot.digest(layout.table)
    with Path(slot.path).open("r+b") as file:
        file.seek(layout.num_bytes - 5_000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    assert slot.digest(layout.table) != digest


def test_an_agent_computes_the_same_digest(slot: Slot) -> None:
    layout = written(slot)
    with Path(slot.path).open("r+b") as file:
        fd = file.fileno()
        length = len(header_of_file(fd) or b"")
        assert digest_of(fd, layout.table[0].offset) == slot.digest(layout.table)
        assert is_sound(fd, length)
        os.pwrite(fd, b"\x01", layout.num_bytes - 1)
        assert not is_sound(fd, length)


@pytest.mark.parametrize(
    "junk",
    [b"\xff" * 64, b"\x08" + bytes(7) + b"not JSON", b"\x01"],
    ids=["long", "not JSON", "short"],
)
def test_junk_is_no_checkpoint(slot: Slot, junk: bytes) -> None:
    layout = layout_of(STATE)
    slot.reserve(layout)
    with Path(slot.path).open("r+b") as file:
        file.write(junk)
    assert slot.header() is None


def test_a_bit_that_flips_in_the_header_is_found(slot: Slot) -> None:
    """It has the position in the data, and the digest is of the tensors alone."""
    layout = layout_of(STATE)
    slot.reserve(layout)
    slot.write(layout, STATE)
    slot.complete(header_of(slot, layout, progress='{"read": 12}'))
    assert slot.header() is not None
    with Path(slot.path).open("r+b") as file:
        at = file.read().index(b": 12}") + 2
        os.pwrite(file.fileno(), b"3", at)
    assert slot.header() is None


def test_a_header_without_room_is_refused(slot: Slot) -> None:
    layout = layout_of(STATE)
    slot.reserve(layout)
    slot.write(layout, STATE)
    with pytest.raises(ValueError, match="more than its room"):
        slot.complete(header_of(slot, layout, progress="x" * layout.table[0].offset))
    assert slot.header() is None


def test_memory_that_a_limit_refuses_is_no_slot(slot: Slot) -> None:
    layout = layout_of(STATE)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            slot.reserve(layout)
        except OSError as exc:
            os._exit(exc.errno or 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EFBIG
    assert slot.header() is None


def test_another_layout_takes_the_place_of_the_old_one(slot: Slot) -> None:
    old = written(slot)
    other = layout_of({"model.weight": torch.zeros(3)})
    slot.reserve(other)
    assert slot.header() is None
    assert slot.size == other.num_bytes < old.num_bytes


def test_memory_is_freed_with_its_owner() -> None:
    memory = MemorySlots()
    two = memory.of_attempt(msgspec.structs.replace(START, ranks_per_host=2), CopyPlan())
    slot = Slot(two.slots[1][1])
    written(slot)
    alone = msgspec.structs.replace(START, ranks_per_host=1)
    one = memory.of_attempt(alone, CopyPlan())
    assert one.slots == two.slots[:1], "the rank that stays keeps its slots"
    with pytest.raises(FileNotFoundError):
        Slot(two.slots[1][0])
    assert paths(memory.others) == (two.slots[1][1],), "ranks of the other mesh read it"
    memory.drop_others()
    assert slot.size == 0
    with pytest.raises(FileNotFoundError):
        Slot(two.slots[1][1])
    memory.close()
    with pytest.raises(FileNotFoundError):
        Slot(two.slots[0][0])
