"""The plan of the user's own program: only which hosts its ranks get. Pure."""

from collections.abc import Iterator

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Plan, Traffic
from orchestrator.contract.spec.job_spec import ScriptSpec
from orchestrator.errors import PlanError
from orchestrator.inventory.hosts import Inventory, grouped, tree_of
from orchestrator.plan.placement.arrange import arrange

SHOWN = 3
ALL_REDUCE = Traffic(
    axis="dp_replicate",
    collective="all-reduce",
    what="gradients",
    bytes_per_step=1 << 30,
    messages=1,
    level="spine",
    seconds=0.0,
    exposed_seconds=0.0,
)
"""What a program is assumed to send, so that its hosts are near each other. The amount does not
matter, because it is the only traffic."""


def plan_program(spec: ScriptSpec, inventory: Inventory) -> Plan:
    """The hosts for `spec`. Memory and time stay unknown.

    Raises:
        PlanError: too few hosts can be used; names those that cannot.
    """
    cluster = spec.cluster
    ranks, usable = cluster.gpus_per_host, inventory.with_devices(cluster.gpus_per_host)
    if len(usable) < cluster.hosts:
        raise _too_few(spec, inventory, len(usable))
    mesh = Mesh(dp_replicate=cluster.hosts * ranks)
    switches = tree_of(usable)
    names = tuple(host.name for host in usable)
    hosts = (
        arrange(mesh, ranks, names, switches, (ALL_REDUCE,)).hosts
        if switches
        else names[: cluster.hosts]
    )
    profile = inventory.hosts[0].profile
    return Plan(
        mesh=mesh,
        micro_batch_size=None,
        gradient_accumulation=None,
        hosts=hosts,
        switches=switches,
        ranks_per_host=ranks,
        memory=None,
        profile=profile.name if profile else None,
        notes=tuple(_notes(spec)),
    )


def _notes(spec: ScriptSpec) -> Iterator[str]:
    if place := spec.elsewhere:
        yield f"run: {place}, so it must be there; nothing of this machine is copied"


def _too_few(spec: ScriptSpec, inventory: Inventory, usable: int) -> PlanError:
    hosts, ranks = spec.cluster.hosts, spec.cluster.gpus_per_host
    left_out = inventory.left_out(ranks)
    few = {
        host.name: f"has {host.devices} devices" for host in inventory.hosts if host.devices < ranks
    }
    why = grouped({**left_out, **few}, SHOWN)
    shown = "; ".join(why[:SHOWN])
    more = f"; and {len(why) - SHOWN} more reasons" if len(why) > SHOWN else ""
    reasons = f" ({shown}{more})" if why else ""
    message = (
        f"no plan for {spec.name} on {hosts} hosts x {ranks} ranks: only {usable} of"
        f" {len(inventory.hosts)} hosts can be used{reasons}"
    )
    if usable:
        return PlanError(message, fix=f"--set cluster.hosts={usable}")
    if few:
        return PlanError(message, fix="ask for fewer GPUs per host")
    return PlanError(message, fix="free one of these hosts; `ndctl inventory` shows them all")
