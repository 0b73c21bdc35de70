"""The nearest specs that have a plan, for a spec that breaks a rule, as tried `--set` values.
They break no rule and fit in memory; if none of the nearest fits, they only break no rule.

Nearest means: the fewest keys changed, by the smallest factors. A change of the global batch
changes the training itself, so it costs more than a change of the split.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.codec import Invalid
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.admitted import first_mesh, tensor_degrees
from orchestrator.plan.search.best import can_fit
from orchestrator.plan.search.edits import Edits, Value, apply, show_edits, value_at
from orchestrator.plan.search.hosts import fabric_of, space_of_hosts
from orchestrator.plan.search.meshes import divisors
from orchestrator.plan.search.rule import Hosts, Request
from orchestrator.plan.search.rule_checks import context_parts, linear_names, longest_sequence
from orchestrator.plan.search.rules import SCHEDULES, refusals

COST = {
    "train.global_batch_size": 2.5,
    "cluster.hosts": 1.5,
    "train.micro_batch_size": 0.5,
    "parallel.pipeline.stages_per_rank": 0.25,
}
"""Cost of changing a key; 1 for any other key."""
SHORTEST_SEQUENCE = 8
SHOWN = 3
METHODS = ("ring", "ulysses", "all_gather")
PADDED = 128
"""The multiple to which Megatron-LM pads a vocabulary by default."""
FARTHEST = 2
"""The largest pp or cp tried, as a multiple of the requested one."""
MOST_SIZED = 24
"""Alternatives whose memory is computed; of a large job each takes milliseconds."""


class Alternative(Struct, frozen=True):
    edits: Edits
    mesh: Mesh
    fits: bool = True
    """In the memory of the devices."""

    def __str__(self) -> str:
        return f"{show_edits(self.edits)}  ({self.mesh})"


def nearest_plans(
    spec: JobSpec, inventory: Inventory, shape: ModelShape
) -> tuple[Alternative, ...]:
    """Up to three, the nearest first. Either all fit in memory, or none of those tried does."""
    found: list[Alternative] = []
    too_large: list[Alternative] = []
    seen = set()
    hosts: dict[int, Hosts] = {}
    tried = {tuple(sorted(e.items(), key=str)): e for e in _candidates(spec, inventory, shape)}
    for edits in sorted(tried.values(), key=lambda edits: _distance(spec, edits)):
        # It contains the changes of a nearer alternative, so it changes more than needed.
        if any(known.edits.items() <= edits.items() for known in found):
            continue
        try:
            changed = apply(spec, edits)
        except Invalid:
            continue  # the new values exclude each other
        ranks = changed.cluster.gpus_per_host
        # Thousands of candidates share a few host sizes. The inventory is read once for each.
        if ranks not in hosts:
            hosts[ranks] = Hosts.of(changed, inventory)
        padded = replace(shape, vocab_size=changed.model.padded(shape.vocab_size))
        request = Request(changed, padded, hosts[ranks])
        mesh = first_mesh(request)
        # No edits: the spec itself was refused, so it is no alternative.
        if mesh is None or not edits:
            continue
        kind = (mesh, tuple((path, _grows(spec, path, value)) for path, value in edits.items()))
        # Alternatives that differ only in the size of a change are not worth a line each.
        if kind not in seen and not refusals(request, mesh):
            seen.add(kind)
            fits = _may_fit(changed, inventory, padded)
            (found if fits else too_large).append(Alternative(edits, mesh, fits))
        if len(found) == SHOWN or len(found) + len(too_large) == MOST_SIZED:
            break
    return tuple(found or too_large[:SHOWN])


def _may_fit(spec: JobSpec, inventory: Inventory, shape: ModelShape) -> bool:
    # Without a profile nothing is known about the memory, and the rules alone decide.
    if fabric_of(spec, inventory) is None:
        return True
    space = space_of_hosts(spec, inventory, shape)
    # An automatic margin refuses no job that fills the memory of a device.
    return can_fit(space.filled() if spec.cluster.memory_margin == "auto" else space)


def _candidates(spec: JobSpec, inventory: Inventory, shape: ModelShape) -> Iterator[Edits]:
    """Changes that may help; each contains the changes that every plan needs."""
    needed = _needed(spec, shape)
    for hosts, ranks in _sizes(spec, inventory):
        base = needed | _changed(spec, {"cluster.hosts": hosts, "cluster.gpus_per_host": ranks})
        yield base
        yield base | _padding(spec, shape)
        resized = apply(spec, base)
        request = Request(resized, shape, Hosts.of(resized, inventory))
        for pp, cp in _outer_degrees(spec, hosts * ranks):
            outer = base | _changed_degrees(spec, {"pp": pp, "cp": cp})
            for tp in tensor_degrees(request, cp):
                rest, left = divmod(hosts * ranks, pp * cp * tp)
                # The degrees do not fill the world.
                if left:
                    continue
                for shard in divisors(rest) if spec.parallel.data == "fsdp" else [1]:
                    mesh = Mesh(pp=pp, dp_replicate=rest // shard, dp_shard=shard, cp=cp, tp=tp)
                    yield from _with_mesh(spec, outer, mesh)


def _needed(spec: JobSpec, shape: ModelShape) -> dict[str, Value]:
    """Changes that every plan needs, whatever the mesh."""
    needed: dict[str, Value] = {}
    longest = longest_sequence(shape)
    if SHORTEST_SEQUENCE <= longest < spec.data.sequence_length:
        needed["data.sequence_length"] = longest
    if spec.model.lora is not None:
        names = linear_names(shape)
        kept = tuple(name for name in spec.model.lora.target_modules if name in names)
        # Keep the valid names. If none is valid, one module is the smallest change.
        if not kept or len(kept) < len(spec.model.lora.target_modules):
            needed["model.lora.target_modules"] = kept or (names[0],)
    return needed


def _padding(spec: JobSpec, shape: ModelShape) -> dict[str, Value]:
    """A padded vocabulary, if the tp of the spec does not divide it."""
    tp = spec.parallel.tp
    if tp == "auto" or shape.vocab_size % tp == 0:
        return {}
    return {"model.pad_vocab_to_multiple_of": math.lcm(PADDED, tp)}


def _outer_degrees(spec: JobSpec, world: int) -> Iterator[tuple[int, int]]:
    """pp and cp: divisors of the world up to `FARTHEST` times the request. 1 stays 1, and `auto` is
    1 because the planner tried all others already."""
    asked = (1 if d == "auto" else d for d in (spec.parallel.pp, spec.parallel.cp))
    sizes = (
        [d for d in divisors(world) if d <= FARTHEST * most] if most > 1 else [1] for most in asked
    )
    for pp, cp in product(*sizes):
        if world % (pp * cp) == 0:
            yield pp, cp


def _sizes(spec: JobSpec, inventory: Inventory) -> Iterator[tuple[int, int]]:
    """Hosts and ranks per host: as requested, or what the inventory has."""
    hosts, ranks = spec.cluster.hosts, spec.cluster.gpus_per_host
    available = len(inventory.with_devices(ranks))
    # The hosts are not the problem, so do not propose other sizes.
    if available >= hosts:
        yield hosts, ranks
        return
    if available:
        yield available, ranks
    devices = sorted((host.devices for host in inventory.hosts), reverse=True)
    if len(devices) >= hosts and devices[hosts - 1] > 0:
        yield hosts, devices[hosts - 1]


def _with_mesh(spec: JobSpec, base: Edits, mesh: Mesh) -> Iterator[Edits]:
    """`mesh`, with micro batch, global batch and methods that fit it."""
    degrees = _changed_degrees(
        spec, {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
    )
    batches = list(_batches(spec, mesh))
    for methods in _methods(spec, mesh):
        for train in batches:
            yield {**base, **degrees, **_changed(spec, {**methods, **train})}


def _batches(spec: JobSpec, mesh: Mesh) -> Iterator[dict[str, Value]]:
    """Micro batch and global batch as requested, or the nearest ones that data-parallel ranks and
    pipeline rounds divide."""
    batch, micro = spec.train.global_batch_size, spec.train.micro_batch_size
    # `dict.fromkeys` drops the duplicate if the spec has `auto` already, and keeps the order.
    for new_micro in dict.fromkeys((micro, "auto")):
        a_pass = mesh.data_parallel * (1 if new_micro == "auto" else new_micro)
        for unit in dict.fromkeys((a_pass, a_pass * mesh.pp)):
            below, above = batch // unit * unit, -(-batch // unit) * unit
            # The nearest multiple below may be 0, which is no batch.
            for new_batch in {batch} if below == batch else {below or unit, above}:
                yield {"train.micro_batch_size": new_micro, "train.global_batch_size": new_batch}


def _methods(spec: JobSpec, mesh: Mesh) -> Iterator[dict[str, Value]]:
    """No change, then another method for one axis."""
    wish = spec.parallel
    yield {}
    # With another pp the requested schedule may work already, so only the requested pp gets other
    # schedules.
    if wish.pp == mesh.pp > 1:
        for schedule in SCHEDULES:
            auto = "parallel.pipeline.stages_per_rank"
            yield {"parallel.pipeline.schedule": schedule, auto: "auto"}
    if wish.cp == mesh.cp > 1:
        for method in METHODS:
            yield {"parallel.context": method}
        parts = context_parts(spec, mesh.cp) * mesh.tp
        shorter = spec.data.sequence_length // parts * parts
        if SHORTEST_SEQUENCE <= shorter < spec.data.sequence_length:
            yield {"data.sequence_length": shorter}
    if not isinstance(wish.fsdp.reshard, bool):
        yield {"parallel.fsdp.reshard_after_forward": True}


def _changed_degrees(spec: JobSpec, degrees: Mapping[str, int]) -> dict[str, Value]:
    """Changes of the degrees that the spec fixes; the planner still chooses the others."""
    fixed = {
        axis: degree for axis, degree in degrees.items() if getattr(spec.parallel, axis) != "auto"
    }
    return _changed(spec, {f"parallel.{axis}": degree for axis, degree in fixed.items()})


def _changed(spec: JobSpec, values: Mapping[str, Value]) -> dict[str, Value]:
    return {path: value for path, value in values.items() if value_at(spec, path) != value}


def _grows(spec: JobSpec, path: str, value: Value) -> bool:
    before = value_at(spec, path)
    return isinstance(value, int) and isinstance(before, int) and value > before


def _distance(spec: JobSpec, edits: Edits) -> tuple[float, float, str]:
    cost = sum(COST.get(path, 1.0) for path in edits)
    factors = 0.0
    for path, value in edits.items():
        before = value_at(spec, path)
        # `auto` and names have no factor, and zero has no logarithm.
        if isinstance(value, int) and isinstance(before, int) and value and before:
            factors += abs(math.log2(value / before))
    return cost, factors, str(sorted(edits.items()))
