"""The hosts that a plan uses: their hardware, and the fewest that suffice."""

from msgspec.structs import replace

from orchestrator.contract.devices import compute_dtype
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.parallel_spec import FsdpSpec
from orchestrator.errors import PlanError
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.profile import Fabric
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.admitted import first_mesh
from orchestrator.plan.search.best import Found, search
from orchestrator.plan.search.search_space import Space


def fabric_of(spec: JobSpec, inventory: Inventory) -> Fabric | None:
    """The hardware of the hosts that `spec` asks for; None if the profile is unknown."""
    fabric = inventory.fabric(spec.cluster.gpus_per_host)
    if fabric is None:
        return None
    hosts = inventory.with_devices(spec.cluster.gpus_per_host)
    known = [host.device_bytes for host in hosts if host.device_bytes is not None]
    profile = fabric.profile
    if known:
        # All ranks run the same setup, so the smallest device limits all of them.
        profile = replace(profile, memory_bytes=min(known))
    return replace(fabric, profile=profile, hosts=spec.cluster.hosts)


def space_of_hosts(spec: JobSpec, inventory: Inventory, shape: ModelShape) -> Space:
    """All ways to run the job, whether rules allow them or not.

    Raises:
        PlanError: the hardware of the hosts is unknown.
    """
    fabric = fabric_of(spec, inventory)
    if fabric is None:
        raise PlanError(
            "the hardware of the hosts is unknown: the inventory has no profile",
            fix="name one in the inventory, for example profile: h100-sxm-80gb",
        )
    return Space(_on_devices(spec, fabric), shape, fabric)


def _on_devices(spec: JobSpec, fabric: Fabric) -> JobSpec:
    """`spec` with the keys decided that depend on the devices alone, or on the software there."""
    profile = fabric.profile
    fast = profile.device == "cuda" and "bfloat16" in profile.flops
    dtype = compute_dtype(spec.train.dtype, fast_bfloat16=fast)
    memory = spec.checkpoint.memory.on_devices(cpu=profile.device == "cpu")
    parallel = spec.parallel
    if profile.calibration.whole_weights:
        parallel = replace(parallel, fsdp=_with_whole_weights(parallel.fsdp))
    return replace(
        spec,
        train=replace(spec.train, dtype=dtype),
        checkpoint=replace(spec.checkpoint, memory=memory),
        parallel=parallel,
    )


def _with_whole_weights(fsdp: FsdpSpec) -> FsdpSpec:
    """As other software runs that has no ZeRO-3, unless the user says otherwise."""
    if fsdp.reshard_after_forward == "auto":
        fsdp = replace(fsdp, reshard_after_forward=False)
    if fsdp.reduce_gradients == "auto":
        fsdp = replace(fsdp, reduce_gradients="last")
    return fsdp


def with_hosts(space: Space, hosts: int) -> Space:
    cluster = replace(space.spec.cluster, hosts=hosts)
    spec = replace(space.spec, cluster=cluster)
    return replace(space, spec=spec, fabric=replace(space.fabric, hosts=hosts))


def find(space: Space, objective: str) -> tuple[Space, Found]:
    """The best plans, and the space that has them. An automatic margin must not refuse a job that
    may run, so if no plan leaves it free, plans may fill the memory of a device."""
    if objective == "fewest_hosts":
        searched, found = with_fewest_hosts(space)
    else:
        searched, found = space, search(space, objective)
    if found.options or space.spec.cluster.memory_margin != "auto":
        return searched, found
    return find(space.filled(), objective)


def with_fewest_hosts(space: Space) -> tuple[Space, Found]:
    """The smallest number of hosts on which a plan fits, and the fastest plans on them."""
    for hosts in range(min(least_hosts(space), space.fabric.hosts), space.fabric.hosts):
        smaller = with_hosts(space, hosts)
        # A cheap test of the rules before the search, which computes memory and time.
        if first_mesh(smaller.request) is not None:
            found = search(smaller, "throughput")
            if found.options:
                return smaller, found
    return space, search(space, "throughput")


def least_hosts(space: Space) -> int:
    """A lower bound: all ranks together hold each weight, its gradient and its moments once."""
    fabric = space.fabric
    devices = -(-space.states_bytes // fabric.profile.memory_bytes)
    return max(1, -(-devices // fabric.devices_per_host))
