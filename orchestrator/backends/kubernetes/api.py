"""What is asked of the API server: objects as plain JSON, watches, logs, commands in pods.

Not through the Python client's model classes, which know neither the operators' kinds nor fields
that are newer or older than they are.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.backends.kubernetes.access import Access
from orchestrator.backends.kubernetes.executing import execute
from orchestrator.backends.kubernetes.refusals import Asked, Missing, refusal
from orchestrator.backends.kubernetes.requests import APPLY, READ_S, Requests
from orchestrator.backends.kubernetes.resources import Object, Resource, resource_of
from orchestrator.contract.read_json import read_json
from orchestrator.seams import Clock

MANAGER = "ndctl"
"""Who owns the fields that we apply."""
PAGE = 500
MERGE = "application/merge-patch+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    items: tuple[Object, ...]
    version: str
    """Where a watch goes on from."""


class Api:
    def __init__(self, context: str | None, environ: Mapping[str, str], clock: Clock) -> None:
        self.access = Access(context, environ)
        self.sending = Requests(self.access, clock)

    @property
    def requests(self) -> int:
        """How many were sent, for those who count."""
        return self.sending.sent

    @property
    def context(self) -> str:
        return self.access.context

    @property
    def namespace(self) -> str:
        """Where objects go that name none."""
        return self.access.namespace

    @property
    def server(self) -> str:
        return self.access.server

    # Objects

    def read(self, path: str) -> Any:
        """What lies at a path, as `/version`."""
        return self.sending.json("get", path)

    def get(
        self, resource: Resource, namespace: str | None, name: str, *, cached: bool = False
    ) -> Object | None:
        """None where there is no such object. `cached`: as in `list`."""
        query = {"resourceVersion": "0"} if cached else None
        try:
            found: Object = self.sending.json("get", resource.path(namespace, name), query)
            return found
        except Missing:
            if resource.group and not self.has(resource):
                raise
            return None

    def has(self, resource: Resource) -> bool:
        """Whether the cluster knows the kind, in this version."""
        root = f"/apis/{resource.group}/{resource.version}"
        try:
            known = self.sending.json("get", root if resource.group else f"/api/{resource.version}")
        except Missing:
            return False
        return any(one["name"] == resource.plural for one in known.get("resources", ()))

    def list(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        labels: str = "",
        fields: str = "",
        cached: bool = False,
    ) -> Listed:
        """In pages; `cached`: what the API server has in memory will do."""
        items: list[Object] = []
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE)}
        if cached:
            query |= {"resourceVersion": "0", "limit": ""}
        while True:
            page = self.sending.json("list", resource.path(namespace), query)
            items += page.get("items") or ()
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return Listed(items=tuple(items), version=page["metadata"]["resourceVersion"])

    def apply(self, item: Object, namespace: str, *, dry_run: bool = False) -> Object:
        """Server-side: what ndctl says of an object becomes so, whatever was there."""
        resource = resource_of(item)
        path = resource.path(item["metadata"].get("namespace", namespace), item["metadata"]["name"])
        query = {"fieldManager": MANAGER, "force": "true", "dryRun": "All" if dry_run else ""}
        made: Object = self.sending.json("patch", path, query, item, APPLY)
        return made

    def create(self, item: Object, namespace: str) -> Object:
        """Raises Conflict where it exists."""
        made: Object = self.sending.json("create", resource_of(item).path(namespace), None, item)
        return made

    def merge(
        self, resource: Resource, namespace: str | None, name: str, change: Object, sub: str = ""
    ) -> Object:
        """RFC 7386: what is null is taken away, lists are replaced."""
        path = resource.path(namespace, name, sub)
        made: Object = self.sending.json("patch", path, {"fieldManager": MANAGER}, change, MERGE)
        return made

    def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        grace_s: int | None = None,
        uid: str = "",
    ) -> None:
        """What is gone already is as good. `uid`: only this very one."""
        body: dict[str, Any] = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        body["propagationPolicy"] = "Background"
        if uid:
            body["preconditions"] = {"uid": uid}
        with contextlib.suppress(Missing):
            self.sending.json("delete", resource.path(namespace, name), None, body)

    def delete_all(self, resource: Resource, namespace: str, *, labels: str) -> None:
        self.sending.json("deletecollection", resource.path(namespace), {"labelSelector": labels})

    # Streams

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        version: str,
        labels: str = "",
        timeout_s: float,
    ) -> Iterator[Object]:
        """Events from `version` on, until the server closes it. Raises as requests do, once."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "labelSelector": labels,
            "timeoutSeconds": str(max(1, int(timeout_s))),
        }
        asked = Asked(verb="watch", path=resource.path(namespace))
        for line in self.sending.lines(asked, query, timeout_s + READ_S):
            event = read_json(line)
            if event["type"] == "ERROR":
                code = int(event["object"].get("code", 500))
                raise refusal(asked, code, json.dumps(event["object"]).encode())
            yield event

    def log(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        since: str | None = None,
        quiet_s: float = READ_S,
    ) -> Iterator[bytes]:
        """Lines of a pod's output. `since` a time of whole seconds (RFC 3339), or empty for all:
        with their times before them. `quiet_s`: how long nothing may come while it is followed."""
        query = {
            "container": container,
            "follow": "true" if follow else "",
            "timestamps": "" if since is None else "true",
            "sinceTime": since or "",
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        yield from self.sending.lines(Asked(verb="get", path=path), query, quiet_s)

    def exec(
        self, namespace: str, pod: str, container: str, argv: Sequence[str], *, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Run a command in a pod: its exit code, what it wrote, and its errors."""
        return execute(self.sending, namespace, pod, container, argv, timeout_s=timeout_s)
