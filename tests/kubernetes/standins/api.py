"""A Kubernetes API client for the stand-ins: plain JSON, requests with retries, and informers.

Requests survive a restart of the API server. An informer lists, then watches from there, and lists
again after 410 Gone.
"""

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name."""

GROUPS = {
    "pods": "api/v1",
    "services": "api/v1",
    "nodes": "api/v1",
    "namespaces": "api/v1",
    "events": "api/v1",
    "configmaps": "api/v1",
    "secrets": "api/v1",
    "serviceaccounts": "api/v1",
    "persistentvolumes": "api/v1",
    "persistentvolumeclaims": "api/v1",
    "pytorchjobs": "apis/kubeflow.org/v1",
    "jobsets": "apis/jobset.x-k8s.io/v1alpha2",
    "trainjobs": "apis/trainer.kubeflow.org/v1alpha1",
    "trainingruntimes": "apis/trainer.kubeflow.org/v1alpha1",
    "clustertrainingruntimes": "apis/trainer.kubeflow.org/v1alpha1",
}
MERGE = "application/merge-patch+json"
PATIENCE_S = 60.0
"""How long a request is retried while the API server is unreachable."""


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def path(resource: str, namespace: str = "", name: str = "", sub: str = "") -> str:
    parts = [GROUPS[resource], *(("namespaces", namespace) if namespace else ()), resource]
    return "/" + "/".join([*parts, *filter(None, (name, sub))])


def key_of(thing: Object) -> Key:
    return thing["metadata"].get("namespace", ""), thing["metadata"]["name"]


def owned_by(owner: Object) -> list[Object]:
    """`ownerReferences` for a controller's child."""
    names = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    kind = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    return [{**kind, **names, "controller": True, "blockOwnerDeletion": True}]


def admin_of(kubeconfig: Path) -> tuple[str, ssl.SSLContext]:
    """URL of the API server, and TLS with the admin's client certificate."""
    config = yaml.safe_load(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    tls = ssl.create_default_context(cadata=authority)
    with tempfile.TemporaryDirectory() as folder:
        pem = Path(folder) / "client.pem"
        parts = (user["client-certificate-data"], user["client-key-data"])
        pem.write_bytes(b"\n".join(base64.b64decode(part) for part in parts))
        tls.load_cert_chain(pem)
    return cluster["server"], tls


@dataclass
class Api:
    server: str
    tls: ssl.SSLContext
    session: aiohttp.ClientSession = field(init=False)

    @classmethod
    def of_kubeconfig(cls, kubeconfig: Path) -> "Api":
        """The kubeconfig must have one cluster and one user with a client certificate."""
        return cls(*admin_of(kubeconfig))

    async def __aenter__(self) -> "Api":
        connector = aiohttp.TCPConnector(ssl=self.tls, limit=50)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self.session = aiohttp.ClientSession(self.server, connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def call(
        self, verb: str, where: str, body: object = None, kind: str = "application/json"
    ) -> Object:
        """Retries until the server answers. Raises ApiError if the server refuses the request."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE_S
        while True:
            try:
                data = None if body is None else json.dumps(body)
                headers = {"Content-Type": kind}
                timeout = aiohttp.ClientTimeout(total=20)
                async with self.session.request(
                    verb, where, data=data, headers=headers, timeout=timeout
                ) as answer:
                    body_of_answer: Object = await answer.json()
                    if answer.status < 400:
                        return body_of_answer
                    if answer.status not in (429, 500, 503) or loop.time() > end:
                        raise ApiError(answer.status, str(body_of_answer.get("message")))
            except (aiohttp.ClientError, TimeoutError, ConnectionError):
                if loop.time() > end:
                    raise
            await asyncio.sleep(0.3)

    async def get(self, where: str) -> Object:
        return await self.call("GET", where)

    async def create(self, where: str, body: Object) -> Object | None:
        """None if the object already exists."""
        try:
            return await self.call("POST", where, body)
        except ApiError as exc:
            if exc.status != 409:
                raise
            return None

    async def patch(self, where: str, body: Object) -> Object | None:
        """Merge patch; None if there is no such object, or if its uid differs."""
        try:
            return await self.call("PATCH", where, body, MERGE)
        except ApiError as exc:
            if exc.status not in (404, 409):
                raise
            return None

    async def delete(self, where: str, uid: str = "", grace_s: int | None = None) -> None:
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        body["propagationPolicy"] = "Background"
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await self.call("DELETE", where, body)
        except ApiError as exc:
            if exc.status not in (404, 409):
                raise


Changed = Callable[[str, Object], Awaitable[None] | None]
"""Called for each change with ADDED, MODIFIED or DELETED, and the object."""


@dataclass
class Informer:
    """A cache of all objects of one resource, which a watch keeps up to date."""

    api: Api
    resource: str
    changed: Changed
    query: str = ""
    objects: dict[Key, Object] = field(default_factory=dict)

    async def run(self) -> None:
        version = ""
        while True:
            try:
                version = version or await self._list()
                version = await self._watch(version)
            except (aiohttp.ClientError, TimeoutError, ConnectionError, ApiError):
                version = ""
                await asyncio.sleep(0.3)

    async def _list(self) -> str:
        listed = await self.api.get(f"{path(self.resource)}?{self.query}")
        group = GROUPS[self.resource].removeprefix("apis/").removeprefix("api/")
        there = {key_of(item): item for item in listed["items"]}
        for item in there.values():
            item.setdefault("apiVersion", group)
            item.setdefault("kind", listed["kind"].removesuffix("List"))
        for key in set(self.objects) - set(there):
            await self._tell("DELETED", self.objects[key])
        for item in there.values():
            await self._tell("MODIFIED", item)
        return str(listed["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        """Resource version at which the next watch starts; "" if a new list is needed."""
        where = f"{path(self.resource)}?watch=1&allowWatchBookmarks=true&timeoutSeconds=300"
        async with self.api.session.get(
            f"{where}&resourceVersion={version}&{self.query}", read_bufsize=2**22
        ) as stream:
            if stream.status != 200:
                return ""
            while line := await stream.content.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return ""
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    await self._tell(event["type"], event["object"])
        return version

    async def _tell(self, kind: str, thing: Object) -> None:
        if kind == "DELETED":
            self.objects.pop(key_of(thing), None)
        else:
            self.objects[key_of(thing)] = thing
        pending = self.changed(kind, thing)
        if pending is not None:
            await pending
