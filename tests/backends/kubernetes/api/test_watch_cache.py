"""Objects are kept up to date by few requests, whatever the server has forgotten."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from orchestrator.backends.kubernetes.api.api_errors import Expired, Forbidden
from orchestrator.backends.kubernetes.api.client import Api, Listed
from orchestrator.backends.kubernetes.api.watch_cache import POLL_S, Cache, ListWatch
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.leader.node_cache import FEW
from orchestrator.backends.kubernetes.resources import NODES, Object, Resource
from orchestrator.errors import Unanswered
from tests.agent.world import TurnedClock
from tests.backends.kubernetes.rendered import PLAIN, a_launch


def a_node(name: str, version: int = 1, **spec: Any) -> Object:
    metadata = {"name": name, "resourceVersion": str(version), "managedFields": ["long"]}
    ready = {"type": "Ready", "status": "True"}
    return {
        "metadata": metadata,
        "spec": spec,
        "status": {"images": ["long"], "conditions": [ready]},
    }


@dataclass
class Server:
    """Nodes, and the changes since the last list."""

    nodes: dict[str, Object]
    changes: list[Object | Exception] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    version: int = 1
    clock: TurnedClock = field(default_factory=TurnedClock)

    def change(self, kind: str, node: Object) -> None:
        self.version += 1
        node["metadata"]["resourceVersion"] = str(self.version)
        self.nodes[node["metadata"]["name"]] = node
        if kind == "DELETED":
            del self.nodes[node["metadata"]["name"]]
        self.changes.append({"type": kind, "object": node})

    def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", cached: bool = False
    ) -> Listed:
        self.requests.append("list from memory" if cached else "list")
        return Listed(items=tuple(self.nodes.values()), version=str(self.version))

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        version: str,
        labels: str = "",
        timeout_s: float,
    ) -> Iterator[Object]:
        self.requests.append("watch")
        for change in self.changes:
            if isinstance(change, Exception):
                self.changes = []
                raise change
            if int(change["object"]["metadata"]["resourceVersion"]) > int(version):
                yield change

    def get(
        self, resource: Resource, namespace: str | None, name: str, *, cached: bool = False
    ) -> Object | None:
        self.requests.append("get from memory" if cached else "get")
        return self.nodes.get(name)


def watching(server: Server) -> ListWatch:
    return ListWatch(api=cast("Api", server), resource=NODES, namespace=None)


def test_a_cache_applies_changes() -> None:
    cache = Cache()
    cache.fill((a_node("a"), a_node("b")), "5")
    assert not cache.take({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}})
    assert cache.version == "7"
    assert not cache.take({"type": "MODIFIED", "object": a_node("a", 1)})
    assert cache.take({"type": "MODIFIED", "object": a_node("a", 8)})
    assert cache.take({"type": "DELETED", "object": a_node("b", 9)})
    assert not cache.take({"type": "DELETED", "object": a_node("b", 9)})
    assert [name for _, name in cache.items] == ["a"]


def test_a_periodic_reader_fetches_only_changes() -> None:
    server = Server({"a": a_node("a"), "b": a_node("b")})
    asking = watching(server)
    asking.catch_up()
    server.change("DELETED", a_node("b"))
    server.change("ADDED", a_node("c"))
    assert {name for _, name in asking.catch_up().items} == {"a", "c"}
    server.changes = [Expired("too old")]
    server.nodes["d"] = a_node("d")
    assert {name for _, name in asking.catch_up().items} == {"a", "c", "d"}
    assert server.requests == ["list", "watch", "watch", "list"]


def test_an_unreachable_server_is_reported_at_once_and_the_cache_is_kept() -> None:
    server = Server({"a": a_node("a")})
    asking = watching(server)
    asking.catch_up()
    server.changes = [Unanswered("gone")]
    with pytest.raises(Unanswered):
        asking.catch_up()
    assert len(asking.catch_up().items) == 1
    assert server.requests == ["list", "watch", "watch"]


def notices(hosts: int, looks: int) -> tuple[Server, Sequence[Sequence[str]]]:
    """Notices of a job with `hosts` hosts in a cluster of twice the size. One host is cordoned
    after the first check."""
    server = Server({f"node-{n}": a_node(f"node-{n}") for n in range(2 * hosts)})
    backend = KubernetesBackend({}, TurnedClock())
    backend.apis[None] = server  # type: ignore[assignment]
    launch, found = a_launch(PLAIN, hosts), []
    for _ in range(looks):
        found.append([one.host for one in backend.notices(launch, launch.hosts)])
        server.change("MODIFIED", a_node("node-1", unschedulable=True))
        server.change("MODIFIED", a_node(f"node-{hosts}", unschedulable=True))
    kept = seen.cache.items.values() if (seen := backend.nodes.watching) else ()
    assert not any("long" in str(node) for node in kept)
    return server, found


def test_a_leader_of_many_hosts_makes_one_request_per_check() -> None:
    server, found = notices(512, looks=4)
    assert found == [[], ["node-1"], ["node-1"], ["node-1"]]
    assert server.requests == ["list from memory", "watch", "watch", "watch"]


def test_a_leader_of_few_hosts_asks_for_each_and_never_for_all() -> None:
    server, found = notices(FEW, looks=2)
    assert found == [[], ["node-1"]]
    assert server.requests == ["get from memory"] * 2 * FEW


def test_without_the_right_to_watch_the_cache_lists_at_intervals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server({"a": a_node("a"), "b": a_node("b")})
    server.changes = [Forbidden("dev may not watch nodes", fix="ask for it")]
    asking = watching(server)
    seen = []
    for cache in asking.changes(asking.api.clock.monotonic() + 4 * POLL_S):
        seen.append(sorted(name for _, name in cache.items))
        server.nodes.pop("b", None)
    assert seen[0] == ["a", "b"]
    assert seen[1:] == [["a"]] * (len(seen) - 1)
    assert server.requests.count("watch") == 1
    assert 3 <= server.requests.count("list") <= 6
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 1
    assert "no right to watch nodes, listing them every 3 s: dev may not watch nodes" in said[0]


def test_without_the_right_to_list_the_cache_fails() -> None:
    class Closed(Server):
        def list(self, *_: Any, **__: Any) -> Listed:
            raise Forbidden("dev may not list nodes")

    asking = watching(Closed({}))
    with pytest.raises(Forbidden):
        next(asking.changes(asking.api.clock.monotonic() + 10.0))
