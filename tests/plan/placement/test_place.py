"""Placement: which hosts get the node ranks of a plan when a job starts."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Memory, Plan, places
from orchestrator.errors import PlanError
from orchestrator.plan.placement.place import place, room_for


def plan_for(hosts: int, ranks: int = 2, tp: int = 1) -> Plan:
    return Plan(
        mesh=Mesh(dp_shard=hosts * ranks // tp, tp=tp),
        micro_batch_size=1,
        gradient_accumulation=1,
        hosts=tuple(f"planned-{i}" for i in range(hosts)),
        ranks_per_host=ranks,
        memory=Memory(peak_bytes=0, items={}),
    )


names = st.lists(st.integers(0, 30).map(lambda i: f"host-{i}"), unique=True, max_size=12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, list[str], tuple[str, ...], list[str]]:
    tp = draw(st.sampled_from([1, 2, 4]))
    plan = plan_for(draw(st.integers(1, 6)), tp * draw(st.integers(1, 2)), tp)
    return plan, draw(names), tuple(draw(names)), draw(names)


@settings(deadline=None, max_examples=50)
@given(cases())
def test_the_laws_of_placement(case: tuple[Plan, list[str], tuple[str, ...], list[str]]) -> None:
    plan, hosts, previous, avoid = case
    usable = set(hosts) - set(avoid)
    need = len(plan.hosts)
    if len(usable) < need:
        with pytest.raises(PlanError):
            place(plan, hosts, previous, avoid)
        return
    chosen = place(plan, hosts, previous, avoid)
    assert len(chosen) == len(set(chosen)) == need
    assert set(chosen) <= usable
    for node, host in enumerate(previous[:need]):
        assert (host in usable) == (chosen[node] == host)
    assert place(plan, hosts[::-1], previous, avoid) == chosen
    assert place(plan, hosts, chosen, avoid) == chosen

    ranks = list(places(plan, chosen))
    assert len({(one.host, one.local_rank) for one in ranks}) == plan.world_size
    assert len({tuple(one.coords.values()) for one in ranks}) == plan.world_size
    groups: dict[tuple[int, ...], set[str]] = {}
    for one in ranks:
        outer = tuple(at for axis, at in one.coords.items() if axis != "tp")
        groups.setdefault(outer, set()).add(one.host)
    assert all(len(hosts_of_group) == 1 for hosts_of_group in groups.values())


def test_the_first_hosts_in_natural_order_are_used() -> None:
    assert place(plan_for(3), ["host-10", "host-2", "host-1", "host-11"]) == (
        "host-1",
        "host-2",
        "host-10",
    )


def test_a_spare_takes_the_node_rank_of_the_host_that_broke() -> None:
    hosts = ["host-0", "host-1", "host-2", "host-3"]
    assert place(plan_for(3), hosts, ("host-0", "host-1", "host-2"), {"host-1"}) == (
        "host-0",
        "host-3",
        "host-2",
    )


def test_a_smaller_job_keeps_its_own_hosts_before_a_new_one() -> None:
    hosts = ["host-0", "host-1", "host-3"]
    previous = ("host-1", "host-2", "host-3")
    assert place(plan_for(2), hosts, previous) == ("host-1", "host-3")


def test_too_few_hosts_are_refused_and_excluded_hosts_are_named() -> None:
    with pytest.raises(PlanError) as caught:
        place(plan_for(3), ["a", "b", "c"], avoid=["c", "z"])
    assert caught.value.message == (
        "the plan needs 3 hosts, but only 2 of 3 registered hosts are usable; excluded: c"
    )
    assert "--set cluster.hosts=2" in caught.value.fix
    with pytest.raises(PlanError, match=r"wait for more hosts, or plan again for fewer$"):
        place(plan_for(1), [])


SWITCHES = {
    f"host-{number}": (f"spine-{number // 8}", f"leaf-{number % 16 // 4}") for number in range(31)
}
"""Four hosts per leaf, two leaves per spine."""


@settings(deadline=None, max_examples=30)
@given(cases())
def test_the_laws_of_placement_hold_on_a_tree(
    case: tuple[Plan, list[str], tuple[str, ...], list[str]],
) -> None:
    plan, hosts, previous, avoid = case
    usable = set(hosts) - set(avoid)
    need = len(plan.hosts)
    if len(usable) < need:
        return
    chosen = place(plan, hosts, previous, avoid, SWITCHES)
    assert len(chosen) == len(set(chosen)) == need
    assert set(chosen) <= usable
    for node, host in enumerate(previous[:need]):
        assert (host in usable) == (chosen[node] == host)
    assert place(plan, hosts, chosen, avoid, SWITCHES) == chosen
    lost = chosen[0]
    if len(usable) > need:  # the other hosts keep their node rank
        again = place(plan, hosts, chosen, [*avoid, lost], SWITCHES)
        assert again[1:] == chosen[1:]


def test_new_hosts_are_arranged_by_their_switches() -> None:
    """In the order of names, host-1 and host-2 would hold shards of different replicas."""
    switches = {"host-1": ("a",), "host-2": ("b",), "host-3": ("a",), "host-4": ("b",)}
    plan = replace(plan_for(4, 1), mesh=Mesh(dp_replicate=2, dp_shard=2))
    chosen = place(plan, list(switches), switches=switches)
    assert {chosen[:2], chosen[2:]} == {("host-1", "host-3"), ("host-2", "host-4")}


@st.composite
def wide_cases(
    draw: st.DrawFn,
) -> tuple[Plan, list[str], tuple[str, ...], list[str], dict[str, tuple[str, ...]]]:
    """tp groups of several hosts, and NVLink blocks of several sizes below two leaves."""
    wide, ranks = draw(st.sampled_from([2, 3])), draw(st.sampled_from([1, 2]))
    plan = plan_for(wide * draw(st.integers(1, 4)), ranks, wide * ranks)
    blocks = draw(st.lists(st.integers(0, 5), min_size=31, max_size=31))
    switches: dict[str, tuple[str, ...]] = {
        f"host-{n}": (f"leaf-{b % 2}", f"block-{b}") for n, b in enumerate(blocks)
    }
    some = st.lists(st.sampled_from(list(switches)), unique=True)
    return plan, draw(some), tuple(draw(some)), draw(some), switches


def blocks_of_groups(plan: Plan, hosts: tuple[str, ...], switches: Mapping[str, Any]) -> list[Any]:
    """The NVLink blocks that each tp group is in."""
    groups: dict[tuple[int, ...], set[Any]] = {}
    for one in places(plan, hosts):
        outer = tuple(at for axis, at in one.coords.items() if axis != "tp")
        groups.setdefault(outer, set()).add(switches[one.host])
    return list(groups.values())


@settings(deadline=None, max_examples=50)
@given(wide_cases())
def test_a_tp_group_never_leaves_its_nvlink_block(
    case: tuple[Plan, list[str], tuple[str, ...], list[str], dict[str, tuple[str, ...]]],
) -> None:
    plan, hosts, previous, avoid, switches = case
    plan = replace(plan, switches=switches)
    usable = set(hosts) - set(avoid)
    wide, need = plan.mesh.tp // plan.ranks_per_host, len(plan.hosts)
    room = wide * sum(size // wide for size in Counter(switches[h] for h in usable).values())
    assert room_for(plan, usable, switches) == room
    if room < need:
        with pytest.raises(PlanError):
            place(plan, hosts, previous, avoid, switches)
        return
    chosen = place(plan, hosts, previous, avoid, switches)
    assert len(chosen) == len(set(chosen)) == need
    assert set(chosen) <= usable
    assert all(len(blocks) == 1 for blocks in blocks_of_groups(plan, chosen, switches))
    assert place(plan, hosts[::-1], previous, avoid, switches) == chosen
    assert place(plan, hosts, chosen, avoid, switches) == chosen
    lost = chosen[0]
    if room_for(plan, usable - {lost}, switches) >= need:  # the other hosts keep their node rank
        again = place(plan, hosts, chosen, [*avoid, lost], switches)
        assert all(len(blocks) == 1 for blocks in blocks_of_groups(plan, again, switches))
        moved = [n for n in range(need) if again[n] != chosen[n]]
        spare = any(switches[h] == switches[lost] for h in usable - set(chosen))
        assert moved == [0] if spare else len(moved) <= wide


def test_hosts_without_a_known_block_take_no_wide_tp_group() -> None:
    plan = plan_for(2, 2, 4)
    with pytest.raises(PlanError, match=r"2 hosts of one NVLink block.*room for 0"):
        place(plan, ["a", "b"])


def test_a_group_whose_block_has_no_free_host_moves_completely() -> None:
    switches = {f"host-{n}": (f"block-{n // 3}",) for n in range(9)}
    plan = plan_for(4, 2, 4)
    placed = ("host-0", "host-1", "host-3", "host-4")
    lost_one = place(plan, list(switches), placed, ["host-0"], switches)
    assert lost_one == ("host-2", "host-1", "host-3", "host-4"), "its gap is filled in the block"
    lost_two = place(plan, list(switches), placed, ["host-0", "host-2"], switches)
    assert lost_two == ("host-6", "host-7", "host-3", "host-4")


def test_a_new_host_is_chosen_near_its_peers() -> None:
    switches = {"host-1": ("a",), "host-2": ("a",), "host-8": ("b",), "host-9": ("a",)}
    came = ["host-1", "host-8", "host-9"]
    assert place(plan_for(2, 1), came, ("host-1", "host-2"), (), switches) == ("host-1", "host-9")
    assert place(plan_for(2, 1), came, ("host-1", "host-2")) == ("host-1", "host-8")
