"""The share of a device's memory that plans leave free."""

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.memory.peak_range import fits_share
from orchestrator.plan.planner import plan
from orchestrator.plan.search.hosts import find
from orchestrator.plan.search.search_space import AUTO_MARGIN, Space
from orchestrator.plan.search.smallest_change import smallest_changes
from tests.plan.search.spaces import DEEP, H100, hosts_of, space_of

FIXED = {
    "pp": 1,
    "dp_replicate": 1,
    "dp_shard": 2,
    "cp": 1,
    "tp": 1,
    "fsdp": {"reshard_after_forward": True, "reduce_gradients": "each"},
}
TRAIN = {
    "global_batch_size": 16,
    "micro_batch_size": 8,
    "activation_checkpointing": "none",
    "loss_chunks": 1,
}
PLENTY = H100.memory_bytes


def job(memory: int, **cluster: Any) -> Space:
    """A job whose keys are all fixed, on devices with `memory` bytes."""
    return space_of(DEEP, FIXED, TRAIN, {"gpus_per_host": 2, **cluster}, memory)


def _with_memory(space: Space) -> Inventory:
    """Hosts whose devices have the memory of `space`."""
    memory = space.fabric.profile.memory_bytes
    hosts = (replace(host, device_bytes=memory) for host in hosts_of(space).hosts)
    return Inventory(hosts=tuple(hosts))


def peak() -> int:
    return find(job(PLENTY), "throughput")[1].options[0].memory.peak_bytes


def test_a_plan_leaves_the_automatic_margin_free() -> None:
    space = job(int(peak() / (1 - AUTO_MARGIN)) + 1)
    searched, found = find(space, "throughput")
    assert found.options
    assert searched is space


def test_a_job_that_only_fills_the_device_has_a_plan_and_a_note() -> None:
    space = job(int(peak() / 0.98))
    searched, found = find(space, "throughput")
    assert found.options
    assert searched.spec.cluster.memory_margin == 0
    made = plan(space.spec, _with_memory(space), DEEP)
    assert any("may run out of memory" in note for note in made.notes)


def test_a_job_with_room_has_no_such_note() -> None:
    space = job(PLENTY)
    made = plan(space.spec, _with_memory(space), DEEP)
    assert not any("may run out of memory" in note for note in made.notes)


def test_a_margin_of_the_spec_is_never_given_up() -> None:
    space = job(int(peak() / 0.98), memory_margin=AUTO_MARGIN)
    assert not find(space, "throughput")[1].options


@pytest.mark.parametrize("margin", [0.0, "auto"])
def test_a_job_that_needs_more_than_the_device_is_refused(margin: Any) -> None:
    space = job(int(peak() / 1.02), memory_margin=margin)
    assert not find(space, "throughput")[1].options
    assert smallest_changes(space, hosts_of(space))


@pytest.mark.parametrize("memory", [40 << 30, 80 << 30, 180 << 30])
def test_a_plan_at_the_automatic_margin_fits_with_nine_of_ten_allocators(memory: int) -> None:
    reserve = find(job(PLENTY), "throughput")[1].options[0].memory.items
    fixed = reserve["communication"] + reserve["context"]
    tensors = int((memory * (1 - AUTO_MARGIN) - fixed) / (1 + 0.03))
    share = fits_share(tensors, dict(reserve), memory)
    assert share is not None
    assert share >= 0.9
