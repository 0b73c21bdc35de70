"""What a site's Kubernetes needs to be told of a job, in Kubernetes' own words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.secret_names import is_plain_secret
from orchestrator.contract.spec.limits import AtLeast, Matches
from orchestrator.contract.spec.types import Count, Seconds

Name = Annotated[
    str,
    Matches(
        r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
        "a Kubernetes name: 1 to 253 of a-z, 0-9, - and ., at both ends no - or .",
        "training",
    ),
]
Quantity = Annotated[
    str,
    Matches(
        r"\d+(\.\d+)?(m|[kKMGTPE]i?|e\d+)?",
        "a Kubernetes quantity as text, as in `500Gi`, `16` or `1500m`",
        "500Gi",
    ),
]
Label = Annotated[
    str,
    Matches(
        r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
        "the key of a label: a name of 1 to 63 signs, with or without a domain and / before it",
        "topology.kubernetes.io/rack",
    ),
]
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
"""Which custom resource becomes the pods: Kubeflow's training operator v1, JobSet, Kubeflow's
Trainer v2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVolume:
    """Where run directories are: one volume that every pod of the job mounts at `cluster`'s
    run_root. Give one of the two; it has to be readable and writable from all nodes."""

    claim: Name | None = None
    """A PersistentVolumeClaim (ReadWriteMany) of the namespace."""
    host_path: Path | None = None
    """The same path on every node, as of a mounted parallel file system."""

    def __post_init__(self) -> None:
        if self.claim is not None and self.host_path is not None:
            raise Invalid(
                [
                    Problem(
                        path="host_path",
                        value=self.host_path,
                        limit="left out where claim is given: run directories are in one volume",
                        fix=f"remove host_path, or claim: {self.claim}",
                    )
                ]
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MountedVolume:
    """One more volume in every pod, of one source."""

    name: Name
    mount_path: Path
    claim: Name | None = None
    host_path: Path | None = None
    secret: Name | None = None
    config_map: Name | None = None
    empty_dir: Quantity | None = None
    """A folder of the node of at most this size, gone with the pod."""
    read_only: bool = True
    """Of no meaning for an empty_dir."""

    def __post_init__(self) -> None:
        sources = ("claim", "host_path", "secret", "config_map", "empty_dir")
        given = [source for source in sources if getattr(self, source) is not None]
        if len(given) != 1:
            raise Invalid(
                [
                    Problem(
                        path="",
                        value=", ".join(given) or "none of them",
                        limit=f"of one source: {', '.join(sources)}",
                        fix=f"volume {self.name}: give one of them",
                    )
                ]
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFrom:
    """The value of a variable, which the kubelet reads from a Secret or ConfigMap of the namespace
    as the pod starts. ndctl neither reads nor stores it."""

    key: Key
    secret: Name | None = None
    config_map: Name | None = None

    def __post_init__(self) -> None:
        _check_one_source(self.secret, self.config_map)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFrom:
    """A Secret or ConfigMap of the namespace, each key of which becomes a variable. A variable of
    `env` comes before one of the same name here."""

    secret: Name | None = None
    config_map: Name | None = None
    prefix: str = ""
    """Put before the name of each."""

    def __post_init__(self) -> None:
        _check_one_source(self.secret, self.config_map)


def _check_one_source(secret: str | None, config_map: str | None) -> None:
    if (secret is None) == (config_map is None):
        given = "neither" if secret is None else f"{secret} and {config_map}"
        limit, fix = "of one source: secret or config_map", "give one of them"
        raise Invalid([Problem(path="", value=given, limit=limit, fix=fix)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    key: str = ""
    """Empty: every taint."""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Empty: every effect."""
    toleration_seconds: Annotated[int, AtLeast(0)] | None = None

    def __post_init__(self) -> None:
        """Of these the API server tells nobody: it takes the job and refuses each of its pods."""
        found = []
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            limit, fix = "NoExecute where toleration_seconds is given", "set effect to NoExecute"
            found.append(Problem(path="effect", value=self.effect, limit=limit, fix=fix))
        if not self.key and self.operator == "Equal":
            limit, fix = "Exists where there is no key", "give a key, or leave operator out"
            found.append(Problem(path="operator", value=self.operator, limit=limit, fix=fix))
        if self.value and self.operator == "Exists":
            limit, fix = "left out where operator is Exists", "set operator to Equal"
            found.append(Problem(path="value", value=self.value, limit=limit, fix=fix))
        if found:
            raise Invalid(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyRequest:
    """Where the pods of a job should come to lie, in labels of nodes; what is None, or empty, is
    not asked."""

    required: Label | None = None
    """All pods below one value of it, or the job waits: podset-required-topology with a queue of
    Kueue, else a required pod affinity."""
    preferred: Label | None = None
    """As near to that as there is room: Kueue's podset-preferred-topology."""
    slice: Label | None = None
    """Each `slice_size` pods in order below one value of it: Kueue's
    podset-slice-required-topology; of Kueue alone, and of a job of one kind of pods."""
    slice_size: Count | None = None
    levels: tuple[Label, ...] = ()
    """Without Kueue: pod affinities that the scheduler prefers, the innermost, which is the last,
    before the others."""
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> values, one of which a node must have: devices of one kind."""
    prefer_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> values that are better: the racks that the plan is made for."""

    def __post_init__(self) -> None:
        problems = []
        if self.required is not None and self.preferred is not None:
            limit = "left out where required is given"
            fix = "remove one of the two"
            problems.append(Problem(path="preferred", value=self.preferred, limit=limit, fix=fix))
        if (self.slice is None) != (self.slice_size is None):
            limit = "given together with slice_size"
            problems.append(Problem(path="slice", limit=limit, fix="give both, or neither"))
        if problems:
            raise Invalid(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSpec:
    kind: Kind = "pytorchjob"
    context: str | None = None
    """Of the kubeconfig; None: its current one."""
    namespace: Name | None = None
    """None: the context's, else `default`."""
    image: Annotated[str, Matches(r"\S+", "an image reference", "ghcr.io/you/ndctl:0.1")] | None = (
        None
    )
    """With ndctl installed, see manifests/image/; needed to render or submit."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[Name, ...] = ()
    python: str = "python3"
    """The interpreter inside the image, which has ndctl installed."""
    service_account: Name | None = None
    """Of the pods; None: one of the job's own, with the rights that its leader needs, on objects of
    this job."""
    priority_class: Name | None = None
    runs: RunVolume = field(default_factory=RunVolume)
    run_root: Path = "/ndctl/runs"
    """Where `runs` is mounted in each pod."""
    gpu_resource: str | None = "nvidia.com/gpu"
    """What `cluster.gpus_per_host` devices are asked for as; None: ranks run on CPUs."""
    rdma_resource: str | None = None
    """Name differs by site, as in `rdma/hca_shared_devices_a` or `nvidia.com/hostdev`."""
    rdma_count: Count = 1
    cpu: Quantity | None = None
    """Of a pod; request, without a limit: a limit would throttle the ranks."""
    memory: Quantity | None = None
    """Of a pod; request and limit."""
    guaranteed: bool = False
    """Makes `cpu`, a whole number then, a limit as well: the pod is of the class Guaranteed, and a
    kubelet with the static CPU policy gives it CPUs of its own, near its devices."""
    shm: Quantity | None = "64Gi"
    """Size limit of /dev/shm (an emptyDir in memory, counted as memory of the pod); None: the
    runtime's 64 MiB."""
    host_network: bool = False
    network_policy: bool = True
    """The job brings a NetworkPolicy: its pods accept connections from each other alone. It takes a
    network plug-in that enforces policies, and has no effect with `host_network`."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    env: Mapping[str, str | ValueFrom] = field(default_factory=dict)
    """Variables of the ranks: a text, which stands in plain view in the spec and in a ConfigMap, or
    `{secret: NAME, key: KEY}` for what nobody else shall read."""
    env_from: tuple[EnvFrom, ...] = ()
    volumes: tuple[MountedVolume, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Both on the job and on its pods."""
    run_as_user: Annotated[int, AtLeast(1)] = 1000
    run_as_group: Annotated[int, AtLeast(1)] = 1000
    queue: Name | None = None
    """A LocalQueue of Kueue; jobs wait suspended until they are admitted."""
    gang_scheduler: Literal["auto", "volcano", "coscheduling"] | None = "auto"
    """Has the pods bound all at once, by the operator's pod groups. `auto`, without a queue:
    `submit` takes what the cluster has, the namespace's one queue of Kueue first, and says so;
    `render` asks no cluster and puts none in. null: none."""
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
    """Node labels that name the switches above a node, the outermost first; those that no node
    has are passed over."""
    nvlink_label: Label = "nvidia.com/gpu.clique"
    """Node label of the NVLink domain (GPU feature discovery sets this one)."""
    exclude: tuple[Name, ...] = ()
    """Nodes that the job shall not have, by name."""
    topology: TopologyRequest | None = None
    """None: what the plan asks for."""
    force_delete_after: Seconds = 120.0
    """A pod whose node does not answer is deleted by force after so long, where RBAC allows."""
    pod_patience: Seconds = 600.0
    """For a lost pod to be scheduled and started again before the job goes on with fewer hosts or
    queues anew; the others wait in place."""
    ttl_after_finished: Annotated[int, AtLeast(0)] | None = None
    """Seconds after its end at which the job's objects go, with their pods and logs; the run
    directory stays. None: never by themselves."""
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    """Merged into each pod template, for what has no key here: mappings key by key, null removes a
    key, lists of named things (containers, env, volumes) by name and volumeMounts by mountPath;
    other lists replace what was there."""


def plain_secrets(spec: KubernetesSpec) -> tuple[str, ...]:
    """Keys of the spec that give a variable named like a secret as plain text. A path is none."""
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
