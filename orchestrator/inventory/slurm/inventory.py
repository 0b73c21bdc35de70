"""Converts Slurm's nodes and topology to an `Inventory`."""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.inventory.gpus import GpuTable
from orchestrator.inventory.hosts import Host, Inventory, State
from orchestrator.inventory.profile import Profile
from orchestrator.inventory.profiles import load_profile
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.slurm.nodes import Node
from orchestrator.inventory.slurm.standing import Standing, standing_of
from orchestrator.inventory.slurm.topology import Topology


class Use(Struct, frozen=True, kw_only=True):
    """What a job requests from the nodes, as far as it decides which are free for it."""

    exclusive: bool = False
    reservation: str | None = None
    constraint: str | None = None
    nodelist: frozenset[str] = frozenset()
    """If set, only these hosts."""
    exclude: frozenset[str] = frozenset()
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Hosts that ndctl excludes -> why."""
    gpu_type: str | None = None
    """None: any partition."""
    profile: str | None = None
    """Profile that the hosts' devices must have; None: any."""
    on_cpus: bool = False
    """Ranks run on CPUs: a host has one place per CPU."""
    waits_for: frozenset[State] = frozenset()
    """Hosts in these states count as free, because the job waits for them in the queue."""


def inventory_of(nodes: Sequence[Node], topology: Topology, table: GpuTable, use: Use) -> Inventory:
    on_cpus = use.on_cpus or not any(node.gpus for node in nodes)
    cpu = load_profile("cpu") if on_cpus else None
    said = load_profile(use.profile) if use.profile else None
    return Inventory(
        hosts=tuple(
            _host(node, use, cpu or _gpu_profile(node, table, said), topology) for node in nodes
        )
    )


def _gpu_profile(node: Node, table: GpuTable, said: Profile | None) -> Profile | None:
    """If Slurm does not tell the kind of GPU, the kind in the spec is assumed."""
    if not node.gpus:
        return None
    return table.profile_of(node.gpu_type, node.features) or said


def _host(node: Node, use: Use, profile: Profile | None, topology: Topology) -> Host:
    standing = standing_of(node, exclusive=use.exclusive, reservation=use.reservation)
    if use.waits_for and standing.state in {"free", *use.waits_for}:
        standing = Standing(state="free", gpus=node.gpus)
    on_cpus = profile is not None and profile.device == "cpu"
    places = node.cpus if on_cpus and (use.on_cpus or not node.gpus) else standing.gpus
    host = Host(
        name=node.name,
        devices=places,
        device_bytes=profile.memory_bytes if profile and not on_cpus else None,
        profile=profile,
        state=standing.state,
        reason=standing.reason,
        switches=topology.switches.get(node.name, ()),
        # A site may call any group of nodes a block. Only with NVLink is it more than a switch.
        nvlink_block=topology.blocks.get(node.name) if _has_nvlink(profile) else None,
    )
    if why := unfit(node, use) or _of_another_kind(profile, use):
        by_name = node.name in use.exclude
        return replace(host, state="excluded" if by_name else "not selected", reason=why)
    if node.name in use.excluded:
        return replace(host, state="excluded", reason=use.excluded[node.name])
    return host


def _of_another_kind(profile: Profile | None, use: Use) -> str:
    """Why a host does not have the kind of device in the spec; empty if it has."""
    if use.profile is None or profile is None or profile.name == use.profile:
        return ""
    return f"is {profile.name}, but cluster.gpu is {use.profile}"


def _has_nvlink(profile: Profile | None) -> bool:
    return profile is not None and profile.intra_host.kind.startswith("nvlink")


def unfit(node: Node, use: Use) -> str:
    """Why the spec excludes a node; empty if it does not."""
    if node.name in use.exclude:
        return "by the spec"
    if use.nodelist and node.name not in use.nodelist:
        return "not in the spec's nodelist"
    if use.gpu_type and use.gpu_type != node.gpu_type:
        return f"has GPUs of type {node.gpu_type}" if node.gpu_type else "has GPUs without a type"
    if use.constraint and not _meets(use.constraint, node.features):
        return f"without the feature {use.constraint}"
    return ""


def _meets(constraint: str, features: Collection[str]) -> bool:
    """For constraints that are features joined by & or |. Slurm evaluates more complex ones."""
    if set(constraint) & set("[]()*"):
        return True
    separator = "|" if "|" in constraint else "&"
    if separator == "|" and set("&,") & set(constraint):
        return True
    words = [word in features for word in constraint.replace(",", "&").split(separator)]
    return any(words) if separator == "|" else all(words)


def use_of(cluster: ClusterSpec, excluded: Mapping[str, str] | None = None) -> Use:
    """From the keys of a spec and ndctl's own exclusions. Raises Invalid for a host list that
    cannot be read."""
    slurm = cluster.slurm
    return Use(
        exclusive=slurm.exclusive,
        reservation=slurm.reservation,
        constraint=slurm.constraint,
        nodelist=frozenset(expand(slurm.nodelist or "")),
        exclude=frozenset(expand(slurm.exclude or "")),
        excluded=excluded or {},
        gpu_type=slurm.gpu_type,
        profile=cluster.gpu,
        on_cpus=slurm.gpus == "none",
    )
