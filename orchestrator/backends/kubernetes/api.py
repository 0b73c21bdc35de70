"""The edge to the API server: requests as JSON, with timeouts, asked again where that may help.

Requests go through the Python client's connection and credentials (kubeconfig, exec plugins,
service accounts), not through its model classes, which know neither the operators' kinds nor
fields that are newer or older than they are. It is imported late: other verbs do without.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from orchestrator.backends.kubernetes.refusals import AGAIN, Asked, Missing, refusal
from orchestrator.backends.kubernetes.resources import Object, Resource, resource_of
from orchestrator.errors import BackendError, Unanswered
from orchestrator.seams import Clock, Completed

log = logging.getLogger(__name__)

IN_CLUSTER = "in-cluster"
"""The context of who runs in a pod."""
MANAGER = "ndctl"
"""Who owns the fields that we apply."""
CONNECT_S = 5.0
READ_S = 30.0
TRIES = 3
AGAIN_S = (0.5, 2.0)
"""Before a second and a third try; Retry-After is heard up to `MOST_S`."""
MOST_S = 10.0
PAGE = 500
TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
NAMESPACE = TOKEN.with_name("namespace")
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    items: tuple[Object, ...]
    version: str
    """Where a watch goes on from."""


class Api:
    def __init__(self, context: str | None, environ: Mapping[str, str], clock: Clock) -> None:
        self.wanted = context
        self.environ = environ
        self.clock = clock
        self.requests = 0
        """How many were sent, for those who count."""

    # Who we are

    @cached_property
    def _config(self) -> Any:
        """The client's Configuration. Raises BackendError without credentials."""
        from kubernetes.client import Configuration

        config: Any = import_module("kubernetes.config")
        made = Configuration()
        try:
            if self.in_cluster:
                config.load_incluster_config(made)
            else:
                config.load_kube_config(self._file, self.wanted, made, persist_config=False)
        except (config.ConfigException, OSError, ValueError) as exc:
            raise BackendError(
                f"there is no way to a Kubernetes cluster: {exc}",
                fix="`kubectl config get-contexts` lists what your kubeconfig has; set KUBECONFIG,"
                " or cluster.kubernetes.context to one of them",
            ) from exc
        made.retries = False  # ours say why
        return made

    @property
    def in_cluster(self) -> bool:
        return "KUBERNETES_SERVICE_HOST" in self.environ and TOKEN.exists()

    @property
    def _file(self) -> str | None:
        return self.environ.get("KUBECONFIG") or None

    @cached_property
    def _active(self) -> tuple[str, str]:
        """Context and namespace."""
        if self.in_cluster:
            with contextlib.suppress(OSError):
                return IN_CLUSTER, NAMESPACE.read_text().strip()
            return IN_CLUSTER, "default"
        config: Any = import_module("kubernetes.config")
        try:
            contexts, current = config.list_kube_config_contexts(self._file)
        except config.ConfigException as exc:
            raise BackendError(
                f"there is no way to a Kubernetes cluster: {exc}",
                fix="set KUBECONFIG, or log in to the cluster as its administrators say",
            ) from exc
        found = current
        if self.wanted is not None:
            found = next((one for one in contexts if one["name"] == self.wanted), None)
        if found is None:
            known = ", ".join(one["name"] for one in contexts) or "none"
            raise BackendError(
                f"the kubeconfig has no context {self.wanted}; there are: {known}",
                fix="set cluster.kubernetes.context to one of them",
            )
        return found["name"], found["context"].get("namespace") or "default"

    @property
    def context(self) -> str:
        return self._active[0]

    @property
    def namespace(self) -> str:
        """Where objects go that name none."""
        return self._active[1]

    @property
    def server(self) -> str:
        return str(self._config.host)

    @property
    def authority(self) -> bytes | None:
        """The certificates that the server's own is signed with; None where the system's do."""
        path = self._config.ssl_ca_cert
        return Path(path).read_bytes() if path else None

    @cached_property
    def _rest(self) -> Any:
        from kubernetes.client.rest import RESTClientObject

        return RESTClientObject(self._config)

    def _headers(self) -> dict[str, str]:
        """Asked each time: tokens are short-lived, and the client renews them here."""
        auth = self._config.auth_settings().get("BearerToken")
        return {"authorization": auth["value"]} if auth and auth["value"] else {}

    # Objects

    def read(self, path: str) -> Any:
        """What lies at a path, as `/version`."""
        return self._json("get", path)

    def get(
        self, resource: Resource, namespace: str | None, name: str, *, cached: bool = False
    ) -> Object | None:
        """None where there is no such object. `cached`: as in `list`."""
        query = {"resourceVersion": "0"} if cached else None
        try:
            found: Object = self._json("get", resource.path(namespace, name), query)
            return found
        except Missing:
            if resource.group and not self.has(resource):
                raise
            return None

    def has(self, resource: Resource) -> bool:
        """Whether the cluster knows the kind, in this version."""
        root = f"/apis/{resource.group}/{resource.version}"
        try:
            known = self._json("get", root if resource.group else f"/api/{resource.version}")
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
            page = self._json("list", resource.path(namespace), query)
            items += page.get("items") or ()
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return Listed(items=tuple(items), version=page["metadata"]["resourceVersion"])

    def apply(self, item: Object, namespace: str, *, dry_run: bool = False) -> Object:
        """Server-side: what ndctl says of an object becomes so, whatever was there."""
        resource = resource_of(item)
        path = resource.path(item["metadata"].get("namespace", namespace), item["metadata"]["name"])
        query = {"fieldManager": MANAGER, "force": "true", "dryRun": "All" if dry_run else ""}
        made: Object = self._json("patch", path, query, item, APPLY)
        return made

    def create(self, item: Object, namespace: str) -> Object:
        """Raises Conflict where it exists."""
        made: Object = self._json("create", resource_of(item).path(namespace), None, item)
        return made

    def merge(self, resource: Resource, namespace: str | None, name: str, change: Object) -> Object:
        """RFC 7386: what is null is taken away, lists are replaced."""
        path = resource.path(namespace, name)
        made: Object = self._json("patch", path, {"fieldManager": MANAGER}, change, MERGE)
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
            self._json("delete", resource.path(namespace, name), None, body)

    def delete_all(self, resource: Resource, namespace: str, *, labels: str) -> None:
        self._json("deletecollection", resource.path(namespace), {"labelSelector": labels})

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
        for line in self._lines(asked, query, timeout_s + READ_S):
            event = json.loads(line)
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
        yield from self._lines(Asked(verb="get", path=path), query, quiet_s)

    def _lines(self, asked: Asked, query: Mapping[str, str], quiet_s: float) -> Iterator[bytes]:
        import urllib3

        answer = self._send("GET", asked, query, None, "", (CONNECT_S, quiet_s))
        if answer.status != 200:
            raise refusal(asked, answer.status, answer.read())
        rest = b""
        try:
            for chunk in answer.response.stream(amt=None, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
        except urllib3.exceptions.HTTPError as exc:
            raise _unanswered(asked, exc) from exc
        finally:
            answer.response.close()
        if rest:
            yield rest

    def exec(
        self, namespace: str, pod: str, container: str, argv: Sequence[str], *, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Run a command in a pod: its exit code, what it wrote, and its errors."""
        client: Any = import_module("kubernetes.stream.ws_client")

        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
        query = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in argv]
        url = client.get_websocket_url(self.server + path, query)
        asked = Asked(verb="create", path=path)
        self.requests += 1
        import websocket

        try:
            socket = client.WSClient(
                self._config, url, self._headers(), capture_all=False, binary=True
            )
            try:
                socket.run_forever(timeout=timeout_s)
                if socket.is_open():
                    raise Unanswered(f"`{' '.join(argv)}` in pod {pod} took over {timeout_s:.0f} s")
                return (
                    _exit_code(socket.read_channel(client.ERROR_CHANNEL)),
                    socket.read_channel(client.STDOUT_CHANNEL),
                    socket.read_channel(client.STDERR_CHANNEL),
                )
            finally:
                socket.close()
        except websocket.WebSocketBadStatusException as exc:
            body = exc.resp_body or b""
            raise refusal(asked, exc.status_code, body) from exc
        except (websocket.WebSocketException, OSError) as exc:
            raise _unanswered(asked, exc) from exc

    # One request

    def _json(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
    ) -> Any:
        asked = Asked(verb=verb, path=path)
        method = METHODS[verb]
        for wait_s in (*AGAIN_S[: TRIES - 1], None):
            try:
                answer = self._send(method, asked, query or {}, body, content, (CONNECT_S, READ_S))
            except Unanswered:
                if wait_s is None or verb == "create":
                    raise
                self.clock.sleep(wait_s)
                continue
            said = answer.read()
            if 200 <= answer.status < 300:
                return json.loads(said)
            if answer.status not in AGAIN or wait_s is None:
                raise refusal(asked, answer.status, said)
            self.clock.sleep(_retry_after(answer.getheader("Retry-After"), wait_s))
        raise AssertionError("the last try returns or raises")

    def _send(
        self,
        method: str,
        asked: Asked,
        query: Mapping[str, str],
        body: Object | None,
        content: str,
        timeout: tuple[float, float],
    ) -> Any:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        said = urlencode({key: value for key, value in query.items() if value}, quote_via=quote)
        url = f"{self.server}{asked.path}" + (f"?{said}" if said else "")
        headers = {"Accept": "application/json", **self._headers()}
        data: Any = body
        if body is not None:
            headers["Content-Type"] = content
            data = json.dumps(body) if content == APPLY else body  # the client dumps JSON itself
        self.requests += 1
        try:
            return self._rest.request(method, url, headers, data, _request_timeout=timeout)
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as exc:
            raise _unanswered(asked, exc) from exc


METHODS: Mapping[str, str] = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "patch": "PATCH",
    "delete": "DELETE",
    "deletecollection": "DELETE",
}


def _retry_after(said: str | None, wait_s: float) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return min(float(said or ""), MOST_S)
    return wait_s


def _unanswered(asked: Asked, exc: Exception) -> Unanswered:
    words = str(exc).split("object at 0x")[-1].split(">: ")[-1]
    return Unanswered(
        f"the API server cannot be reached ({asked}): {words or type(exc).__name__}",
        fix="`kubectl cluster-info` says whether it is up; is the context the right one?",
    )


def _exit_code(status: bytes) -> int:
    """Of what the kubelet says at the end of a command."""
    try:
        said = json.loads(status)
        if said["status"] == "Success":
            return 0
        causes = said["details"]["causes"]
        return int(next(one["message"] for one in causes if one["reason"] == "ExitCode"))
    except (ValueError, KeyError, TypeError, StopIteration):
        return 255


def completed(done: tuple[int, bytes, bytes]) -> Completed:
    code, out, err = done
    return Completed(code, out.decode(errors="replace"), err.decode(errors="replace"))
