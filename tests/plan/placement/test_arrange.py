"""Placements are compared with all alternatives on small trees, and with a bound on large ones."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.plan import Traffic
from orchestrator.inventory.generate import regular
from orchestrator.inventory.hosts import Host, natural, tree_of
from orchestrator.plan.placement.arrange import arrange, groups_in_blocks
from orchestrator.plan.placement.cost import cost_of
from orchestrator.plan.placement.edges import edges_of, flows_of
from tests.plan.placement.placement_bound import Axis, Bound
from tests.plan.placement.placement_force import Force
from tests.plan.placement.placement_trees import (
    ALL_KINDS,
    Shape,
    Switches,
    large_case,
    meshes,
    switches_of,
    traffic,
    trees,
)


def costs_by_permutation(mesh: Mesh, switches: Switches, sent: Sequence[Traffic]) -> set[int]:
    """The costs of all ways to choose hosts for the nodes of `mesh`, one rank each."""
    hosts = list(switches)
    depth = max(map(len, switches.values()))
    levels = [[_levels(switches[a], switches[b], depth) for b in hosts] for a in hosts]
    edges = [
        (one, other, size)
        for size, (ones, others) in edges_of(mesh, 1, flows_of(mesh, sent)).items()
        for one, other in zip(ones, others, strict=True)
    ]
    return {
        sum(size * levels[at[one]][at[other]] for one, other, size in edges)
        for at in itertools.permutations(range(len(hosts)), mesh.world_size)
    }


def _levels(one: tuple[str, ...], other: tuple[str, ...], depth: int) -> int:
    """Number of levels that traffic between two hosts leaves: those of switches, and the host's."""
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return 1 + depth - len(list(shared))


@pytest.mark.parametrize("hosts", [2, 3, 4, 5])
def test_the_brute_force_covers_every_placement(hosts: int) -> None:
    """Skipping exchanges of equal hosts or branches does not change the set of costs."""
    for nodes in range(2, hosts + 1):
        for mesh in meshes(nodes):
            force = Force.of(mesh, ALL_KINDS)
            for shape in trees(hosts):
                plain = costs_by_permutation(mesh, switches_of(shape), ALL_KINDS)
                assert set(force.costs(shape)) == plain, (shape, mesh)


@pytest.mark.parametrize(("hosts", "ways"), [(4, 26), (5, 236), (6, 2752), (7, 39208)])
def test_placements_on_all_trees_are_counted_by_labelled_trees(hosts: int, ways: int) -> None:
    force = Force.of(Mesh(dp_shard=hosts), ALL_KINDS)
    assert sum(len(force.costs(shape)) for shape in trees(hosts)) == ways, "OEIS A000311"


