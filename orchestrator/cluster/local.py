"""This machine, playing several hosts."""

from orchestrator.cluster.inventory import Host, Inventory
from orchestrator.cluster.profiles import load_profile
from orchestrator.contract.spec import ClusterSpec


def local_inventory(cluster: ClusterSpec, device_bytes: int | None = None) -> Inventory:
    """The hosts that `cluster` asks for, spares last: `host-0`, `host-1`, ….

    `device_bytes` is the memory for each rank. Leave it None for CPU ranks: they share the
    machine's memory, and the planner then keeps their micro batches small.
    """
    count = cluster.hosts + cluster.spare_hosts
    profile = load_profile("cpu")
    return Inventory(
        hosts=tuple(
            Host(
                name=f"host-{i}",
                devices=cluster.gpus_per_host,
                device_bytes=device_bytes,
                profile=profile,
            )
            for i in range(count)
        )
    )
