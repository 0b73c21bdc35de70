"""A placement made better by exchanges: a node that would rather be on another leaf goes there."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.plan.placement.edges import Edges
from orchestrator.plan.placement.tree import Tree

PASSES = 3
EMPTY = -1


def improved(tree: Tree, edges: Edges, hosts: Sequence[int]) -> list[int]:
    """`hosts` of the nodes after exchanges, each of which lowers the cost."""
    exchange = _Exchange.of(tree, edges, hosts)
    for _ in range(PASSES):
        if not sum(exchange.move(node) for node in range(len(hosts))):
            break
    return exchange.hosts


@dataclass(slots=True)
class _Exchange:
    hosts: list[int]
    """Of each node."""
    nodes: list[int]
    """On each host, or `EMPTY`."""
    leaves: Sequence[int]
    """Of each host."""
    below: list[list[int]]
    """The hosts of each leaf."""
    apart: list[list[int]]
    """Of two leaves, the levels that lie between them."""
    peers: list[list[tuple[int, int]]]
    """Of each node, others and the bytes that go to and fro."""

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
        apart = [[sum(a != b for a, b in zip(x, y, strict=True)) for y in paths] for x in paths]
        return cls(list(hosts), nodes, leaves, below, apart, peers)

    def move(self, node: int) -> bool:
        """Exchange `node` with what gains the most, or leave it where it is."""
        here = self.leaves[self.hosts[node]]
        around = [(self.leaves[self.hosts[peer]], size) for peer, size in self.peers[node]]
        stay = sum(size * self.apart[here][leaf] for leaf, size in around)
        best, place = 0, EMPTY
        for there in {leaf for leaf, _ in around} - {here}:
            gain = stay - sum(size * self.apart[there][leaf] for leaf, size in around)
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
        """What it costs that `node` goes `there`, while `other` comes `here` from there."""
        if node == EMPTY:
            return 0
        near, far = self.apart[here], self.apart[there]
        loss = 0
        for peer, size in self.peers[node]:
            if peer == other:
                loss += 2 * size * far[here]
            else:
                leaf = self.leaves[self.hosts[peer]]
                loss += size * (far[leaf] - near[leaf])
        return loss
