"""A cache of the nodes of a job, for its leader's repeated reads."""

import threading
from collections.abc import Sequence

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.watch_cache import ListWatch
from orchestrator.backends.kubernetes.resources import NODES, Object

FEW = 16
"""Up to this many nodes are read one by one. With more, all nodes are listed once and then
watched."""


class NodeCache:
    def __init__(self) -> None:
        self.watching: ListWatch | None = None
        """All nodes of the cluster, for a leader with many hosts."""
        self.asking = threading.Lock()

    def of(self, api: Api, hosts: Sequence[str]) -> dict[str, Object]:
        """By name; missing nodes are left out."""
        if len(hosts) > FEW:
            # Two threads of the leader may ask at once, and the watch supports only one reader.
            with self.asking:
                if self.watching is None:
                    self.watching = ListWatch(
                        api=api, resource=NODES, namespace=None, cached=True, trim=trimmed
                    )
                there = self.watching.catch_up().items
                return {host: there["", host] for host in hosts if ("", host) in there}
        found = ((host, api.get(NODES, None, host, cached=True)) for host in hosts)
        return {host: node for host, node in found if node is not None}


def trimmed(node: Object) -> Object:
    """Without managedFields and image lists, because there may be thousands of nodes in memory."""
    metadata = {key: said for key, said in node["metadata"].items() if key != "managedFields"}
    status = {key: said for key, said in node.get("status", {}).items() if key != "images"}
    return {**node, "metadata": metadata, "status": status}
