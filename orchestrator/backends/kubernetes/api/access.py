"""Finds the cluster and the credentials: from a kubeconfig, or from a pod's service account.

The official Python client does this, because it supports exec plugins and renews tokens. It is
imported late, because its import is slow and most verbs do not need it.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from orchestrator.backends.kubernetes.api.login_plugin import logged_errors, plugin_failed
from orchestrator.backends.kubernetes.mirror.mirror_paths import IN_CLUSTER
from orchestrator.errors import BackendError

TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
NAMESPACE = TOKEN.with_name("namespace")


class Access:
    def __init__(self, context: str | None, environ: Mapping[str, str]) -> None:
        self.wanted = context
        self.environ = environ

    @cached_property
    def config(self) -> Any:
        """The client's Configuration. Raises BackendError without credentials."""
        from kubernetes.client import Configuration

        config: Any = import_module("kubernetes.config")
        made = Configuration()
        with self._reading():
            # In a pod no kubeconfig exists.
            if self.in_cluster:
                config.load_incluster_config(made)
            else:
                self._load_kubeconfig(made)
        made.retries = False  # our own retries (requests.py) report the reason
        return made

    def _load_kubeconfig(self, made: Any) -> None:
        config: Any = import_module("kubernetes.config")
        with logged_errors() as said:
            config.load_kube_config(self._file, self.wanted, made, persist_config=False)
        if said:
            contexts, current = config.list_kube_config_contexts(self._file)
            named = (one for one in contexts if one["name"] == self.wanted)
            user = next(named, current)["context"]["user"]
            raise plugin_failed(self._file, user, "; ".join(said))

    @property
    def in_cluster(self) -> bool:
        return "KUBERNETES_SERVICE_HOST" in self.environ and TOKEN.exists()

    @property
    def _file(self) -> str | None:
        return self.environ.get("KUBECONFIG") or None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises BackendError for each error of a client that reads the credentials."""
        config: Any = import_module("kubernetes.config")
        try:
            yield
        except (config.ConfigException, OSError) as exc:
            place = "" if self.in_cluster else f" in {self.kubeconfig}"
            raise BackendError(
                f"cannot find a Kubernetes cluster{place}: {exc}",
                fix="`kubectl config get-contexts` lists your contexts; set KUBECONFIG or"
                " cluster.kubernetes.context, or log in to the cluster as its administrators say",
            ) from exc
        # The client expects a YAML file with the right types, and lets every other error through.
        except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as exc:
            raise BackendError(
                f"{self.kubeconfig} is no valid kubeconfig: {' '.join(str(exc).split())}",
                fix="`kubectl config view` reads the same file; correct it, or set KUBECONFIG to"
                " another one",
            ) from exc

    @property
    def kubeconfig(self) -> str:
        """The files with the credentials, for messages."""
        return self._file or "~/.kube/config"

    @cached_property
    def _active(self) -> tuple[str, str]:
        """Context and namespace."""
        # A context of a kubeconfig has no meaning in a pod.
        if self.in_cluster:
            with contextlib.suppress(OSError):
                return IN_CLUSTER, NAMESPACE.read_text().strip()
            return IN_CLUSTER, "default"
        config: Any = import_module("kubernetes.config")
        with self._reading():
            contexts, current = config.list_kube_config_contexts(self._file)
            places = {
                str(one["name"]): str(one["context"].get("namespace") or "default")
                for one in contexts
            }
            wanted = current["name"] if self.wanted is None else self.wanted
        if wanted not in places:
            known = ", ".join(places) or "none"
            raise BackendError(
                f"the kubeconfig has no context {wanted}; there are: {known}",
                fix="set cluster.kubernetes.context to one of them",
            )
        return wanted, places[wanted]

    @property
    def context(self) -> str:
        return self._active[0]

    @property
    def namespace(self) -> str:
        """The namespace of objects that name none."""
        return self._active[1]

    @property
    def server(self) -> str:
        return str(self.config.host)

    @property
    def shown(self) -> str:
        """The API server, for messages."""
        if self.in_cluster:
            return "the API server"
        return f"the API server of context {self.context} ({self.server})"

    @property
    def kubectl(self) -> str:
        """The kubectl option for this context, with a leading space."""
        return "" if self.in_cluster else f" --context {self.context}"

    @property
    def authority(self) -> bytes | None:
        """The CA certificates of the server; None: the system's CAs."""
        path = self.config.ssl_ca_cert
        return Path(path).read_bytes() if path else None

    @cached_property
    def client(self) -> Any:
        """The Python client's DynamicClient, for its `request` alone.

        Discovery would cost each terminal command a dozen requests, and rights that a tenant may
        lack: ndctl knows its kinds (resources.py).
        """
        from kubernetes.client import ApiClient

        dynamic: Any = import_module("kubernetes.dynamic")
        return dynamic.DynamicClient(ApiClient(self.config), discoverer=lambda *_: None)

    def headers(self) -> dict[str, str]:
        """Call it for each request, because tokens are short-lived and the client renews them
        here."""
        auth = self.config.auth_settings().get("BearerToken")
        return {"authorization": auth["value"]} if auth and auth["value"] else {}
