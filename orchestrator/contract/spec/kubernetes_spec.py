"""What a job needs to say about a site's Kubernetes, in Kubernetes' own terms."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Struct, field

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.secret_names import is_plain_secret
from orchestrator.contract.spec.limits import AtLeast, Matches
from orchestrator.contract.spec.types import Count, Seconds

Name = Annotated[
    str,
    Matches(
        r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
        "a Kubernetes name: 1 to 253 of a-z, 0-9, - and ., no - or . at either end",
        "training",
    ),
]
Quantity = Annotated[
    str,
    Matches(
        r"\d+(\.\d+)?(m|[kKMGTPE]i?|e\d+)?",
        "a Kubernetes quantity as text, such as `500Gi`, `16` or `1500m`",
        "500Gi",
    ),
]
Label = Annotated[
    str,
    Matches(
        r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
        "the key of a label: a name of 1 to 63 characters, with an optional domain and / before it",
        "topology.kubernetes.io/rack",
    ),
]
LabelValue = Annotated[
    str,
    Matches(
        r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?",
        "the value of a label: at most 63 letters, digits, -, _ and ., at both ends a letter or"
        " digit",
        "llm-training",
    ),
]
IMAGE = Matches(
    r"([A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*(:[0-9]+)?/)?"
    r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?"
    r"(@(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}))?",
    "an image reference, [HOST[:PORT]/]PATH[:TAG][@DIGEST]: the path in lower case, the tag of at"
    " most 128 letters, digits, -, _ and ., the digest sha256: and 64 of 0-9 and a-f",
    "ghcr.io/you/ndctl:0.1",
)
"""The grammar of registries; a kubelet calls any other text InvalidImageName."""
Key = Annotated[
    str,
    Matches(
        r"[-._a-zA-Z0-9]{1,253}",
        "a key of a Secret or ConfigMap: letters, digits, -, _ and .",
        "token",
    ),
]
Path = Annotated[str, Matches(r"/.*", "an absolute path", "/data")]
Kind = Literal["pytorchjob", "jobset", "trainjob"]
"""The custom resource that creates the pods: Kubeflow's training operator v1, JobSet, or Kubeflow's
Trainer v2."""


class RunVolume(Struct, frozen=True, kw_only=True):
    """The volume of the run directories. Every pod mounts it at `cluster.kubernetes.run_root`. Give
    one of the two keys; the volume must be readable and writable from all nodes."""

    claim: Name | None = None
    """A PersistentVolumeClaim (ReadWriteMany) of the namespace."""
    host_path: Path | None = None
    """The same path on every node, such as a mounted parallel file system."""

    def __post_init__(self) -> None:
        if self.claim is not None and self.host_path is not None:
            raise Invalid(
                [
                    Problem(
                        path="host_path",
                        value=self.host_path,
                        limit="left out if claim is given, because there is only one volume",
                        fix=f"remove host_path, or claim: {self.claim}",
                    )
                ]
            )


class MountedVolume(Struct, frozen=True, kw_only=True):
    """One more volume in every pod, from exactly one source."""

    name: Name
    """Name of the volume in the pod."""
    mount_path: Path
    """Where each pod mounts it."""
    claim: Name | None = None
    """A PersistentVolumeClaim of the namespace."""
    host_path: Path | None = None
    """A folder of the node."""
    secret: Name | None = None
    """A Secret of the namespace; each of its keys is a file."""
    config_map: Name | None = None
    """A ConfigMap of the namespace; each of its keys is a file."""
    empty_dir: Quantity | None = None
    """A folder on the node with this size limit. It is deleted with the pod."""
    read_only: bool = True
    """Ignored for empty_dir."""

    def __post_init__(self) -> None:
        sources = ("claim", "host_path", "secret", "config_map", "empty_dir")
        given = [source for source in sources if getattr(self, source) is not None]
        if len(given) != 1:
            raise Invalid(
                [
                    Problem(
                        path="",
                        value=", ".join(given) or "none of them",
                        limit=f"given exactly one source of {', '.join(sources)}",
                        fix=f"volume {self.name}: give one of them",
                    )
                ]
            )


class ValueFrom(Struct, frozen=True, kw_only=True):
    """The value of a variable. The kubelet reads it from a Secret or ConfigMap of the namespace
    when the pod starts. ndctl neither reads nor stores it."""

    key: Key
    """Key in the Secret or ConfigMap."""
    secret: Name | None = None
    """Name of a Secret of the namespace."""
    config_map: Name | None = None
    """Name of a ConfigMap of the namespace."""

    def __post_init__(self) -> None:
        _check_one_source(self.secret, self.config_map)


class EnvFrom(Struct, frozen=True, kw_only=True):
    """A Secret or ConfigMap of the namespace. Each of its keys becomes a variable. A variable of
    `env` wins over one of the same name here."""

    secret: Name | None = None
    """Name of a Secret of the namespace."""
    config_map: Name | None = None
    """Name of a ConfigMap of the namespace."""
    prefix: str = ""
    """Put before the name of each variable."""

    def __post_init__(self) -> None:
        _check_one_source(self.secret, self.config_map)


def _check_one_source(secret: str | None, config_map: str | None) -> None:
    if (secret is None) == (config_map is None):
        given = "neither" if secret is None else f"{secret} and {config_map}"
        limit, fix = "given exactly one source, secret or config_map", "give one of them"
        raise Invalid([Problem(path="", value=given, limit=limit, fix=fix)])


class Toleration(Struct, frozen=True, kw_only=True):
    """A taint of nodes on which the pods may run, in Kubernetes' own terms."""

    key: str = ""
    """Empty: every taint."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """`Exists`: any value of the taint. `Equal`: exactly `value`."""
    value: str = ""
    """Value of the taint, with `operator: Equal`."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Empty: every effect."""
    toleration_seconds: Annotated[int, AtLeast(0)] | None = None
    """Seconds for which a NoExecute taint is tolerated. null: for ever."""

    def __post_init__(self) -> None:
        # The API server does not check these: it accepts the job and then rejects every pod of it.
        found = []
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            limit, fix = "NoExecute if toleration_seconds is given", "set effect to NoExecute"
            found.append(Problem(path="effect", value=self.effect, limit=limit, fix=fix))
        if not self.key and self.operator == "Equal":
            limit, fix = "Exists if there is no key", "give a key, or leave operator out"
            found.append(Problem(path="operator", value=self.operator, limit=limit, fix=fix))
        if self.value and self.operator == "Exists":
            limit, fix = "left out if operator is Exists", "set operator to Equal"
            found.append(Problem(path="value", value=self.value, limit=limit, fix=fix))
        if found:
            raise Invalid(found)


