"""The kinds of objects that ndctl reads and writes, and where each keeps the fields we need."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from orchestrator.contract.spec.kubernetes_spec import Kind

Object = Mapping[str, Any]
"""A Kubernetes object as parsed JSON."""
ETCD_BYTES = 3 << 19
"""The default limit of a request to etcd, so of an object."""
TO_SHORTEN = (
    "shorten cluster.kubernetes.env or pod_template, or put long values into a Secret or ConfigMap"
    " and name it in cluster.kubernetes.env_from"
)
"""The fix for an object above this limit."""


class Resource(Struct, frozen=True):
    group: str
    """Empty: the core group."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str = "", sub: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        inside = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return root + inside + "/" + "/".join(filter(None, (self.plural, name, sub)))

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def word(self) -> str:
        """The name of the resource for `kubectl get`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = Resource("", "v1", "pods", "Pod")
EVENTS = Resource("", "v1", "events", "Event")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
SERVICES = Resource("", "v1", "services", "Service")
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
PRIORITIES = Resource(
    "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False
)
RUNTIME_CLASSES = Resource("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", namespaced=False)
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io",
    "v1",
    "selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    namespaced=False,
)
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
PYTORCHJOBS = Resource("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob")
JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
TRAINJOBS = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob")
RUNTIMES = Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime")
CORE = (PODS, EVENTS, NODES, NAMESPACES, SECRETS, CONFIG_MAPS, CLAIMS, SERVICES, ACCOUNTS, QUOTAS)
OWN = (
    *CORE,
    PRIORITIES,
    RUNTIME_CLASSES,
    ACCESS_REVIEWS,
    LEASES,
    ROLES,
    ROLE_BINDINGS,
    POLICIES,
    PYTORCHJOBS,
    JOBSETS,
    TRAINJOBS,
    RUNTIMES,
)


def resource_of(item: Object) -> Resource:
    """The Resource of an object. Raises KeyError for an unknown kind."""
    return {(one.kind, one.api_version): one for one in OWN}[item["kind"], item["apiVersion"]]


class JobKind(Struct, frozen=True, kw_only=True):
    """The differences between the custom resources that can run a job."""

    resource: Resource
    operator: str
    """The operator that creates its pods."""
    install: str
    """The command that installs it."""
    suspend: tuple[str, ...]
    """Path of the field that deletes all pods."""
    since: str
    """The oldest operator version whose kind has every field we send."""
    needs: tuple[tuple[str, ...], ...]
    """Fields that no version before `since` has."""


JOB_KINDS: Mapping[Kind, JobKind] = {
    "pytorchjob": JobKind(
        resource=PYTORCHJOBS,
        operator="Kubeflow's training operator v1",
        install='kubectl apply --server-side -k "github.com/kubeflow/training-operator.git/'
        'manifests/overlays/standalone?ref=v1.9.3"',
        suspend=("spec", "runPolicy", "suspend"),
        since="1.7",
        needs=(("spec", "nprocPerNode"), ("spec", "runPolicy", "suspend")),
    ),
    "jobset": JobKind(
        resource=JOBSETS,
        operator="the JobSet controller",
        install="kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/"
        "download/v0.12.0/manifests.yaml",
        suspend=("spec", "suspend"),
        since="0.6",
        needs=(("spec", "network", "publishNotReadyAddresses"),),
    ),
    "trainjob": JobKind(
        resource=TRAINJOBS,
        operator="Kubeflow Trainer v2",
        install='kubectl apply --server-side -k "https://github.com/kubeflow/trainer.git/manifests/'
        'overlays/manager?ref=v2.0.0"',
        suspend=("spec", "suspend"),
        since="2.0",
        needs=(("spec", "trainer", "numProcPerNode"),),
    ),
}


def lookup(item: Any, path: Sequence[str], default: Any = None) -> Any:
    """The value at `path` inside nested objects."""
    for key in path:
        if not isinstance(item, Mapping) or key not in item:
            return default
        item = item[key]
    return default if item is None else item


def nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """A change of one field, for a merge patch."""
    for key in reversed(path):
        value = {key: value}
    made: dict[str, Any] = value
    return made


def name_of(item: Object) -> str:
    return str(lookup(item, ("metadata", "name"), ""))


def owner_reference(resource: Resource, owner: Object) -> dict[str, Any]:
    """Kubernetes deletes what has this reference together with `owner`."""
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": name_of(owner),
        "uid": owner["metadata"]["uid"],
    }
