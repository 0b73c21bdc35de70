"""Any mesh beside the plan: what it would need and take, and why it was not chosen."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Memory, Plan, StepTime, Traffic
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.cost.traffic import traffic_of
from orchestrator.plan.figures import show_bytes
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.search.admitted import checkpointings, first_mesh, likely_mesh, micro_sizes
from orchestrator.plan.search.hosts import find, space_of_hosts, with_hosts
from orchestrator.plan.search.rule import Hosts, Request
from orchestrator.plan.search.rules import refusals, wished_pipelines
from orchestrator.plan.search.search_space import Option, Space
from orchestrator.plan.setup import setup_of


class Beside(Struct, frozen=True, kw_only=True):
    """A mesh that was asked for, in the same terms as the plan."""

    mesh: Mesh
    reasons: tuple[str, ...]
    """Why it cannot run; empty if it can."""
    settings: Mapping[str, Any]
    """Its micro batch, recomputation and schedule; empty if nothing can be computed for it."""
    memory: Memory | None = None
    time: StepTime | None = None
    communication: tuple[Traffic, ...] = ()


def beside(made: Plan, spec: JobSpec, inventory: Inventory, config: Mapping[str, Any]) -> Beside:
    """The best plan for `spec`, which fixes the mesh in question, on the hosts of `made`. For a
    mesh that is refused or does not fit, the setup that needs the least memory, if there is one."""
    shape = shape_of(config)
    spec = replace(spec, cluster=replace(spec.cluster, hosts=len(made.hosts)))
    request = Request(spec, shape, Hosts.of(spec, inventory))
    mesh = first_mesh(request) or likely_mesh(request)
    space = with_hosts(space_of_hosts(spec, inventory, shape), len(made.hosts))
    reasons = [str(one) for one in refusals(request, mesh)]
    option: Option | None = None
    if not reasons:
        aim = "memory" if spec.objective == "memory" else "throughput"
        space, found = find(space, aim)
        option = found.options[0] if found.options else None
    if option is None:
        option = _smallest(space, mesh)
        if option is not None and space.is_too_large(option.memory.peak_bytes):
            reasons.append(
                f"memory: needs at least {show_bytes(option.memory.peak_bytes)} on its fullest"
                f" rank, a device has {show_bytes(space.limit)}"
            )
    if option is None:
        return Beside(mesh=mesh, reasons=tuple(reasons), settings={})
    setup, used = option.setup, made.time.correction if made.time else None
    # Earlier jobs correct all times alike.
    factor = used.factor if used else 1.0
    return Beside(
        mesh=setup.mesh,
        reasons=tuple(reasons),
        settings={
            "micro_batch_size": setup.micro_batch_size,
            "gradient_accumulation": setup.micro_batches,
            "activation_checkpointing": setup.checkpointing,
            "schedule": setup.pipeline.schedule if setup.mesh.pp > 1 else None,
        },
        memory=option.memory,
        time=replace(
            option.time,
            step_s=option.time.step_s / factor,
            parts={part: seconds / factor for part, seconds in option.time.parts.items()},
        ),
        communication=tuple(
            replace(one, exposed_seconds=one.exposed_seconds / factor)
            for one in traffic_of(setup, space.fabric)
        ),
    )


def _smallest(space: Space, mesh: Mesh) -> Option | None:
    """The setup of `mesh` with the lowest peak, whatever rules it breaks; None if its degrees do
    not fill the hosts or divide the batch."""
    if mesh.world_size != space.world:
        return None
    spec = space.spec
    found = []
    for pipeline in wished_pipelines(spec.parallel.pipeline, mesh.pp):
        micro = micro_sizes(spec, mesh, pipeline)[:1]
        # Each stage needs a layer.
        if mesh.pp > 1 and mesh.pp * pipeline.stages > space.shape.num_layers:
            continue
        for size, kind in product(micro, checkpointings(spec, mesh, pipeline)):
            setup = setup_of(spec, space.shape, mesh, size, kind, pipeline)
            even = space.fabric.profile.calibration.even_stages
            found.append(space.peak(replace(setup, even_stages=even)))
    least = min(found, key=lambda peak: peak.bytes, default=None)
    return None if least is None else space.option(least)


def time_items(time: StepTime, traffic: Sequence[Traffic]) -> dict[str, float]:
    """Seconds of a step by reason; what no computation hides of the communication by axis."""
    items = {part: seconds for part, seconds in time.parts.items() if part != "communication"}
    axes: dict[str, float] = defaultdict(float)
    for one in traffic:
        axes[f"exposed {one.axis}"] += one.exposed_seconds
    return items | {axis: seconds for axis, seconds in axes.items() if seconds > 0}


def rows(
    ours: Mapping[str, float], theirs: Mapping[str, float]
) -> Iterator[tuple[str, float, float]]:
    """Every item of both, the largest difference first."""
    names = dict.fromkeys((*ours, *theirs))
    found = [(name, ours.get(name, 0), theirs.get(name, 0)) for name in names]
    yield from sorted(found, key=lambda row: -abs(row[2] - row[1]))