class TopologyRequest(Struct, frozen=True, kw_only=True):
    """Where the pods of a job should run, in labels of nodes. What is None or empty is not
    requested."""

    required: Label | None = None
    """All pods must run on nodes with one value of this label, or the job waits. With a queue of
    Kueue this is podset-required-topology, else a required pod affinity."""
    preferred: Label | None = None
    """The same, but only as far as there is room: Kueue's podset-preferred-topology."""
    slice: Label | None = None
    """Every `slice_size` consecutive pods run on nodes with one value of this label: Kueue's
    podset-slice-required-topology. Only with Kueue, and only for jobs with one kind of pods."""
    slice_size: Count | None = None
    """Number of consecutive pods of a slice."""
    levels: tuple[Label, ...] = ()
    """Without Kueue: labels of preferred pod affinities, outermost first. The last one has the
    largest weight."""
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> values. A node must have one of them, for example devices of one kind."""
    prefer_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> values. Nodes with one of them are preferred: the racks that the plan assumes."""

    def __post_init__(self) -> None:
        problems = []
        if self.required is not None and self.preferred is not None:
            limit = "left out if required is given"
            fix = "remove one of the two"
            problems.append(Problem(path="preferred", value=self.preferred, limit=limit, fix=fix))
        if (self.slice is None) != (self.slice_size is None):
            limit = "given together with slice_size"
            problems.append(Problem(path="slice", limit=limit, fix="give both, or neither"))
        if problems:
            raise Invalid(problems)