@pytest.mark.parametrize(
    "hosts",
    [2, 3, 4, 5, 6]
    + [pytest.param(hosts, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for hosts in (7, 8)],
)
def test_a_placement_on_a_small_tree_has_the_least_cost(hosts: int) -> None:
    for nodes in range(2, hosts + 1):
        for mesh in meshes(nodes):
            force = Force.of(mesh, ALL_KINDS)
            for shape in trees(hosts):
                switches = switches_of(shape)
                found = arrange(mesh, 1, switches, switches, ALL_KINDS)
                assert found.cost.total == min(force.costs(shape)), (shape, mesh)


def with_blocks(shape: Shape) -> dict[str, tuple[str, ...]]:
    """The hosts of a tree whose lowest switches are NVLink blocks. Hosts directly below the root
    are in no block."""
    hosts = [
        Host(name=name, devices=1, switches=path[:-1], nvlink_block="/".join(path) or None)
        for name, path in switches_of(shape).items()
    ]
    return tree_of(hosts)


def wide_meshes(hosts: int) -> Iterator[tuple[Mesh, int]]:
    """Meshes with tp groups of several nodes, one rank each, on at most `hosts` hosts."""
    for wide in range(2, hosts + 1):
        for groups in range(1, hosts // wide + 1):
            for mesh in meshes(groups):
                yield replace(mesh, tp=wide), wide


def costs_in_blocks(mesh: Mesh, switches: Switches, ways: Iterable[Sequence[str]]) -> set[int]:
    depth = max(map(len, switches.values()), default=0)
    edges = [
        (one, other, size)
        for size, (ones, others) in edges_of(mesh, 1, flows_of(mesh, WIDE_KINDS)).items()
        for one, other in zip(ones, others, strict=True)
    ]
    return {
        sum(size * _levels(switches[at[a]], switches[at[b]], depth) for a, b, size in edges)
        for at in ways
    }


def ways_by_permutation(mesh: Mesh, wide: int, switches: Switches) -> Iterator[Sequence[str]]:
    """Every choice of hosts in which no tp group leaves a block."""
    for at in itertools.permutations(switches, mesh.world_size):
        firsts = range(0, len(at), wide)
        if all(len({switches[h] for h in at[n : n + wide]}) == 1 for n in firsts):
            yield at


def ways_by_block(mesh: Mesh, wide: int, switches: Switches) -> Iterator[Sequence[str]]:
    """Every choice of blocks for the tp groups, each on the first free hosts of its block."""
    hosts: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for host, path in switches.items():
        hosts[path].append(host)
    for chosen in itertools.product(hosts, repeat=mesh.world_size // wide):
        if all(len(hosts[b]) >= wide * times for b, times in Counter(chosen).items()):
            left = {block: iter(hosts[block]) for block in chosen}
            yield [next(left[block]) for block in chosen for _ in range(wide)]


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 6])
def test_tp_groups_treat_all_hosts_of_a_block_alike(hosts: int) -> None:
    for shape in trees(hosts):
        switches = with_blocks(shape)
        for mesh, wide in wide_meshes(hosts):
            plain = costs_in_blocks(mesh, switches, ways_by_permutation(mesh, wide, switches))
            assert plain == costs_in_blocks(mesh, switches, ways_by_block(mesh, wide, switches))


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 6, 7, pytest.param(8, marks=[pytest.mark.slow])])
def test_wide_tp_groups_on_a_small_tree_get_the_best_placement(hosts: int) -> None:
    for shape in trees(hosts):
        switches = with_blocks(shape)
        for mesh, wide in wide_meshes(hosts):
            ways = costs_in_blocks(mesh, switches, ways_by_block(mesh, wide, switches))
            if not ways:
                assert len(groups_in_blocks(switches, switches, wide)) * wide < mesh.world_size
                continue
            found = arrange(mesh, 1, switches, switches, WIDE_KINDS)
            blocks = [{switches[h] for h in group} for group in batched(found.hosts, wide)]
            assert all(len(those) == 1 for those in blocks), (shape, mesh)
            assert found.cost.total == min(ways), (shape, mesh)


@pytest.mark.parametrize(("hosts", "count"), [(5, 12), (6, 33), (7, 90), (8, 261)])
def test_every_tree_is_among_the_small_trees(hosts: int, count: int) -> None:
    assert len(set(trees(hosts))) == count, "OEIS A000669"


def bound_of(mesh: Mesh, switches: Switches, sent: Sequence[Traffic], least: int) -> float:
    """A lower bound on the cost of every placement. `least` is the cost of leaving hosts."""
    axes: list[Axis] = [
        (getattr(mesh, flow.axes[0]), 8 * flow.bytes_per_rank, flow.pattern == "ring")
        for flow in flows_of(mesh, sent)
        if flow.axes != ("tp",)
    ]
    bound = Bound(tuple(axes))
    levels = (Counter(path[:size] for path in switches.values()) for size in (1, 2))
    return least + sum(bound.of_level(list(rooms.values())) for rooms in levels)


