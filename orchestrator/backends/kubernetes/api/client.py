"""The API client: objects as plain JSON, watches, logs, commands in pods.

It does not use the Python client's model classes, because they lack the operators' kinds and all
fields of newer and older Kubernetes versions.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from orchestrator.backends.kubernetes.api.access import Access
from orchestrator.backends.kubernetes.api.api_errors import (
    JSON,
    ApiRequest,
    Forbidden,
    Missing,
    refusal,
)
from orchestrator.backends.kubernetes.api.pod_exec import Streams, execute, stream
from orchestrator.backends.kubernetes.api.requests import (
    APPLY,
    METADATA,
    READ_S,
    Requests,
    unreachable,
)
from orchestrator.backends.kubernetes.resources import Object, Resource, lookup, resource_of
from orchestrator.contract.read_json import read_json
from orchestrator.errors import BackendError
from orchestrator.seams import Clock

MANAGER = "ndctl"
"""The field manager of server-side apply."""
PAGE = 500
MERGE = "application/merge-patch+json"


class Listed(Struct, frozen=True, kw_only=True):
    items: tuple[Object, ...]
    version: str
    """The resourceVersion to start a watch from."""


class ApiReader(Protocol):
    """The part of `Api` that checks use: reads, and writes as dry runs."""

    @property
    def context(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def server(self) -> str: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...
    def read(self, path: str) -> Any: ...
    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None: ...
    def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listed: ...
    def create(self, item: Object, namespace: str) -> Object: ...
    def apply(self, item: Object, namespace: str, *, dry_run: bool = False) -> Object: ...
    def refusal(self, verb: str, path: str) -> BackendError | None: ...


class Api:
    def __init__(self, context: str | None, environ: Mapping[str, str], clock: Clock) -> None:
        self.access = Access(context, environ)
        self.sending = Requests(self.access, clock)

    @property
    def requests(self) -> int:
        """Number of requests sent, for benchmarks."""
        return self.sending.sent

    @property
    def clock(self) -> Clock:
        return self.sending.clock

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the server so far, without repetitions."""
        return tuple(self.sending.warnings)

    @property
    def context(self) -> str:
        return self.access.context

    @property
    def namespace(self) -> str:
        """The namespace of objects that name none."""
        return self.access.namespace

    @property
    def server(self) -> str:
        return self.access.server

    # Objects

    def read(self, path: str) -> Any:
        """The answer of a GET of any path, such as `/version`."""
        return self.sending.json("get", path)

    def get(
        self, resource: Resource, namespace: str | None, name: str, *, cached: bool = False
    ) -> Object | None:
        """None if the object does not exist. `cached`: as in `list`."""
        query = {"resourceVersion": "0"} if cached else None
        try:
            found: Object = self.sending.json("get", resource.path(namespace, name), query)
            return found
        except Missing:
            # The server answers 404 for an absent object and for an unknown kind. The first is a
            # normal answer; the second means that the operator is not installed.
            if resource.group and not self.has(resource):
                raise
            return None

    def about(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Only the metadata of an object, which may be large."""
        try:
            path = resource.path(namespace, name)
            found: Object = self.sending.json("get", path, accept=METADATA)
            return found
        except Missing:
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
        """In pages. `cached`: accept the API server's cache, which may be stale."""
        items: list[Object] = []
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE)}
        if cached:
            # The API server's cache does not page.
            query |= {"resourceVersion": "0", "limit": ""}
        while True:
            page = self.sending.json("list", resource.path(namespace), query)
            items += page.get("items") or ()
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return Listed(items=tuple(items), version=page["metadata"]["resourceVersion"])

    def apply(self, item: Object, namespace: str, *, dry_run: bool = False) -> Object:
        """Server-side apply: the fields that ndctl sends overwrite existing ones. Servers since
        1.25 refuse unknown fields; older ones ignore this option and drop such fields."""
        resource = resource_of(item)
        path = resource.path(item["metadata"].get("namespace", namespace), item["metadata"]["name"])
        query = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"}
        query["dryRun"] = "All" if dry_run else ""
        try:
            made: Object = self.sending.json("patch", path, query, item, APPLY)
        except Forbidden as exc:
            # The error for an apply that would create lacks our user name; that of a create has it.
            better = None if exc.user else self.refusal("create", path.rpartition("/")[0])
            raise (better if isinstance(better, Forbidden) else exc) from None
        return made

    def create(self, item: Object, namespace: str) -> Object:
        """Raises Conflict if it exists."""
        place = lookup(item, ("metadata", "namespace"), namespace)
        path, query = resource_of(item).path(place), {"fieldManager": MANAGER}
        made: Object = self.sending.json("create", path, query, item)
        return made

    def refusal(self, verb: str, path: str) -> BackendError | None:
        """The error for a request without effect; None if it is allowed."""
        query = {"dryRun": "All"}
        # The API server checks rights before it reads the body, so an empty one is enough.
        body: Object | None = {} if verb in ("create", "patch") else None
        if verb in ("get", "list", "watch"):
            query = {"watch": "true", "timeoutSeconds": "1"} if verb == "watch" else {}
        try:
            verb = "list" if verb == "watch" else verb
            self.sending.json(verb, path, query, body, MERGE if verb == "patch" else JSON)
        except BackendError as exc:
            return exc
        return None

    def merge(
        self, resource: Resource, namespace: str | None, name: str, change: Object, sub: str = ""
    ) -> Object:
        """Merge patch (RFC 7386): null removes a key, lists are replaced."""
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
        """Does nothing if the object is missing. `uid`: delete only the object with this uid."""
        body: dict[str, Any] = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        # The owner disappears at once, and Kubernetes deletes its dependents afterwards.
        body["propagationPolicy"] = "Background"
        if uid:
            body["preconditions"] = {"uid": uid}
        # It is gone already, for example because Kubernetes deleted it with its owner.
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
        fields: str = "",
        timeout_s: float,
    ) -> Iterator[Object]:
        """Events after `version`, until the server closes the watch. Errors are not retried."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "labelSelector": labels,
            "fieldSelector": fields,
            "timeoutSeconds": str(max(1, int(timeout_s))),
        }
        asked = ApiRequest(verb="watch", path=resource.path(namespace))
        # The server closes the watch after `timeout_s`. Silence beyond that means a dead
        # connection.
        for line in self.sending.lines(asked, query, timeout_s + READ_S):
            try:
                event = read_json(line)
            except ValueError as exc:
                # A proxy may have ended the answer in the middle of a line.
                raise unreachable(self.access, exc, "a line of a watch is not JSON") from exc
            # A watch has answered 200 already, so an expired version comes as an event.
            if event["type"] == "ERROR":
                code = int(event["object"].get("code", 500))
                raise refusal(asked, code, json.dumps(event["object"]).encode())
            yield event

    def log(  # noqa: PLR0913 - the options of the log API
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        quiet_s: float = READ_S,
    ) -> Iterator[bytes]:
        """Lines of a pod's output.

        Args:
            follow: continue with new lines until the stream ends.
            since: only lines after this time (RFC 3339, whole seconds; empty: all). If it is not
                None, each line starts with its time.
            tail: only the last lines.
            quiet_s: largest time without any output before the request fails.
        """
        query = {
            "container": container,
            "follow": "true" if follow else "",
            "timestamps": "" if since is None else "true",
            "sinceTime": since or "",
            "tailLines": "" if tail is None else str(tail),
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        yield from self.sending.lines(ApiRequest(verb="get", path=path), query, quiet_s)

    def exec(
        self, namespace: str, pod: str, container: str, argv: Sequence[str], *, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Run a command in a pod; returns exit code, stdout and stderr."""
        return execute(self.access, namespace, pod, container, argv, timeout_s=timeout_s)

    def stream_exec(
        self, namespace: str, pod: str, container: str, argv: Sequence[str], streams: Streams
    ) -> int:
        """Run a command in a pod until it ends, and pass its output on; returns the exit code."""
        return stream(self.access, namespace, pod, container, argv, streams)
