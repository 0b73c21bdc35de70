"""Runs the projects' own operators as processes of this machine, in place of our stand-ins.

`KUBE_OPERATORS` names a folder with one or more of `training-operator` (Kubeflow 1.9: PyTorchJob),
`jobset-controller` (JobSet) and `trainer-controller-manager` (Kubeflow Trainer 2: TrainJob). Its
files `crds/*.yaml`, if any, replace the testbed's own definitions. Build the programs yourself: no
container image is pulled. This module creates the other objects of their Deployments: namespace,
Secret, Service and webhooks. The operators have the rights of the cluster's admin.
"""

import base64
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
NOT_RUN = "NOT TESTED WITH A REAL OPERATOR: "
ADMISSION = "admissionregistration.k8s.io/v1"
CERTIFICATES = "/tmp/k8s-webhook-server/serving-certs"
"""All operators expect their Secret here. Each gets a mount namespace, so they do not collide."""
NO_PROBES = ("--health-probe-bind-address=127.0.0.1:0", "--metrics-bind-address=0")
INIT_CONTAINER = """\
- name: init-pytorch
  image: {{.InitContainerImage}}
  resources:
    limits: {cpu: 100m, memory: 20Mi}
    requests: {cpu: 50m, memory: 10Mi}
  command: ['sh', '-c', 'for i in $(seq {{.MaxTries}}); do getent hosts {{.MasterAddr}} && exit; sleep 2; done; exit 1']
"""  # noqa: E501
"""The operator's own template, with `getent` for `nslookup`: the testbed has no DNS server."""
JOBSET_CONFIGURATION = """\
apiVersion: config.jobset.x-k8s.io/v1alpha1
kind: Configuration
leaderElection: {{leaderElect: false}}
internalCertManagement: {{enable: true}}
webhook: {{host: {host}, port: {port}}}
"""
TRAINER_CONFIGURATION = """\
apiVersion: config.trainer.kubeflow.org/v1alpha1
kind: Configuration
health: {{healthProbeBindAddress: "127.0.0.1:0"}}
metrics: {{bindAddress: "0"}}
leaderElection: {{leaderElect: false}}
webhook: {{host: {host}, port: {port}}}
"""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A webhook of an operator."""

    verdict: str
    """`Mutating` or `Validating`."""
    configuration: str
    """Name of its configuration. The operator writes its certificate into this object."""
    path: str
    resource: tuple[str, str, str]
    """Group, version and plural."""
    verbs: tuple[str, ...] = ("CREATE", "UPDATE")
    label: str = ""
    """Only objects with this label are sent to it."""


@dataclass(frozen=True, kw_only=True)
class RealOperator:
    binary: str
    kind: str
    namespace: str
    service: str
    secret: str
    address: int
    """Last byte of the IP address of its Service."""
    hooks: Sequence[Hook]

    def port(self, net: int) -> int:
        """Port of its webhooks. It depends on `net`, because the training operator listens on every
        address of the machine."""
        return 21000 + 10 * net + self.address

    def argv(self, folder: Path, net: int) -> list[str]:
        place = folder / f"{self.binary}.yaml"
        port, host = self.port(net), _address(net, self.address)
        if self.kind == "PyTorchJob":
            place.write_text(INIT_CONTAINER)
            return [
                *NO_PROBES,
                "--enable-scheme=pytorchjob",
                f"--webhook-server-port={port}",
                f"--pytorch-init-container-template-file={place}",
            ]
        if self.kind == "JobSet":
            place.write_text(JOBSET_CONFIGURATION.format(host=host, port=port))
            return [*NO_PROBES, f"--config={place}"]
        place.write_text(TRAINER_CONFIGURATION.format(host=host, port=port))
        return [f"--config={place}"]

    def objects(self, net: int) -> list[Object]:
        there = {"namespace": self.namespace}
        spec = {"clusterIP": _address(net, self.address), "ports": [{"port": self.port(net)}]}
        configurations = sorted({(hook.verdict, hook.configuration) for hook in self.hooks})
        return [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}},
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": self.secret, **there}},
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": self.service, **there},
                "spec": spec,
            },
            *(self._configuration(verdict, name, net) for verdict, name in configurations),
        ]

    def _configuration(self, verdict: str, name: str, net: int) -> Object:
        mine = [
            hook for hook in self.hooks if (hook.verdict, hook.configuration) == (verdict, name)
        ]
        return {
            "apiVersion": ADMISSION,
            "kind": f"{verdict}WebhookConfiguration",
            "metadata": {"name": name},
            "webhooks": [self._webhook(hook, net) for hook in mine],
        }

    def _webhook(self, hook: Hook, net: int) -> Object:
        service = {"name": self.service, "namespace": self.namespace, "path": hook.path}
        group, version, resource = hook.resource
        needs = {"key": hook.label, "operator": "Exists"}
        selector = {"objectSelector": {"matchExpressions": [needs]}} if hook.label else {}
        return {
            "name": f"{hook.path.strip('/')}.{self.namespace}.test",
            "clientConfig": {"service": {**service, "port": self.port(net)}},
            "rules": [
                {
                    "apiGroups": [group],
                    "apiVersions": [version],
                    "resources": [resource],
                    "operations": list(hook.verbs),
                }
            ],
            **selector,
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
        }


PYTORCHJOBS = ("kubeflow.org", "v1", "pytorchjobs")
JOBSETS = ("jobset.x-k8s.io", "v1alpha2", "jobsets")
TRAINJOBS, RUNTIMES, CLUSTER_RUNTIMES = (
    ("trainer.kubeflow.org", "v1alpha1", plural)
    for plural in ("trainjobs", "trainingruntimes", "clustertrainingruntimes")
)
PODS = ("", "v1", "pods")
JOBSET_MUTATING = "jobset-mutating-webhook-configuration"
JOBSET_VALIDATING = "jobset-validating-webhook-configuration"
TRAINER_VALIDATING = "validator.trainer.kubeflow.org"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
OPERATORS = (
    RealOperator(
        binary="training-operator",
        kind="PyTorchJob",
        namespace="kubeflow",
        service="training-operator",
        secret="training-operator-webhook-cert",
        address=10,
        hooks=[
            Hook(
                verdict="Validating",
                configuration="validator.training-operator.kubeflow.org",
                path="/validate-kubeflow-org-v1-pytorchjob",
                resource=PYTORCHJOBS,
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
            Hook(
                verdict="Mutating",
                configuration=JOBSET_MUTATING,
                path="/mutate-jobset-x-k8s-io-v1alpha2-jobset",
                resource=JOBSETS,
                verbs=("CREATE",),
            ),
            Hook(
                verdict="Mutating",
                configuration=JOBSET_MUTATING,
                path="/mutate--v1-pod",
                resource=PODS,
                verbs=("CREATE",),
                label=JOBSET_NAME,
            ),
            Hook(
                verdict="Validating",
                configuration=JOBSET_VALIDATING,
                path="/validate-jobset-x-k8s-io-v1alpha2-jobset",
                resource=JOBSETS,
            ),
            Hook(
                verdict="Validating",
                configuration=JOBSET_VALIDATING,
                path="/validate--v1-pod",
                resource=PODS,
                verbs=("CREATE",),
                label=JOBSET_NAME,
            ),
        ],
    ),
    RealOperator(
        binary="trainer-controller-manager",
        kind="TrainJob",
        namespace="kubeflow-system",
        service="kubeflow-trainer-controller-manager",
        secret="kubeflow-trainer-webhook-cert",
        address=12,
        hooks=[
            Hook(
                verdict="Mutating",
                configuration="defaulter.trainer.kubeflow.org",
                path="/mutate-trainer-kubeflow-org-v1alpha1-trainjob",
                resource=TRAINJOBS,
            ),
            *(
                Hook(
                    verdict="Validating",
                    configuration=TRAINER_VALIDATING,
                    path=f"/validate-trainer-kubeflow-org-v1alpha1-{resource[2].removesuffix('s')}",
                    resource=resource,
                )
                for resource in (CLUSTER_RUNTIMES, RUNTIMES, TRAINJOBS)
            ),
        ],
    ),
)


def available() -> tuple[RealOperator, ...]:
    folder = os.environ.get("KUBE_OPERATORS")
    return tuple(one for one in OPERATORS if folder and (Path(folder) / one.binary).exists())


def kinds() -> frozenset[str]:
    """Kinds of jobs with a real operator."""
    return frozenset(operator.kind for operator in available())


def definitions() -> dict[str, Path]:
    """Name of a CustomResourceDefinition of the operators to its file."""
    folder = Path(os.environ.get("KUBE_OPERATORS", "/nonexistent")) / "crds"
    files = sorted(folder.glob("*.yaml"))
    return {yaml.load(it.read_text(), yaml.CSafeLoader)["metadata"]["name"]: it for it in files}


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
