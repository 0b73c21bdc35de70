"""Hosts and their order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.inventory.hosts import Host, Inventory, grouped, natural
from orchestrator.inventory.local import local_inventory
from orchestrator.inventory.profile import Fabric, blocks_hold
from orchestrator.inventory.profiles import load_profile


def test_this_machine_plays_the_hosts_and_the_spares() -> None:
    cluster = ClusterSpec(hosts=2, gpus_per_host=4, spare_hosts=1)
    profile = load_profile("cpu")
    assert local_inventory(cluster, 1024).hosts == tuple(
        Host(name=name, devices=4, device_bytes=1024, profile=profile)
        for name in ("host-0", "host-1", "host-2")
    )


def test_hosts_with_the_same_reason_are_named_together() -> None:
    same = {f"h-{number}": "is busy" for number in range(4)}
    assert grouped({"a": "is drained", **same}, 2) == [
        "a is drained",
        "each of h-0, h-1 and 2 more is busy",
    ]


def test_hosts_come_in_natural_order_and_only_those_with_the_devices() -> None:
    inventory = Inventory(
        hosts=tuple(Host(name=f"n{i}", devices=8 if i != 3 else 7) for i in (10, 2, 3, 1))
    )
    assert [host.name for host in inventory.with_devices(8)] == ["n1", "n2", "n10"]


def test_host_names_must_be_unique() -> None:
    with pytest.raises(ValueError, match="host names must be unique, a appears twice"):
        Inventory(hosts=(Host(name="a", devices=1), Host(name="a", devices=1)))


def test_the_size_of_a_leaf_is_that_of_the_median_host() -> None:
    sizes = {"a": 16, "b": 12, "c": 12, "d": 3}
    hosts = tuple(
        Host(name=f"{leaf}{i}", devices=8, profile=load_profile("cpu"), switches=(leaf,))
        for leaf, size in sizes.items()
        for i in range(size)
    )
    fabric = Inventory(hosts=hosts).fabric(8)
    assert fabric is not None
    assert (fabric.hosts, fabric.hosts_per_leaf) == (43, 12)
    assert Inventory(hosts=(replace(hosts[0], profile=None),)).fabric(8) is None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("ab-019"), unique=True))
def test_the_order_is_total(names: list[str]) -> None:
    assert len({natural(name) for name in names}) == len(names)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_numbers_in_names_count_as_numbers(one: int, other: int) -> None:
    assert (natural(f"rack-1-host-{one}") < natural(f"rack-1-host-{other}")) == (one < other)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 20), min_size=1), st.integers(1, 20), st.integers(1, 60))
def test_groups_inside_blocks_are_not_larger_than_the_median_block(
    sizes: list[int], wide: int, groups: int
) -> None:
    blocks, hosts = tuple(sorted(sizes, reverse=True)), wide * groups
    fabric = Fabric(profile=load_profile("cpu"), hosts=hosts, devices_per_host=1, blocks=blocks)
    if blocks_hold(blocks, wide, hosts):
        assert fabric.hosts_per_block >= wide
    assert fabric.hosts_per_block in blocks