class KubernetesSpec(Struct, frozen=True, kw_only=True):
    """Settings of a job on Kubernetes."""

    kind: Kind = "pytorchjob"
    """Resource that creates the pods: Kubeflow's PyTorchJob (training operator v1), JobSet, or
    Kubeflow's TrainJob (Trainer v2)."""
    context: str | None = None
    """Context of the kubeconfig; null: its current one."""
    namespace: Name | None = None
    """null: the namespace of the context, else `default`."""
    image: Annotated[str, IMAGE] | None = None
    """An image with ndctl installed (manifests/image/); needed to render or submit."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image. null: Kubernetes' rule, which is `Always` for the tag latest,
    else `IfNotPresent`."""
    image_pull_secrets: tuple[Name, ...] = ()
    """Names of Secrets with the registry's credentials."""
    python: str = "python3"
    """The interpreter inside the image; it must have ndctl installed."""
    service_account: Name | None = None
    """Service account of the pods. null: the job creates one that has the rights its leader needs,
    only on objects of this job."""
    priority_class: Name | None = None
    """PriorityClass of the pods. null: the cluster's default."""
    runs: RunVolume = field(default_factory=RunVolume)
    """The volume of the run directories."""
    run_root: Path = "/ndctl/runs"
    """Where each pod mounts `runs`."""
    gpu_resource: str | None = "nvidia.com/gpu"
    """Resource name with which `cluster.gpus_per_host` devices are requested; null: ranks run on
    CPUs."""
    rdma_resource: str | None = None
    """The name differs by site, such as `rdma/hca_shared_devices_a` or `nvidia.com/hostdev`."""
    rdma_count: Count = 1
    """How many of `rdma_resource` each pod requests."""
    cpu: Quantity | None = None
    """CPU request of a pod. There is no limit, because a limit would throttle the ranks."""
    memory: Quantity | None = None
    """Memory request and limit of a pod."""
    guaranteed: bool = False
    """Make `cpu` a limit too; it must be a whole number then. The pod gets the class Guaranteed,
    and a kubelet with the static CPU policy gives it CPUs of its own, near its devices."""
    shm: Quantity | None = "64Gi"
    """Size limit of /dev/shm (an emptyDir in memory, which counts as memory of the pod); null: the
    runtime's 64 MiB."""
    host_network: bool = False
    """Pods use the network of their node, for example for InfiniBand without a plug-in."""
    network_policy: bool = True
    """Create a NetworkPolicy: the job's pods accept connections only from each other. It needs a
    network plug-in that enforces policies, and has no effect with `host_network`."""
    node_selector: Mapping[Label, LabelValue] = field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes on which the pods may run."""
    env: Mapping[str, str | ValueFrom] = field(default_factory=dict)
    """Variables of the ranks: a text, which everybody can read in the spec and in a ConfigMap, or
    `{secret: NAME, key: KEY}` for a secret."""
    env_from: tuple[EnvFrom, ...] = ()
    """Secrets and ConfigMaps whose keys become variables of the ranks."""
    volumes: tuple[MountedVolume, ...] = ()
    """More volumes in every pod, for data and caches."""
    labels: Mapping[Label, LabelValue] = field(default_factory=dict)
    """Labels of your own, on the job and on its pods. Free text goes into `annotations`."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Labels and annotations are set on the job and on its pods."""
    run_as_user: Annotated[int, AtLeast(1)] = 1000
    """User id of the processes in the pods. It is never root."""
    run_as_group: Annotated[int, AtLeast(1)] = 1000
    """Group id of the processes in the pods."""
    queue: Name | None = None
    """A LocalQueue of Kueue. Jobs stay suspended until Kueue admits them."""
    gang_scheduler: Literal["auto", "volcano", "coscheduling"] | None = "auto"
    """Schedule all pods at once, with the operator's pod groups. `auto`, without a queue: `submit`
    uses what the cluster has (the namespace's only queue of Kueue first) and prints it; `render`
    asks no cluster and sets none. null: none."""
    topology_labels: tuple[Label, ...] = (
        "topology.kubernetes.io/zone",
        "network.topology.nvidia.com/core",
        "network.topology.nvidia.com/spine",
        "network.topology.nvidia.com/leaf",
        "cloud.google.com/gce-topology-block",
        "cloud.google.com/gce-topology-subblock",
        "topology.k8s.aws/network-node-layer-1",
        "topology.k8s.aws/network-node-layer-2",
        "topology.k8s.aws/network-node-layer-3",
        "topology.kubernetes.io/block",
        "topology.kubernetes.io/rack",
    )
    """Node labels that name the switches above a node, outermost first. Labels that no node has are
    ignored."""
    nvlink_label: Label = "nvidia.com/gpu.clique"
    """Node label of the NVLink domain (GPU feature discovery sets this one)."""
    exclude: tuple[Name, ...] = ()
    """Names of nodes that the job must not use."""
    topology: TopologyRequest | None = None
    """null: what the plan requests."""
    force_delete_after: Seconds = 120.0
    """Seconds after which a pod on an unreachable node is deleted by force, if RBAC allows it."""
    pod_patience: Seconds = 600.0
    """Seconds that a lost pod may take to be scheduled and started again. Then the job continues
    with fewer hosts or is requeued. The other pods wait in place until then."""
    ttl_after_finished: Annotated[int, AtLeast(0)] | None = None
    """Seconds after the job's end at which its objects are deleted, with their pods and logs. The
    run directory stays. null: never."""
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    """Merged into each pod template, for settings that have no key here. Mappings are merged key by
    key, and null removes a key. Lists of named things (containers, env, volumes) are merged by
    name, volumeMounts by mountPath. Other lists are replaced."""


