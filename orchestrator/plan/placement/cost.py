"""The cost of a placement: bytes per step, counted once for each switch level that they cross."""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter, ne

from msgspec import Struct

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Traffic
from orchestrator.plan.placement.edges import Edges, edges_of, flows_of
from orchestrator.plan.placement.tree import Tree, tree_over


class Cost(Struct, frozen=True, kw_only=True):
    crossing: tuple[int, ...]
    """Bytes per step that leave a host, a leaf switch, a spine, and so on. Bytes that leave a leaf
    are also among those that leave a host."""

    @property
    def total(self) -> int:
        return sum(self.crossing)


def cost_of(
    mesh: Mesh,
    ranks_per_host: int,
    hosts: Sequence[str],
    switches: Mapping[str, tuple[str, ...]],
    traffic: Iterable[Traffic] = (),
) -> Cost:
    """The cost of running the nodes of `mesh` on `hosts`, given in node order."""
    tree = tree_over(hosts, switches)
    edges = edges_of(mesh, ranks_per_host, flows_of(mesh, traffic))
    return cost_on(tree, edges, range(len(hosts)))


def cost_on(tree: Tree, edges: Edges, hosts: Sequence[int]) -> Cost:
    """The cost of running node n on host number `hosts[n]` of `tree`."""
    leaving = sum(size * len(ones) for size, (ones, _) in edges.items())
    return Cost(
        crossing=(leaving, *(_crossing([above[h] for h in hosts], edges) for above in tree.above))
    )


def _crossing(switch: Sequence[int], edges: Edges) -> int:
    """Bytes between nodes below different switches; `switch[n]` is the one above node n."""
    return sum(
        size * sum(map(ne, _pick(switch, ones), _pick(switch, others)))
        for size, (ones, others) in edges.items()
    )


def _pick(values: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    return itemgetter(*at)(values) if len(at) > 1 else (values[at[0]],)
