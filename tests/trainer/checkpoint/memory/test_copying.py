"""Copies of a rank's state into a slot: their digests, and what a GPU does beside them."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from orchestrator.agent.memory.slots import MemorySlots
from orchestrator.contract.memory.peers import CopyPlan
from tests.trainer.checkpoint.memory.test_disk_from_slot import START_ALONE
from trainer.checkpoint.memory.copying import OnDevice, OnHost, Tensors, copying_of, digest_of
from trainer.checkpoint.memory.slot import Slot, layout_of, slots_of

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn)


@pytest.fixture
def slot() -> Iterator[Slot]:
    with_memory = MemorySlots()
    yield slots_of(with_memory.of_attempt(START_ALONE, CopyPlan()), 0)[0]
    with_memory.close()


def bits(number: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements, whose bytes may be anything."""
    made = torch.Generator().manual_seed(number)
    size = count * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made).view(dtype)


@st.composite
def states(draw: st.DrawFn) -> Tensors:
    """Shards of any length, some of them in the middle of another tensor or transposed."""
    found = {}
    for number in range(draw(st.integers(1, 5))):
        dtype, count = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 40))
        skipped = draw(st.integers(0, 9))
        tensor = bits(number, skipped + count, dtype)[skipped:]
        if count % 2 == 0 and draw(st.booleans()):
            tensor = tensor.view(2, count // 2).t()
        found[f"tensor {number}"] = tensor
    return found


@given(states())
def test_the_digest_of_a_state_is_that_of_a_slot_with_it(state: Tensors) -> None:
    memory, layout = MemorySlots(), layout_of(state)
    (slot, *_) = slots_of(memory.of_attempt(START_ALONE, CopyPlan()), 0)
    copied = OnHost().start(slot, layout, state)
    assert int(digest_of(state, CPU)) == copied()
    memory.close()


def test_what_another_layout_of_the_same_size_left_between_tensors_does_not_count(
    slot: Slot,
) -> None:
    long, short = {"a": bits(1, 4000, torch.uint8)}, {"a": bits(2, 11, torch.uint8)}
    OnHost().start(slot, layout_of(long), long)
    layout = layout_of(short)
    assert layout.num_bytes == layout_of(long).num_bytes
    copied = OnHost().start(slot, layout, short)
    assert copied() != int(digest_of(short, CPU))
    slot.zero_gaps(layout)
    assert copied() == int(digest_of(short, CPU))


def test_ranks_on_cpus_wait_for_a_copy() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert isinstance(copying_of(CPU, optimizer), OnHost)


class OnGpu:
    """Weights and moments on a GPU, and copies of them."""

    def __init__(self, count: int) -> None:
        self.weight = nn.Parameter(torch.rand(count, device="cuda"))
        self.optimizer = torch.optim.Adam([self.weight], fused=True)
        self.step()  # makes the moments
        self.copying = OnDevice(self.weight.device, self.optimizer)

    @property
    def state(self) -> Tensors:
        moments = self.optimizer.state[self.weight]
        return {"model.weight": self.weight.detach(), **moments, "rng.0": torch.get_rng_state()}

    def step(self) -> None:
        self.weight.grad = torch.rand_like(self.weight)
        self.optimizer.step()


@pytest.mark.gpu
def test_a_copy_has_the_state_of_its_step_although_the_next_update_follows_at_once(
    slot: Slot,
) -> None:
    gpu = OnGpu(1 << 27)  # with its moments 1.5 GiB: 25 ms at the speed of a fast bus
    layout = layout_of(gpu.state)
    slot.reserve(layout, pinned=True)
    for _ in range(3):
        before = {name: tensor.clone() for name, tensor in gpu.state.items()}
        copied = gpu.copying.start(slot, layout, gpu.state)
        gpu.step()
        assert copied() == slot.digest(layout.table)
        for entry in layout.table:
            assert torch.equal(slot.view(entry), before[entry.name].cpu()), entry.name
        torch.cuda.synchronize()
        waited_s = gpu.copying.waited_s
        assert waited_s > 0
        gpu.step()  # no copy has begun since, so it waits for none
        torch.cuda.synchronize()
        assert gpu.copying.waited_s == waited_s
    gpu.copying.close()


@pytest.mark.gpu
def test_the_device_computes_while_it_copies(slot: Slot) -> None:
    gpu, factor = OnGpu(1 << 27), torch.rand(8192, 8192, device="cuda")
    layout = layout_of(gpu.state)
    slot.reserve(layout, pinned=True)

    def seconds(*, copies: bool, computes: bool) -> float:
        torch.cuda.synchronize()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        if copies:
            gpu.copying.start(slot, layout, gpu.state)
        for _ in range(4 * computes):
            torch.mm(factor, factor)
        if copies:
            gpu.copying.wait()
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    seconds(copies=True, computes=True)  # warms up
    copy_s, compute_s = seconds(copies=True, computes=False), seconds(copies=False, computes=True)
    assert seconds(copies=True, computes=True) < 0.9 * (copy_s + compute_s)
    gpu.copying.close()


@pytest.mark.gpu
def test_memory_that_the_kernel_refuses_is_told_to_who_asks_for_the_digest(slot: Slot) -> None:
    gpu = OnGpu(16)
    slot.close()
    copied = gpu.copying.start(slot, layout_of(gpu.state), gpu.state)
    gpu.step()
    with pytest.raises(OSError, match="Bad file descriptor"):
        copied()
    gpu.copying.close()
