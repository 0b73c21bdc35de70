"""Assigns hosts to the nodes of a mesh, so that as little traffic as possible crosses switches."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Traffic
from orchestrator.inventory.hosts import natural
from orchestrator.plan.placement.cost import Cost, cost_on
from orchestrator.plan.placement.edges import Edges, Flow, edges_of, flows_of
from orchestrator.plan.placement.exact_search import MOST_NODES, best_placement
from orchestrator.plan.placement.greedy import candidates, grid_of, pack
from orchestrator.plan.placement.local_search import improve
from orchestrator.plan.placement.tree import Tree, tree_over

MOST_TRIED = 12
"""Greedy candidates that are packed and costed."""
MOST_IMPROVED = 4
"""The cheapest candidates, which a local search improves. The best start is not always the
cheapest."""
MOST_EXCHANGED = 2048
"""Limit of nodes for the local search, summed over all starts. It takes more than a second for this
many, and greedy packing alone is close to the bound for more."""


class Arrangement(Struct, frozen=True, kw_only=True):
    hosts: tuple[str, ...]
    """In node order."""
    spares: tuple[str, ...]
    """The remaining hosts, the best spares first."""
    cost: Cost
    by_name: Cost
    """Cost of the first hosts in name order, for comparison."""


def arrange(
    mesh: Mesh,
    ranks_per_host: int,
    hosts: Iterable[str],
    switches: Mapping[str, tuple[str, ...]],
    traffic: Iterable[Traffic] = (),
) -> Arrangement:
    """Assign the best of `hosts` to the nodes of `mesh`. There must be enough hosts.

    A few nodes get the optimal placement (`exact_search`), many nodes a good one (`greedy` and
    `local_search`). Spares are chosen from the rest, so they never raise the cost. Without traffic,
    inner axes are assumed to send more than outer ones. Without switches, or without a gain, hosts
    are used in name order.

    A tp group that is wider than a host is placed like one node, on hosts of one NVLink block (the
    last of their `switches`). The hosts of a block are equivalent, so this loses nothing.
    """
    wide = mesh.tp // ranks_per_host
    if wide > 1:
        return _arranged_in_blocks(mesh, ranks_per_host, hosts, switches, traffic)
    nodes = mesh.world_size // ranks_per_host
    tree = tree_over(sorted(hosts, key=natural), switches)
    flows = flows_of(mesh, traffic)
    edges = edges_of(mesh, ranks_per_host, flows)
    by_name = list(range(nodes))
    tried = itertools.chain([by_name], _tries(mesh, ranks_per_host, flows, edges, tree))
    best = _cheapest(tree, edges, tried)
    if nodes > MOST_NODES and tree.height:
        starts = best[: min(MOST_IMPROVED, MOST_EXCHANGED // nodes)]
        better = (improve(tree, edges, placed) for placed, _ in starts)
        best = [*best[:1], *_cheapest(tree, edges, better)]
    placed, cost = min(best, key=lambda found: found[1].total)
    return Arrangement(
        hosts=tuple(tree.names[host] for host in placed),
        spares=tuple(tree.names[host] for host in _spares(tree, placed)),
        cost=cost,
        by_name=cost_on(tree, edges, by_name),
    )


def _arranged_in_blocks(
    mesh: Mesh,
    ranks_per_host: int,
    hosts: Iterable[str],
    switches: Mapping[str, tuple[str, ...]],
    traffic: Iterable[Traffic],
) -> Arrangement:
    names, traffic = sorted(hosts, key=natural), tuple(traffic)
    groups = groups_in_blocks(names, switches, mesh.tp // ranks_per_host)
    paths = {first: switches[first] for first in groups}
    found = arrange(mesh, mesh.tp, groups, paths, traffic)
    placed = [host for first in found.hosts for host in groups[first]]
    by_name = [host for group in groups.values() for host in group][: len(placed)]
    tree, number = tree_over(names, switches), {name: n for n, name in enumerate(names)}
    edges = edges_of(mesh, ranks_per_host, flows_of(mesh, traffic))
    nodes = [number[host] for host in placed]
    return Arrangement(
        hosts=tuple(placed),
        spares=tuple(names[host] for host in _spares(tree, nodes)),
        cost=cost_on(tree, edges, nodes),
        by_name=cost_on(tree, edges, [number[host] for host in by_name]),
    )


def groups_in_blocks(
    hosts: Iterable[str], switches: Mapping[str, tuple[str, ...]], wide: int
) -> dict[str, tuple[str, ...]]:
    """All disjoint groups of `wide` hosts in one NVLink block, keyed by their first host and in
    natural order of it."""
    incomplete: dict[tuple[str, ...], list[str]] = defaultdict(list)
    groups = {}
    for host in hosts:
        if host in switches:
            members = incomplete[switches[host]]
            members.append(host)
            if len(members) == wide:
                groups[members[0]] = tuple(members)
                members.clear()
    return dict(sorted(groups.items(), key=lambda group: natural(group[0])))


def _cheapest(
    tree: Tree, edges: Edges, tried: Iterable[Sequence[int]]
) -> list[tuple[Sequence[int], Cost]]:
    """All placements with their costs, the cheapest first."""
    counted = ((placed, cost_on(tree, edges, placed)) for placed in tried)
    return sorted(counted, key=lambda found: found[1].total)


def _tries(
    mesh: Mesh, ranks_per_host: int, flows: Sequence[Flow], edges: Edges, tree: Tree
) -> Iterable[Sequence[int]]:
    if not tree.height:
        return
    best = best_placement(tree, edges, mesh.world_size // ranks_per_host)
    if best is not None:
        yield best
        return
    grid = grid_of(mesh, ranks_per_host, flows)
    for candidate in itertools.islice(candidates(grid, tree), MOST_TRIED):
        yield pack(tree, candidate)
        yield pack(tree, candidate, aligned=False)


def _spares(tree: Tree, placed: Sequence[int]) -> list[int]:
    """The other hosts. First come those that share a leaf, then a spine, with the most nodes."""
    near = [Counter(above[host] for host in placed) for above in tree.above]
    others = sorted(set(range(len(tree.names))) - set(placed))
    return sorted(
        others,
        key=lambda host: [
            -count[above[host]] for count, above in zip(near, tree.above, strict=True)
        ],
    )