LABEL_LIMIT = 63
"""Limit of a pod's name, because it is also a host name and a label value (RFC 1035)."""


def longest_pod_name(kind: Kind, job: str, pods: int) -> str:
    """The longest pod name that the operator creates."""
    if kind == "pytorchjob":
        return f"{job}-worker-{pods - 2}" if pods > 1 else f"{job}-master-0"
    return f"{job}-node-0-{pods - 1}-xxxxx"


def too_long_name(kind: Kind, job: str, pods: int) -> Problem | None:
    """Whether the name of a job is too long for the names of its pods."""
    longest = longest_pod_name(kind, job, pods)
    over = len(longest) - LABEL_LIMIT
    if over <= 0:
        return None
    return Problem(
        path="name",
        value=job,
        limit=f"at most {len(job) - over} long here: a pod would be named {longest}, and a host"
        f" name has at most {LABEL_LIMIT}",
        fix=f"shorten it by {over}",
    )


def plain_secrets(spec: KubernetesSpec) -> tuple[str, ...]:
    """Keys of the spec that set a variable named like a secret to a plain text that is no path."""
    pod = spec.pod_template.get("spec")
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    given = [("env", name, value) for name, value in spec.env.items()]
    for at, one in enumerate(containers if isinstance(containers, list) else []):
        variables = one.get("env") if isinstance(one, Mapping) else None
        place = f"pod_template.spec.containers[{at}].env"
        given += [(place, *named) for named in _named_values(variables)]
    return tuple(f"{place}.{name}" for place, name, value in given if is_plain_secret(name, value))


def _named_values(variables: Any) -> Iterator[tuple[str, Any]]:
    for one in variables if isinstance(variables, list) else []:
        if isinstance(one, Mapping):
            yield str(one.get("name")), one.get("value")
