"""Hosts that a spec describes itself, for planning without asking a cluster. Pure.

The same spec always gives the same hosts on every machine. So rendered files can be kept in git and
checked where no cluster is available.
"""

from orchestrator.contract.devices import CPU
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.kubernetes.gpus import KINDS, gpu_table, profile_of
from orchestrator.inventory.kubernetes.nodes import Node
from orchestrator.inventory.profile import Profile
from orchestrator.inventory.profiles import load_profile


def described_hosts(cluster: ClusterSpec) -> Inventory | None:
    """As many hosts as the job uses, including spares, all equal and free; None if the spec does
    not name the kind of device."""
    device = described_device(cluster)
    if device is None:
        return None
    return hosts_like(cluster, load_profile(device))


def hosts_like(cluster: ClusterSpec, profile: Profile) -> Inventory:
    """As many equal hosts with devices of `profile` as the job uses."""
    stem = "host" if cluster.backend == "local" else "node"
    # Ranks on CPUs share the memory of their machine, so memory per rank is unknown.
    device_bytes = None if profile.device == "cpu" else profile.memory_bytes
    return Inventory(
        hosts=tuple(
            Host(
                name=f"{stem}-{number}",
                devices=cluster.gpus_per_host,
                device_bytes=device_bytes,
                profile=profile,
            )
            for number in range(cluster.hosts + cluster.spare_hosts)
        )
    )


def described_device(cluster: ClusterSpec) -> str | None:
    """Name of the profile of the devices on which the job's ranks run."""
    if cluster.backend == "kubernetes":
        if cluster.kubernetes.gpu_resource is None:
            return CPU
        return cluster.gpu or selected_device(cluster)
    return cluster.gpu


def selected_device(cluster: ClusterSpec) -> str | None:
    """The device that `node_selector` names, for example by the label `nvidia.com/gpu.product`. A
    site's own table is not used, because another machine may not have it."""
    labels = cluster.kubernetes.node_selector
    if not any(label in labels for label in KINDS):
        return None
    found = profile_of(Node(name="", labels=labels), gpu_table({}))
    return found.name if found else None