@pytest.mark.parametrize(
    "seeds",
    [range(60), pytest.param(range(60, 1000), marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=str,
)
def test_placements_on_large_trees_are_close_to_a_lower_bound(seeds: range) -> None:
    for seed in seeds:
        mesh, switches, sent = large_case(seed)
        found = arrange(mesh, 8, switches, switches, sent)
        least = bound_of(mesh, switches, sent, found.cost.crossing[0])
        assert least <= found.cost.total <= 1.1 * least, seed


@settings(max_examples=20)
@given(st.integers(3, 5), st.data())
def test_the_lower_bound_is_below_the_best_placement(hosts: int, data: st.DataObject) -> None:
    switches = switches_of(data.draw(st.sampled_from(trees(hosts))))
    mesh = data.draw(st.sampled_from(list(meshes(data.draw(st.integers(2, hosts))))))
    sizes = data.draw(st.tuples(*[st.integers(1, 1000)] * 4))
    sent = [traffic(axis, size) for axis, size in zip(AXES, sizes, strict=False)]
    axes: list[Axis] = [
        (getattr(mesh, f.axes[0]), f.bytes_per_rank, True) for f in flows_of(mesh, sent)
    ]
    best = arrange(mesh, 1, switches, switches, sent).cost
    depth = max(map(len, switches.values()))
    for level, size in enumerate(range(depth, 0, -1), 1):
        padded = [(*path, *[name] * (depth - len(path)))[:size] for name, path in switches.items()]
        assert Bound(tuple(axes)).of_level(list(Counter(padded).values())) <= best.crossing[level]


WIDE_KINDS = (*ALL_KINDS, traffic("tp", 1000))


def batched(values: Sequence[str], size: int) -> list[Sequence[str]]:
    return [values[at : at + size] for at in range(0, len(values), size)]


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=8, max_size=60),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([1, 4]),
    st.data(),
)
def test_wide_tp_groups_stay_in_blocks_and_never_cost_more_than_by_name(
    at: list[tuple[int, int]], wide: int, ranks: int, data: st.DataObject
) -> None:
    switches = {f"h{n}": (f"leaf-{leaf}", f"block-{leaf}-{b}") for n, (leaf, b) in enumerate(at)}
    room = len(groups_in_blocks(switches, switches, wide))
    assume(room)
    groups = data.draw(st.integers(1, room))
    shard = data.draw(st.sampled_from([n for n in range(1, groups + 1) if groups % n == 0]))
    mesh = Mesh(pp=groups // shard, dp_shard=shard, tp=wide * ranks)
    found = arrange(mesh, ranks, switches, switches, WIDE_KINDS)
    assert all(len({switches[h] for h in group}) == 1 for group in batched(found.hosts, wide))
    assert sorted(found.hosts + found.spares) == sorted(switches), "each host once, and all"
    assert found.cost == cost_of(mesh, ranks, found.hosts, switches, WIDE_KINDS)
    assert found.cost.total <= found.by_name.total
    assert found.cost.crossing[0] == found.by_name.crossing[0]
    assert arrange(mesh, ranks, reversed(list(switches)), switches, WIDE_KINDS) == found


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Mesh, int, Switches]:
    ranks = draw(st.sampled_from([1, 2, 4]))
    mesh = Mesh(
        pp=draw(st.integers(1, 3)),
        dp_replicate=draw(st.integers(1, 3)),
        dp_shard=draw(st.integers(1, 4)),
        cp=draw(st.sampled_from([1, 2])),
        tp=draw(st.sampled_from([tp for tp in (1, 2, 4) if ranks % tp == 0])),
    )
    if mesh.world_size % ranks:
        mesh = Mesh(dp_shard=mesh.world_size, tp=ranks)
    nodes = mesh.world_size // ranks
    path = st.tuples(st.integers(0, 2), st.integers(0, 2)).map(
        lambda at: (f"spine-{at[0]}", f"leaf-{at[1]}")
    )
    paths = draw(st.lists(path, min_size=nodes, max_size=nodes + 6))
    return mesh, ranks, {f"h{number}": path for number, path in enumerate(paths)}


