"""The login plugin of a kubeconfig: the program that `exec` of a user names, and its errors."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from orchestrator.errors import BackendError


@contextlib.contextmanager
def logged_errors() -> Iterator[list[str]]:
    """The errors of a plugin. The client logs them on the root logger instead of raising them, and
    then sends requests without credentials."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(" ".join(record.getMessage().split()))
        return False

    root, quiet = logging.getLogger(), logging.NullHandler()
    # `logging.error` adds a handler that prints, unless there is one.
    root.addHandler(quiet)
    root.addFilter(keep)
    try:
        yield said
    finally:
        root.removeFilter(keep)
        root.removeHandler(quiet)


def plugin_failed(file: str | None, user: str, said: str) -> BackendError:
    """The error for the plugin of `user`. `file`: KUBECONFIG, which may name several files."""
    plugin = _plugin_of(file, user)
    hint = " ".join(str(plugin.get("installHint") or "").split())
    return BackendError(
        f"the login plugin {plugin.get('command', '')} of user {user} failed: {said}",
        fix=f"install it{f' ({hint})' if hint else ''} if it is missing; else log in to the cluster"
        " again",
    )


def _plugin_of(file: str | None, user: str) -> Mapping[str, Any]:
    client: Any = import_module("kubernetes.config.kube_config")
    merged = client.KubeConfigMerger(file or client.KUBE_CONFIG_DEFAULT_LOCATION).config
    users = {one.value["name"]: one.value["user"] for one in merged.value["users"]}
    found: Mapping[str, Any] = users.get(user, {}).get("exec", {})
    return found
