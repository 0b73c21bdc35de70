"""Bytes of collectives by definition, and their times compared with nccl-tests."""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.cost.collectives import (
    Wire,
    exchange_bytes,
    ring_all_reduce_bytes,
    ring_gather_bytes,
    tree_all_reduce_bytes,
)
from orchestrator.plan.cost.groups import Group, Pattern, group
from orchestrator.plan.cost.machine import machine_of
from tests.plan.cost.setups import fabric

GIB = 2**30
sizes = st.integers(1, 512)


def wire(size: int, stride: int = 1, profile: str = "h100-sxm-80gb", hosts: int = 1) -> Wire:
    return machine_of(fabric(profile, hosts)).wire(size, stride)


@pytest.mark.parametrize(
    ("size", "share"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75), (1024, 2046 / 1024)]
)
def test_a_ring_sends_all_parts_but_one_twice(size: int, share: float) -> None:
    """2 (K - 1) / K, Patarasuk and Yuan 2009."""
    assert ring_all_reduce_bytes(size, 1000) == pytest.approx(1000 * share)


@given(size=sizes, whole=st.integers(0, 10**12))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: int, whole: int) -> None:
    assert ring_all_reduce_bytes(size, whole) == 2 * ring_gather_bytes(size, whole)
    assert ring_gather_bytes(size, whole) <= whole


def test_a_tree_sends_the_whole_up_and_down() -> None:
    assert tree_all_reduce_bytes(64, 10) == 20
    assert tree_all_reduce_bytes(1, 10) == 0


def test_an_all_to_all_rank_keeps_its_own_part() -> None:
    assert exchange_bytes(4, 100) == 75


@pytest.mark.parametrize(
    ("profile", "low", "high"),
    [
        # nccl-tests: all_gather_perf on the 8 devices of a host, bus bandwidth from 1 GiB on.
        ("h100-sxm-80gb", 340e9, 375e9),
        ("a100-sxm-80gb", 220e9, 240e9),
    ],
)
def test_gathers_inside_a_host_are_as_fast_as_measured(
    profile: str, low: float, high: float
) -> None:
    seconds = wire(8, profile=profile).gather_s(8 * GIB)
    assert low < ring_gather_bytes(8, 8 * GIB) / seconds < high


def test_rings_between_hosts_use_the_links_of_all_ranks_of_a_host() -> None:
    """NVIDIA/nccl issue 1218: 340e9 on 32 hosts of 8 H100 with an adapter of 50e9 each."""
    all_of_them = wire(256, hosts=32)
    seconds = all_of_them.all_reduce_s(8 * GIB)
    assert 310e9 < ring_all_reduce_bytes(256, 8 * GIB) / seconds < 375e9
    one_a_host = wire(32, stride=8, hosts=32)
    assert one_a_host.bus_bytes_per_s == pytest.approx(all_of_them.bus_bytes_per_s / 8)


def test_small_sums_over_many_hosts_go_through_a_tree() -> None:
    """A ring would need 510 hops between hosts of 14 us each."""
    assert wire(2048, hosts=256).all_reduce_s(128) < 1e-3


@given(size=st.integers(2, 64), whole=st.floats(1, 1e10), more=st.floats(1, 100))
def test_time_grows_with_bytes_and_pieces_are_never_faster(
    size: int, whole: float, more: float
) -> None:
    one = wire(size, hosts=8)
    for seconds in (one.gather_s, one.all_reduce_s, one.exchange_s, one.send_s):
        assert seconds(whole) <= seconds(whole * more)
        assert seconds(whole * more) <= more * seconds(whole) * (1 + 1e-9)


def test_a_group_of_one_takes_no_time() -> None:
    alone = wire(1)
    assert alone.gather_s(1e9) == alone.all_reduce_s(1e9) == 0
    assert alone.exchange_s(1e9) == alone.send_s(1e9) == 0


