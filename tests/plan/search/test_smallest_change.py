"""Changes of the spec that make a job fit."""

import math
import shlex
from typing import Any

import pytest
from hypothesis import assume, event, given, settings

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.plan.search.best import can_fit, search
from orchestrator.plan.search.edits import Edits, apply, show_edits
from orchestrator.plan.search.hosts import with_hosts
from orchestrator.plan.search.search_space import AUTO_MARGIN, Space
from orchestrator.plan.search.smallest_change import SpecChange, smallest_changes
from tests.plan.search.spaces import DEEP, H100, space_of, spaces

ONE_HOST = {"hosts": 1, "gpus_per_host": 4}


def many_hosts(space: Space) -> Inventory:
    devices = space.fabric.devices_per_host
    return Inventory(
        hosts=tuple(Host(name=f"h{i}", devices=devices, profile=H100) for i in range(64))
    )


def found(space: Space) -> list[SpecChange]:
    return list(smallest_changes(space, many_hosts(space)))


@settings(deadline=None, max_examples=10)
@given(space=spaces)
def test_every_proposed_change_leads_to_a_plan(space: Space) -> None:
    assume(not can_fit(space))
    ways = found(space)
    event(f"{len(ways)} ways out")
    for way in ways:
        spec = apply(space.spec, way.edits)
        changed = with_hosts(space, spec.cluster.hosts)
        options = search(Space(spec, changed.shape, changed.fabric), "throughput").options
        assert options, way


def test_a_change_is_quoted_for_a_shell() -> None:
    edits: Edits = {"model.lora": LoraSpec(quantize="nf4"), "train.micro_batch_size": 1}
    assert shlex.split(show_edits(edits)) == [
        "--set",
        "model.lora={quantize: nf4}",
        "--set",
        "train.micro_batch_size=1",
    ]


def needed(train: Any, parallel: Any, hosts: int = 1) -> int:
    """Memory of a device with which the smallest plan of a small job on `hosts` just leaves the
    margin."""
    cluster = {"hosts": hosts, "gpus_per_host": 4}
    space = space_of(DEEP, parallel, {"global_batch_size": 8, **train}, cluster, 1 << 40)
    return math.ceil(search(space, "memory").options[0].memory.peak_bytes / (1 - AUTO_MARGIN))


OFFLOAD = {"fsdp": {"cpu_offload": True}}


@pytest.mark.parametrize(
    ("train", "parallel", "limit", "said"),
    [
        (
            {"micro_batch_size": 8},
            {},
            needed({}, {}),
            "--set train.micro_batch_size=auto  (the planner chooses it)",
        ),
        (
            {"activation_checkpointing": "none"},
            {},
            needed({}, {}),
            "--set train.activation_checkpointing=auto  (the planner chooses it)",
        ),
        ({}, {}, needed({}, OFFLOAD), "--set parallel.fsdp.cpu_offload=true  (slower"),
        ({}, {"data": "ddp"}, needed({}, {}), "--set parallel.data=fsdp  (the planner chooses it)"),
    ],
)
def test_the_smallest_change_comes_first(train: Any, parallel: Any, limit: int, said: str) -> None:
    space = space_of(DEEP, parallel, {"global_batch_size": 8, **train}, ONE_HOST, limit)
    assert not can_fit(space)
    assert str(found(space)[0]).startswith(said)


def test_two_fixed_keys_are_freed_together_if_neither_alone_helps() -> None:
    train = {"global_batch_size": 8, "micro_batch_size": 8, "activation_checkpointing": "none"}
    limit = needed({}, OFFLOAD)
    fixed = {"data": "fsdp", "fsdp": {"cpu_offload": True}}
    ways = found(space_of(DEEP, fixed, train, ONE_HOST, limit))
    assert all(len(way.edits) <= 2 for way in ways)
    pair = {"train.micro_batch_size": "auto", "train.activation_checkpointing": "auto"}
    assert pair in [way.edits for way in ways]


def test_too_few_free_hosts_are_named() -> None:
    space = space_of(DEEP, {}, {"global_batch_size": 8}, ONE_HOST, needed({}, {}, 2))
    inventory = Inventory(hosts=(Host(name="a", devices=4, profile=H100),))
    said = [str(way) for way in smallest_changes(space, inventory)]
    assert any("more hosts; the inventory has 1 free" in one for one in said)
