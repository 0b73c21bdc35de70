"""A cache of the nodes of a job, for its leader's repeated reads."""

import threading
from collections.abc import Sequence

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.watch_cache import ListWatch
from orchestrator.backends.kubernetes.resources import NODES, Object
from orchestrator.seams import Clock

FEW = 16
"""Nodes that are asked for one by one; of more, all are listed once, and then what changes."""


class NodeCache:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.watching: ListWatch | None = None
        """Of the whole cluster, for a leader of many hosts."""
        self.asking = threading.Lock()

    def of(self, api: Api, hosts: Sequence[str]) -> dict[str, Object]:
        """By name; missing nodes are left out."""
        if len(hosts) > FEW:
            with self.asking:
                if self.watching is None:
                    self.watching = ListWatch(
                        api=api,
                        clock=self.clock,
                        resource=NODES,
                        namespace=None,
                        cached=True,
                        trim=trimmed,
                    )
                there = self.watching.catch_up().items
                return {host: there["", host] for host in hosts if ("", host) in there}
        found = ((host, api.get(NODES, None, host, cached=True)) for host in hosts)
        return {host: node for host, node in found if node is not None}


def trimmed(node: Object) -> Object:
    """Of thousands of nodes, what is kept: not who wrote which field, nor the images there."""
    metadata = {key: said for key, said in node["metadata"].items() if key != "managedFields"}
    status = {key: said for key, said in node.get("status", {}).items() if key != "images"}
    return {**node, "metadata": metadata, "status": status}
