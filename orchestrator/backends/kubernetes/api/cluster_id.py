"""A stable name for the cluster."""

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
    """Of the cluster's own certificate authority: a pod finds the same one there that a kubeconfig
    has, while servers have other addresses inside, and contexts any name. No right is needed, as
    for the uid of kube-system. Without one, the host of the server.
    """
    found = CERTIFICATE.findall(api.authority or b"")
    if not found:
        return f"kubernetes-{urlsplit(api.server).hostname or api.server}"
    parts = sorted(ssl.PEM_cert_to_DER_cert(one.decode()) for one in found)
    return f"kubernetes-{hashlib.sha256(b''.join(parts)).hexdigest()[:8]}"
