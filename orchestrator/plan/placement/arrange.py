"""Which hosts play the nodes of a mesh, so that little of its traffic crosses few switches."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Traffic
from orchestrator.inventory.hosts import natural
from orchestrator.plan.placement.cost import Cost, cost_on
from orchestrator.plan.placement.edges import Edges, Flow, edges_of, flows_of
from orchestrator.plan.placement.exact_search import MOST_NODES, best_of_all
from orchestrator.plan.placement.greedy import candidates, grid_of, pack
from orchestrator.plan.placement.local_search import improved
from orchestrator.plan.placement.tree import Tree, tree_over

MOST_TRIED = 12
"""Candidates that are laid out and counted."""
MOST_IMPROVED = 4
"""Of those, the cheapest, that are improved: which is cheapest after that cannot be told before."""
MOST_EXCHANGED = 2048
"""Nodes that are improved together, over all starts. Exchanges among so many take a second or more,
and packing alone is near the bound for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    hosts: tuple[str, ...]
    """In node order."""
    spares: tuple[str, ...]
    """The best to have at hand, the best first."""
    cost: Cost
    by_name: Cost
    """What the first hosts by name would cost."""


def arrange(
    mesh: Mesh,
    ranks_per_host: int,
    hosts: Iterable[str],
    switches: Mapping[str, tuple[str, ...]],
    traffic: Iterable[Traffic] = (),
) -> Arrangement:
    """The nodes of `mesh` on the best of `hosts`, of which there are enough.

    Where tp is wider than a host, its groups are placed as if each were one node, on as many hosts
    of one NVLink block, which is the last of their `switches`. Hosts of a block are alike, so
    nothing better is left out. The order by name is then that of such groups of hosts.

    Without traffic, inner axes are taken to outweigh outer ones; without switches, or where nothing
    is gained, hosts are taken by name. The best of all for a few nodes (`exact`), a good one for
    many (`pack`). Spares are chosen after that, from what is left, so they never raise the cost.
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
        better = (improved(tree, edges, placed) for placed, _ in starts)
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
    """As many groups of `wide` hosts of one NVLink block as there are, by their first host, in
    natural order of these."""
    waiting: dict[tuple[str, ...], list[str]] = defaultdict(list)
    groups = {}
    for host in hosts:
        if host in switches:
            members = waiting[switches[host]]
            members.append(host)
            if len(members) == wide:
                groups[members[0]] = tuple(members)
                members.clear()
    return dict(sorted(groups.items(), key=lambda group: natural(group[0])))


def _cheapest(
    tree: Tree, edges: Edges, tried: Iterable[Sequence[int]]
) -> list[tuple[Sequence[int], Cost]]:
    """All of them with their costs, the cheapest first."""
    counted = ((placed, cost_on(tree, edges, placed)) for placed in tried)
    return sorted(counted, key=lambda found: found[1].total)


def _tries(
    mesh: Mesh, ranks_per_host: int, flows: Sequence[Flow], edges: Edges, tree: Tree
) -> Iterable[Sequence[int]]:
    if not tree.height:
        return
    best = best_of_all(tree, edges, mesh.world_size // ranks_per_host)
    if best is not None:
        yield best
        return
    grid = grid_of(mesh, ranks_per_host, flows)
    for candidate in itertools.islice(candidates(grid, tree), MOST_TRIED):
        yield pack(tree, candidate)
        yield pack(tree, candidate, aligned=False)


def _spares(tree: Tree, placed: Sequence[int]) -> list[int]:
    """The other hosts, those first that share leaves, then spines, with the most nodes."""
    near = [Counter(above[host] for host in placed) for above in tree.above]
    others = sorted(set(range(len(tree.names))) - set(placed))
    return sorted(
        others,
        key=lambda host: [
            -count[above[host]] for count, above in zip(near, tree.above, strict=True)
        ],
    )
