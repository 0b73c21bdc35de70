"""Converts Kubernetes' nodes and the requests of their pods to an `Inventory`."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from msgspec import Struct, field

from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec, Toleration
from orchestrator.inventory.gpus import GpuTable
from orchestrator.inventory.hosts import Host, Inventory, State
from orchestrator.inventory.kubernetes.gpus import PRODUCT, memory_bytes, profile_of
from orchestrator.inventory.kubernetes.nodes import Node
from orchestrator.inventory.kubernetes.pods import Taken
from orchestrator.inventory.kubernetes.quantities import quantity, words
from orchestrator.inventory.kubernetes.standing import shut
from orchestrator.inventory.kubernetes.taints import tolerations_of
from orchestrator.inventory.kubernetes.topology import levels_of, switches_of
from orchestrator.inventory.profile import Profile
from orchestrator.inventory.profiles import load_profile

CPU = "cpu"
USUAL = KubernetesSpec()


class Use(Struct, frozen=True, kw_only=True):
    """What a job's pods request from the nodes."""

    device: str | None = USUAL.gpu_resource
    """The resource that counts as devices; None: ranks run on CPUs."""
    ranks: int | None = None
    """Ranks per host on CPUs; None: one per CPU."""
    requests: Mapping[str, Fraction] = field(default_factory=dict)
    """Other resources that a pod requests."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    exclude: frozenset[str] = frozenset()
    tolerations: tuple[Toleration, ...] = ()
    topology_labels: tuple[str, ...] = USUAL.topology_labels
    nvlink_label: str = USUAL.nvlink_label
    patient: bool = False
    """The job can wait in a queue, so resources that are in use now will be free."""

    @property
    def resources(self) -> tuple[str, ...]:
        """Resources whose use by other pods must be known."""
        return tuple(dict.fromkeys((self.device or CPU, *self.requests)))


def use_of(cluster: ClusterSpec) -> Use:
    """From the keys of a spec."""
    spec = cluster.kubernetes
    wants = {CPU: spec.cpu, "memory": spec.memory}
    requests = {name: quantity(amount) for name, amount in wants.items() if amount is not None}
    if spec.rdma_resource is not None:
        requests[spec.rdma_resource] = Fraction(spec.rdma_count)
    return Use(
        device=spec.gpu_resource,
        ranks=cluster.gpus_per_host,
        requests=requests,
        node_selector=spec.node_selector,
        exclude=frozenset(spec.exclude),
        tolerations=tolerations_of(spec),
        topology_labels=spec.topology_labels,
        nvlink_label=spec.nvlink_label,
    )


def inventory_of(
    nodes: Sequence[Node], used: Mapping[str, Taken], table: GpuTable, use: Use
) -> Inventory:
    """All `nodes` with devices; for ranks on CPUs, all real machines.

    `used` is the result of `pods.taken` for `use.resources`.
    """
    nodes = [node for node in nodes if _counts(node, use)]
    levels = levels_of(nodes, use.topology_labels)
    cpu = load_profile("cpu") if use.device is None else None
    return Inventory(
        hosts=tuple(
            _host(node, used.get(node.name, Taken()), cpu or profile_of(node, table), levels, use)
            for node in nodes
        )
    )


def _counts(node: Node, use: Use) -> bool:
    """Whether the node is a host at all. A node whose devices are all unhealthy is one."""
    if node.is_virtual:
        return False
    if use.device is None:
        return True
    return use.device in node.capacity or use.device in node.allocatable or PRODUCT in node.labels


def _host(
    node: Node, used: Taken, profile: Profile | None, levels: Sequence[str], use: Use
) -> Host:
    state, reason, devices = _standing(node, used, use)
    return Host(
        name=node.name,
        devices=devices,
        device_bytes=_device_bytes(node, profile) if use.device else None,
        profile=profile,
        state=state,
        reason=reason,
        switches=switches_of(node, levels),
        nvlink_block=node.labels.get(use.nvlink_label) if _has_nvlink(profile) else None,
    )


def _has_nvlink(profile: Profile | None) -> bool:
    return profile is not None and profile.intra_host.kind.startswith("nvlink")


def _device_bytes(node: Node, profile: Profile | None) -> int | None:
    """A process sees less memory than the label says, unless the device is a smaller kind."""
    if profile is None:
        return None
    said = memory_bytes(node)
    return profile.memory_bytes if said is None else min(said, profile.memory_bytes)


def _standing(node: Node, used: Taken, use: Use) -> tuple[State, str, int]:
    """State, reason and number of devices: on a free host those that the job may use, else all."""
    every = _devices(node.can_give(use.device or CPU), use)
    if node.name in use.exclude:
        return "excluded", "by the spec", every
    if why := _unselected(node, use):
        return "not selected", why, every
    if (why_shut := shut(node, use.tolerations)) is not None:
        return why_shut.state, why_shut.reason, every
    # A GPU label without GPUs to give: the device plugin is down or all devices are unhealthy.
    if use.device is not None and not node.can_give(use.device) and PRODUCT in node.labels:
        why = f"none of its {use.device} is available: check its device plugin"
        return "not ready", why, every
    if use.patient:  # the job waits in a queue, so current use does not matter
        return "free", "", every
    for name, amount in use.requests.items():
        if node.can_give(name) - used.of(name) < amount:
            return "busy", _taken_by(node, used, name), every
    left = _devices(node.can_give(use.device or CPU) - used.of(use.device or CPU), use)
    if every and not left:  # all devices are in use
        return "busy", _taken_by(node, used, use.device or CPU), every
    return "free", "", left


def _devices(amount: Fraction, use: Use) -> int:
    """Number of devices in an amount of the resource: GPUs, or ranks on CPUs. On CPUs the pods' own
    request, if any, decides what fits."""
    if use.device is not None or use.ranks is None:
        return max(0, int(amount))
    return use.ranks if amount >= use.requests.get(CPU, 0) else 0


def _unselected(node: Node, use: Use) -> str:
    """Why the spec excludes a node; empty if it does not."""
    for label, value in use.node_selector.items():
        if (said := node.labels.get(label)) != value:
            if said is None:
                # A missing label and a label with another value need different fixes.
                return f"without the label {label}={value}"
            return f"has {label}={said}, but node_selector requires {value}"
    for name, amount in use.requests.items():
        if (there := node.can_give(name)) < amount:
            return f"has {words(there, name)} of {words(amount, name)} {name} that a pod requests"
    return ""


def _taken_by(node: Node, used: Taken, resource: str) -> str:
    by = used.by.get(resource, [])
    more = f" and {len(by) - 1} more" if len(by) > 1 else ""
    amount, there = (words(one, resource) for one in (used.of(resource), node.can_give(resource)))
    return f"{amount} of {there} {resource} taken by {by[0]}{more}"