@given(
    degrees=st.fixed_dictionaries({axis: st.sampled_from([1, 2, 4, 8]) for axis in AXES}),
    devices=st.sampled_from([1, 2, 4, 8]),
    hosts_per_block=st.sampled_from([1, 2, 4]),
    hosts_per_leaf=st.sampled_from([1, 2, 4]),
    axis=st.sampled_from(AXES),
)
def test_the_levels_of_a_group_are_those_of_its_ranks(
    degrees: dict[str, int], devices: int, hosts_per_block: int, hosts_per_leaf: int, axis: str
) -> None:
    mesh = Mesh(**degrees)
    base = fabric(hosts=max(1, mesh.world_size // devices), devices=devices)
    known = type(base)(
        profile=base.profile,
        hosts=base.hosts,
        devices_per_host=devices,
        hosts_per_leaf=hosts_per_leaf,
        blocks=(hosts_per_block,) * max(1, base.hosts // hosts_per_block),
    )
    members = [
        rank
        for rank in range(mesh.world_size)
        if all(place == 0 for other, place in mesh.coords(rank).items() if other != axis)
    ]
    stride = members[1] - members[0] if len(members) > 1 else 1
    found = group(degrees[axis], stride, known)
    hosts = {rank // devices for rank in members}
    blocks = {host // hosts_per_block for host in hosts}
    leaves = {host // max(hosts_per_block, hosts_per_leaf) for host in hosts}
    assert found.hosts == len(hosts)
    assert found.blocks == len(blocks)
    assert found.leaves == len(leaves)
    parts = {"host": hosts, "nvlink block": blocks, "leaf": leaves}
    assert found.level == next((what for what, some in parts.items() if len(some) == 1), "spine")


@pytest.mark.parametrize(
    ("pattern", "shares"),
    [
        ("ring", (56 / 64, 6 / 64, 2 / 64)),
        ("chain", (56 / 63, 6 / 63, 1 / 63)),
        ("pairs", (7 / 63, 24 / 63, 32 / 63)),
    ],
)
def test_a_group_sends_over_the_levels_between_its_ranks(
    pattern: Pattern, shares: tuple[float, ...]
) -> None:
    """8 hosts of 8 ranks, 4 hosts under a leaf."""
    wide = Group(size=64, per_block=8, hosts=8, blocks=8, leaves=2)
    assert tuple(wide.crossings(pattern).values()) == pytest.approx(shares)
    alone = Group(size=8, per_block=8, hosts=1, blocks=1, leaves=1)
    assert alone.crossings(pattern) == {"host": 1, "leaf": 0, "spine": 0}


@pytest.mark.parametrize("pattern", get_args(Pattern))
@given(
    size=st.sampled_from([2, 4, 8, 64]),
    stride=st.sampled_from([1, 2, 8, 64]),
    hosts_per_block=st.sampled_from([1, 1, 2, 4]),
    hosts_per_leaf=st.sampled_from([4, 16]),
)
def test_shares_of_levels_equal_those_counted_over_all_pairs(
    pattern: Pattern, size: int, stride: int, hosts_per_block: int, hosts_per_leaf: int
) -> None:
    blocks = (hosts_per_block,) * (512 // hosts_per_block)
    known = replace(fabric(hosts=512), hosts_per_leaf=hosts_per_leaf, blocks=blocks)
    hosts = [rank * stride // 8 for rank in range(size)]
    match pattern:
        case "pairs":
            pairs = list(itertools.permutations(hosts, 2))
        case _:
            pairs = list(zip(hosts, hosts[1:] + hosts[: pattern == "ring"], strict=False))
    levels = Counter(
        "host"
        if one == other
        else "nvlink block"
        if one // hosts_per_block == other // hosts_per_block
        else "leaf"
        if one // hosts_per_leaf == other // hosts_per_leaf
        else "spine"
        for one, other in pairs
    )
    found = group(size, stride, known).crossings(pattern)
    assert found == pytest.approx({level: levels[level] / len(pairs) for level in found})
    assert found.keys() >= levels.keys()


def in_blocks(size: int, stride: int = 1, link: Mapping[str, float] | None = None) -> Wire:
    """36 hosts of 4 devices in two NVLink blocks."""
    profile = load_profile("b200-sxm-180gb", {"intra_block": link} if link else None, "a test")
    return machine_of(Fabric(profile=profile, hosts=36, devices_per_host=4, blocks=(18, 18))).wire(
        size, stride
    )


def test_a_block_is_as_fast_as_a_host_of_its_size() -> None:
    one_host = Fabric(profile=load_profile("b200-sxm-180gb"), hosts=1, devices_per_host=72)
    inside, wide = in_blocks(32), machine_of(one_host).wire(32, 1)
    assert (inside.group.level, wide.group.level) == ("nvlink block", "host")
    for size in (1e3, 1e6, 1e9):
        assert inside.gather_s(size) == wide.gather_s(size)
        assert inside.all_reduce_s(size) == wide.all_reduce_s(size)
        assert inside.exchange_s(size) == wide.exchange_s(size)
        assert inside.send_s(size) == wide.send_s(size)


def test_the_link_of_a_block_limits_only_traffic_that_leaves_a_host() -> None:
    """The link has half the bandwidth and more latency."""
    slower = {"bytes_per_s": 450e9, "latency_s": 10e-6}
    assert in_blocks(32, link=slower).gather_s(1e9) > 1.8 * in_blocks(32).gather_s(1e9)
    assert in_blocks(4, link=slower).gather_s(1e9) == in_blocks(4).gather_s(1e9)


def test_rings_between_blocks_use_the_links_of_all_ranks_of_a_block() -> None:
    """400 Gb/s per device: this limits two ranks of a group in a block; NVLink limits 36."""
    near, far = in_blocks(72).bus_bytes_per_s, in_blocks(2, stride=72).bus_bytes_per_s
    assert in_blocks(4, stride=36).bus_bytes_per_s == pytest.approx(2 * far)
    assert in_blocks(144).bus_bytes_per_s == near
    without = Fabric(profile=load_profile("b200-sxm-180gb"), hosts=36, devices_per_host=4)
    assert machine_of(without).wire(144, 1).bus_bytes_per_s == pytest.approx(4 * far)
    assert 4 * far < near
