"""Runs the projects' own operators as processes of this machine, in place of our stand-ins.

`KUBE_OPERATORS` names a folder with `training-operator` (Kubeflow 1.9: PyTorchJob), with
`jobset-controller` (JobSet), or with both. Build the programs yourself: no container image is
pulled. This module creates the other objects of their Deployments: namespace, Secret, Service and
webhooks. The operators have the rights of the cluster's admin.
"""

import base64
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

Object = dict[str, Any]
NOT_RUN = "NOT TESTED WITH A REAL OPERATOR: "
ADMISSION = "admissionregistration.k8s.io/v1"
CERTIFICATES = "/tmp/k8s-webhook-server/serving-certs"
"""Both operators expect their Secret here. Each gets a mount namespace, so they do not collide."""
INIT_CONTAINER = """\
- name: init-pytorch
  image: {{.InitContainerImage}}
  resources:
    limits: {cpu: 100m, memory: 20Mi}
    requests: {cpu: 50m, memory: 10Mi}
  command: ['sh', '-c', 'for i in $(seq {{.MaxTries}}); do getent hosts {{.MasterAddr}} && exit; sleep 2; done; exit 1']
"""  # noqa: E501
"""The operator's own template, with `getent` for `nslookup`: the testbed has no DNS server."""


@dataclass(frozen=True, kw_only=True)
class RealOperator:
    binary: str
    kind: str
    namespace: str
    service: str
    secret: str
    address: int
    """Last byte of the IP address of its Service."""
    hooks: Sequence[Object]

    def port(self, net: int) -> int:
        """Port of its webhooks. It depends on `net`, because the training operator listens on every
        address of the machine."""
        return 21000 + 10 * net + self.address

    def argv(self, folder: Path, net: int) -> list[str]:
        words = ["--health-probe-bind-address=127.0.0.1:0", "--metrics-bind-address=0"]
        if self.kind == "PyTorchJob":
            place = folder / "init-container.yaml"
            place.write_text(INIT_CONTAINER)
            return [
                *words,
                "--enable-scheme=pytorchjob",
                f"--webhook-server-port={self.port(net)}",
                f"--pytorch-init-container-template-file={place}",
            ]
        place = folder / "jobset.yaml"
        place.write_text(
            "apiVersion: config.jobset.x-k8s.io/v1alpha1\nkind: Configuration\n"
            "leaderElection: {leaderElect: false}\ninternalCertManagement: {enable: true}\n"
            f"webhook: {{host: {_address(net, self.address)}, port: {self.port(net)}}}\n"
        )
        return [*words, f"--config={place}"]

    def objects(self, net: int) -> list[Object]:
        there = {"namespace": self.namespace}
        spec = {
            "clusterIP": _address(net, self.address),
            "ports": [{"port": self.port(net)}],
        }
        hooks = [_configured(hook, self, net) for hook in self.hooks]
        return [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}},
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": self.secret, **there}},
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": self.service, **there},
                "spec": spec,
            },
            *hooks,
        ]


def _hook(
    kind: str, configuration: str, path: str, rule: tuple[str, str, str], verbs: Sequence[str]
) -> Object:
    group, version, resource = rule
    return {
        "kind": kind,
        "configuration": configuration,
        "path": path,
        "rules": [
            {
                "apiGroups": [group],
                "apiVersions": [version],
                "resources": [resource],
                "operations": list(verbs),
            }
        ],
    }


def _configured(hook: Object, operator: RealOperator, net: int) -> Object:
    service = {"name": operator.service, "namespace": operator.namespace, "path": hook["path"]}
    one = {
        "name": f"{hook['path'].strip('/')}.{operator.namespace}.test",
        "clientConfig": {"service": {**service, "port": operator.port(net)}},
        "rules": hook["rules"],
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
    }
    return {
        "apiVersion": ADMISSION,
        "kind": f"{hook['kind']}WebhookConfiguration",
        "metadata": {"name": hook["configuration"]},
        "webhooks": [one],
    }


PYTORCHJOBS = ("kubeflow.org", "v1", "pytorchjobs")
JOBSETS = ("jobset.x-k8s.io", "v1alpha2", "jobsets")
OPERATORS = (
    RealOperator(
        binary="training-operator",
        kind="PyTorchJob",
        namespace="kubeflow",
        service="training-operator",
        secret="training-operator-webhook-cert",
        address=10,
        hooks=[
            _hook(
                "Validating",
                "validator.training-operator.kubeflow.org",
                "/validate-kubeflow-org-v1-pytorchjob",
                PYTORCHJOBS,
                ("CREATE", "UPDATE"),
            )
        ],
    ),
    RealOperator(
        binary="jobset-controller",
        kind="JobSet",
        namespace="jobset-system",
        service="jobset-webhook-service",
        secret="jobset-webhook-server-cert",
        address=11,
        hooks=[
            _hook(
                "Mutating",
                "jobset-mutating-webhook-configuration",
                "/mutate-jobset-x-k8s-io-v1alpha2-jobset",
                JOBSETS,
                ("CREATE",),
            ),
            _hook(
                "Validating",
                "jobset-validating-webhook-configuration",
                "/validate-jobset-x-k8s-io-v1alpha2-jobset",
                JOBSETS,
                ("CREATE", "UPDATE"),
            ),
        ],
    ),
)


def available() -> tuple[RealOperator, ...]:
    folder = os.environ.get("KUBE_OPERATORS")
    return tuple(one for one in OPERATORS if folder and (Path(folder) / one.binary).exists())


def control_plane_environ(net: int) -> Mapping[str, str]:
    """Environment of the control plane. The API server calls webhooks by the address of their
    Service, so Services get loopback addresses."""
    return (
        {"APISERVER_ARGS": f"--service-cluster-ip-range=127.{net}.254.0/24"} if available() else {}
    )


def start(operator: RealOperator, folder: Path, net: int) -> "subprocess.Popen[bytes]":
    for place in (Path(CERTIFICATES), folder / operator.secret):
        place.mkdir(parents=True, exist_ok=True)
    own = f'mount --bind {folder / operator.secret} {CERTIFICATES} && exec "$@"'
    binary = Path(os.environ["KUBE_OPERATORS"]) / operator.binary
    with (folder / "log" / f"{operator.binary}.log").open("ab") as log:
        return subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "sh", "-c", own, "sh"),
                *(str(binary), *operator.argv(folder, net)),
            ],
            env={**os.environ, "KUBECONFIG": str(folder / "kubeconfig")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def is_ready(operator: RealOperator, folder: Path, net: int, secret: Object) -> bool:
    """Whether its webhooks listen. It fills its own Secret first; this function copies the Secret
    to the place where a kubelet would mount it."""
    for name, value in (secret.get("data") or {}).items():
        place = folder / operator.secret / name
        if not place.exists():
            place.write_bytes(base64.b64decode(value))
    return _is_listening(operator, net)


def _is_listening(operator: RealOperator, net: int) -> bool:
    """Reads the kernel's tables, because a test may not connect to the address of a Service."""
    rows = [Path(f"/proc/net/{name}").read_text().split("\n")[1:] for name in ("tcp", "tcp6")]
    ports = {row.split()[1].rpartition(":")[2] for row in chain(*rows) if " 0A " in row}
    return f"{operator.port(net):04X}" in ports


def _address(net: int, last: int) -> str:
    return f"127.{net}.254.{last}"
