"""Improves a placement by exchanges: a node moves to another leaf if that lowers the cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.plan.placement.edges import Edges
from orchestrator.plan.placement.tree import Tree

PASSES = 3
EMPTY = -1


def improve(tree: Tree, edges: Edges, hosts: Sequence[int]) -> list[int]:
    """The hosts of the nodes after exchanges; each exchange lowers the cost."""
    exchange = _Exchange.of(tree, edges, hosts)
    for _ in range(PASSES):
        if not sum(exchange.move(node) for node in range(len(hosts))):
            break
    return exchange.hosts


@dataclass(slots=True)
class _Exchange:
    hosts: list[int]
    """Host of each node."""
    nodes: list[int]
    """Node on each host, or `EMPTY`."""
    leaves: Sequence[int]
    """Leaf of each host."""
    below: list[list[int]]
    """Hosts of each leaf."""
    distance: list[list[int]]
    """Number of switch levels between two leaves."""
    peers: list[list[tuple[int, int]]]
    """For each node: its peers, and the bytes in both directions."""

    @classmethod
    def of(cls, tree: Tree, edges: Edges, hosts: Sequence[int]) -> "_Exchange":
        leaves = tree.above[0]
        below: list[list[int]] = [[] for _ in range(max(leaves) + 1)]
        for host, leaf in enumerate(leaves):
            below[leaf].append(host)
        nodes = [EMPTY] * len(leaves)
        for node, host in enumerate(hosts):
            nodes[host] = node
        peers: list[list[tuple[int, int]]] = [[] for _ in hosts]
        for size, (ones, others) in edges.items():
            for one, other in zip(ones, others, strict=True):
                peers[one].append((other, size))
                peers[other].append((one, size))
        paths = [[above[hosts_[0]] for above in tree.above] for hosts_ in below]
        distance = [[sum(a != b for a, b in zip(x, y, strict=True)) for y in paths] for x in paths]
        return cls(list(hosts), nodes, leaves, below, distance, peers)

    def move(self, node: int) -> bool:
        """Exchange `node` with the host that gains most; returns false if none gains anything."""
        here = self.leaves[self.hosts[node]]
        around = [(self.leaves[self.hosts[peer]], size) for peer, size in self.peers[node]]
        stay = sum(size * self.distance[here][leaf] for leaf, size in around)
        best, place = 0, EMPTY
        for there in {leaf for leaf, _ in around} - {here}:
            gain = stay - sum(size * self.distance[there][leaf] for leaf, size in around)
            # The node that moves back can only reduce the gain.
            if gain <= best:
                continue
            for host in self.below[there]:
                found = gain - self._loss(self.nodes[host], node, there, here)
                if found > best:
                    best, place = found, host
        if place == EMPTY:
            return False
        mine, other = self.hosts[node], self.nodes[place]
        self.hosts[node], self.nodes[place], self.nodes[mine] = place, node, other
        if other != EMPTY:
            self.hosts[other] = mine
        return True

    def _loss(self, node: int, other: int, here: int, there: int) -> int:
        """The cost of moving `node` from leaf `here` to `there`, while `other` moves the other
        way."""
        if node == EMPTY:
            return 0
        near, far = self.distance[here], self.distance[there]
        loss = 0
        for peer, size in self.peers[node]:
            if peer == other:
                # The gain of `other` was computed as if `node` stayed, so correct it as well.
                loss += 2 * size * far[here]
            else:
                leaf = self.leaves[self.hosts[peer]]
                loss += size * (far[leaf] - near[leaf])
        return loss
