"""Renders the ConfigMap with the job's submission, and the Secret with its token. Pure."""

import base64
from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.submission_payload import Handover, files_of, packed
from orchestrator.errors import BackendError

PLAIN_BYTES = 96 << 10
"""Up to this size the content is not compressed, so that it is readable with kubectl. The limit is
low because `kubectl apply` copies it into an annotation, and all annotations may have 256 KiB."""
LIMIT_BYTES = 1 << 20
"""The API server's limit of all values of a ConfigMap."""


def config_map(handover: Handover, metadata: dict[str, Any]) -> dict[str, Any]:
    """Raises BackendError if it is too large even when compressed."""
    files = files_of(handover)
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    if sum(len(text.encode()) for text in files.values()) <= PLAIN_BYTES:
        return {**made, "data": files}
    small = packed(files)
    size = sum(len(body) for body in small.values())
    if size > LIMIT_BYTES:
        largest = max(small, key=lambda name: len(small[name]))
        raise BackendError(
            f"the job's spec and plan have {size} bytes compressed ({largest} alone has"
            f" {len(small[largest])}); a ConfigMap can hold at most {LIMIT_BYTES}",
            fix="put long lists of files and weights into files on the run volume or in the image,"
            " and name those in the spec",
        )
    return {
        **made,
        "binaryData": {name: base64.b64encode(body).decode() for name, body in small.items()},
    }


def token_secret(launch: LaunchPlan, token: str) -> dict[str, Any]:
    """The Secret with the token by which agents authenticate to the leader."""
    namespace = launch.kubernetes.namespace if launch.kubernetes else None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": names.secret_of(launch.job),
            **({"namespace": namespace} if namespace else {}),
            "labels": names.labels_of(launch),
        },
        "type": "Opaque",
        "stringData": {names.TOKEN_KEY: token},
    }
