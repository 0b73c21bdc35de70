"""Collects every change of a namespace's objects by watches, because polling would miss some."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.kubernetes.standins.api import Object, admin_of, path
from tests.kubernetes.testbed import KubeTestbed


@dataclass
class Changes:
    """Changes (resource, ADDED | MODIFIED | DELETED, object), in order within each resource."""

    seen: list[tuple[str, str, Object]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, resource: str, line: bytes) -> None:
        change = json.loads(line)
        with self.lock:
            self.seen.append((resource, change["type"], change["object"]))

    def since(self, first: int) -> list[tuple[str, str, Object]]:
        with self.lock:
            return self.seen[first:]

    def __len__(self) -> int:
        with self.lock:
            return len(self.seen)


@contextlib.contextmanager
def watch_changes(
    kube: KubeTestbed, resources: tuple[str, ...], namespace: str
) -> Iterator[Changes]:
    """Collects changes from now on; objects that exist already are not reported."""
    changes = Changes()
    lines = [_line(kube, resource, namespace) for resource in resources]
    threads = [
        threading.Thread(target=_read, args=(answer, resource, changes))
        for (_, answer), resource in zip(lines, resources, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield changes
    finally:
        for each, _ in lines:
            each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for each, answer in lines:
            answer.close()
            each.close()


def _line(
    kube: KubeTestbed, resource: str, namespace: str
) -> tuple[socket.socket, http.client.HTTPResponse]:
    """A watch and its socket; the watch ends when the socket is shut down."""
    server, tls = admin_of(kube.kubeconfig)
    where = path(resource, namespace)
    line = http.client.HTTPSConnection(urlsplit(server).netloc, timeout=900, context=tls)
    line.request("GET", where)
    with line.getresponse() as listed:
        version = json.load(listed)["metadata"]["resourceVersion"]
    url = f"{where}?watch=1&timeoutSeconds=1800&resourceVersion={version}"
    line.close()
    line.connect()
    sock = line.sock
    line.request("GET", url)
    return sock, line.getresponse()


def _read(answer: http.client.HTTPResponse, resource: str, changes: Changes) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        for line in answer:
            changes.add(resource, line)