@settings(max_examples=50)
@given(clusters())
def test_an_arrangement_uses_each_host_once_and_never_costs_more_than_by_name(
    case: tuple[Mesh, int, Switches],
) -> None:
    mesh, ranks, switches = case
    found = arrange(mesh, ranks, switches, switches)
    assert len(found.hosts) * ranks == mesh.world_size
    assert sorted(found.hosts + found.spares) == sorted(switches), "each host once, and all"
    assert found.cost == cost_of(mesh, ranks, found.hosts, switches)
    by_name = sorted(switches, key=natural)[: len(found.hosts)]
    assert found.by_name == cost_of(mesh, ranks, by_name, switches)
    assert found.cost.total <= found.by_name.total
    assert arrange(mesh, ranks, reversed(list(switches)), switches) == found


@settings(max_examples=30)
@given(st.integers(2, 6), st.data())
def test_more_available_hosts_never_raise_the_cost(nodes: int, data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(list(meshes(nodes))))
    switches = switches_of(data.draw(st.sampled_from(trees(7))))
    fewer = data.draw(st.permutations(list(switches)))[:nodes]
    few = arrange(mesh, 1, fewer, switches, ALL_KINDS)
    assert arrange(mesh, 1, switches, switches, ALL_KINDS).cost.total <= few.cost.total


def test_hosts_without_a_known_switch_are_chosen_by_name() -> None:
    names = [f"host-{number}" for number in (10, 9, 2, 1)]
    found = arrange(Mesh(dp_shard=3), 1, names, {})
    assert found.hosts == ("host-1", "host-2", "host-9")
    assert found.cost == found.by_name


def test_sharding_groups_are_kept_below_one_leaf_and_replicas_go_outside() -> None:
    """16 hosts per leaf. Names are round-robin over leaves, so neighbours by name share no leaf."""
    hosts = regular(None, 64, 8, (16,)).hosts
    switches = {
        f"h{number}": hosts[(number % 4) * 16 + number // 4].switches for number in range(64)
    }
    mesh = Mesh(dp_replicate=4, dp_shard=16, tp=8)
    sent = [traffic("dp_shard", 1000), traffic("dp_replicate", 100, "all-reduce")]
    found = arrange(mesh, 8, switches, switches, sent)
    leaves = [switches[host] for host in found.hosts]
    assert all(len(set(leaves[at : at + 16])) == 1 for at in range(0, 64, 16))
    assert found.cost.crossing == (64 * 8 * 1100, 64 * 8 * 100)
    assert found.by_name.crossing == (64 * 8 * 1100, 64 * 8 * 1000)


def test_a_leaf_holds_a_tile_if_two_axes_send_equally() -> None:
    """16 of 16 x 16 nodes: a row sends 16 x 2 + 0, a square of 4 x 4 the same, but 2 x 8 sends
    more. With 8 hosts per leaf and rows of 16, a tile of 2 x 4 is better than half a row."""
    hosts = regular(None, 256, 1, (8,)).hosts
    mesh = Mesh(dp_replicate=16, dp_shard=16)
    sent = [traffic("dp_shard", 10), traffic("dp_replicate", 10, "all-reduce")]
    found = arrange(mesh, 1, [host.name for host in hosts], tree_of(hosts), sent)
    assert found.cost.crossing[1] == 32 * (2 * 2 + 2 * 4) * 10 // 2


def test_spares_are_near_the_hosts_that_they_replace() -> None:
    switches = {"a": ("x",), "b": ("y",), "c": ("y",), "d": ("y",), "e": ("x",)}
    found = arrange(Mesh(dp_shard=2), 1, switches, switches)
    assert found.hosts == ("a", "e")
    assert arrange(Mesh(dp_shard=2), 1, "abcd", switches).spares[0] == "d"
