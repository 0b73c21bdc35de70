"""Computes a stable name for a cluster."""

import hashlib
import re
import ssl
from typing import Protocol
from urllib.parse import urlsplit

CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class Known(Protocol):
    @property
    def server(self) -> str: ...
    @property
    def authority(self) -> bytes | None: ...


def cluster_name(api: Known) -> str:
    """A name from the cluster's certificate authority; without one, from the host of the server.

    A pod and a kubeconfig have the same CA certificates, while addresses and context names differ.
    Unlike the uid of namespace kube-system, reading them needs no rights.
    """
    found = CERTIFICATE.findall(api.authority or b"")
    if not found:
        return f"kubernetes-{urlsplit(api.server).hostname or api.server}"
    parts = sorted(ssl.PEM_cert_to_DER_cert(one.decode()) for one in found)
    return f"kubernetes-{hashlib.sha256(b''.join(parts)).hexdigest()[:8]}"
