"""The hosts that a spec itself describes: what a plan is made for where no cluster is asked. Pure.

The same spec describes the same hosts on every machine and at every time, so that what is rendered
for them can be kept in git and checked where there is no cluster.
"""

from orchestrator.contract.devices import CPU
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.kubernetes.gpus import KINDS, gpu_table, profile_of
from orchestrator.inventory.kubernetes.nodes import Node
from orchestrator.inventory.profiles import load_profile


def described_hosts(cluster: ClusterSpec) -> Inventory | None:
    """As many hosts as the job takes, spares among them, all alike and free; None where the spec
    does not say of which kind their devices are."""
    device = described_device(cluster)
    if device is None:
        return None
    profile = load_profile(device)
    stem = "host" if cluster.backend == "local" else "node"
    # Ranks on CPUs share the memory of their machine: no one knows what each may have.
    device_bytes = None if device == CPU else profile.memory_bytes
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
    """The name of the profile of the devices that the job's ranks run on."""
    if cluster.backend == "kubernetes":
        if cluster.kubernetes.gpu_resource is None:
            return CPU
        return cluster.gpu or selected_device(cluster)
    return cluster.gpu


def selected_device(cluster: ClusterSpec) -> str | None:
    """The same by `node_selector`: a label such as `nvidia.com/gpu.product` lets nodes with one
    kind of devices in. A table of the site's own is not looked at, for another machine may lack
    it."""
    labels = cluster.kubernetes.node_selector
    if not any(label in labels for label in KINDS):
        return None
    found = profile_of(Node(name="", labels=labels), gpu_table({}))
    return found.name if found else None
