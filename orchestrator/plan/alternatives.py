"""The nearest plans that can, for a spec that cannot: each as `--set` values, each tried out.

Nearest means: fewest keys changed, and those by the smallest factors. A change of the global batch
changes the training itself, so it costs more than one of the split.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.cluster.inventory import Inventory
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec import JobSpec
from orchestrator.plan.degrees import (
    NOT_RUN_YET,
    choose_mesh,
    divisors,
    refusals,
    tensor_degrees,
)
from orchestrator.plan.shape import ModelShape

Edits = Mapping[str, int | str]
"""Path of a key of the spec -> its new value."""

COST = {"train.global_batch_size": 2.5, "cluster.hosts": 1.5, "train.micro_batch_size": 0.5}
"""Of changing a key; 1 for any other."""
SHORTEST_SEQUENCE = 8
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Alternative:
    edits: Edits
    mesh: Mesh

    def __str__(self) -> str:
        wanted = " ".join(f"--set {path}={value}" for path, value in self.edits.items())
        return f"{wanted}  ({self.mesh})"


def nearest_plans(
    spec: JobSpec, inventory: Inventory, shape: ModelShape
) -> tuple[Alternative, ...]:
    """Up to three, the nearest first."""
    found: list[Alternative] = []
    alike = set()
    tried = {tuple(sorted(e.items())): e for e in _candidates(spec, inventory, shape)}
    for edits in sorted(tried.values(), key=lambda edits: _distance(spec, edits)):
        if any(known.edits.items() <= edits.items() for known in found):
            continue
        changed = apply(spec, edits)
        mesh = choose_mesh(changed, shape)
        kind = (mesh, tuple((path, _grows(spec, path, value)) for path, value in edits.items()))
        if edits and kind not in alike and not refusals(changed, inventory, shape, mesh):
            found.append(Alternative(edits, mesh))
            alike.add(kind)
        if len(found) == SHOWN:
            break
    return tuple(found)


def apply(spec: JobSpec, edits: Edits) -> JobSpec:
    """`spec` with other values at paths of the form `section.key`."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in edits.items():
        section, _, key = path.partition(".")
        sections.setdefault(section, {})[key] = value
    changed: dict[str, Any] = {
        name: replace(getattr(spec, name), **values) for name, values in sections.items()
    }
    return replace(spec, **changed)


def _candidates(spec: JobSpec, inventory: Inventory, shape: ModelShape) -> Iterator[Edits]:
    """Changes that may help; every one has what no plan goes without."""
    needed: dict[str, int | str] = {
        f"parallel.{axis}": 1 for axis in NOT_RUN_YET if getattr(spec.parallel, axis) > 1
    }
    if SHORTEST_SEQUENCE <= shape.max_positions < spec.data.sequence_length:
        needed["data.sequence_length"] = shape.max_positions
    for hosts, ranks in _sizes(spec, inventory):
        base = needed | _changed(spec, {"cluster.hosts": hosts, "cluster.gpus_per_host": ranks})
        yield base
        for tp in tensor_degrees(apply(spec, base), shape):
            for shard in divisors(hosts * ranks // tp):
                mesh = Mesh(dp_replicate=hosts * ranks // tp // shard, dp_shard=shard, tp=tp)
                yield from _with_mesh(spec, base, mesh)


def _sizes(spec: JobSpec, inventory: Inventory) -> Iterator[tuple[int, int]]:
    """Hosts and ranks per host: as asked, or what there is instead."""
    hosts, ranks = spec.cluster.hosts, spec.cluster.gpus_per_host
    able = len(inventory.with_devices(ranks))
    if able >= hosts:
        yield hosts, ranks
        return
    if able:
        yield able, ranks
    devices = sorted((host.devices for host in inventory.hosts), reverse=True)
    if len(devices) >= hosts and devices[hosts - 1] > 0:
        yield hosts, devices[hosts - 1]


def _with_mesh(spec: JobSpec, base: Edits, mesh: Mesh) -> Iterator[Edits]:
    """`mesh`, with the micro batch or the batch made to fit it."""
    wish = spec.parallel
    degrees = {
        "parallel.dp_replicate": mesh.dp_replicate,
        "parallel.dp_shard": "auto" if wish.dp_shard == "auto" else mesh.dp_shard,
        "parallel.tp": "auto" if wish.tp == "auto" else mesh.tp,
    }
    batch, micro = spec.train.global_batch_size, spec.train.micro_batch_size
    for new_micro in dict.fromkeys((micro, "auto")):
        step = mesh.data_parallel * (1 if new_micro == "auto" else new_micro)
        below, above = batch // step * step, -(-batch // step) * step
        for new_batch in {batch} if below == batch else {below or step, above}:
            train = {"train.micro_batch_size": new_micro, "train.global_batch_size": new_batch}
            yield {**base, **_changed(spec, {**degrees, **train})}


def _changed(spec: JobSpec, values: Edits) -> dict[str, int | str]:
    return {path: value for path, value in values.items() if _value(spec, path) != value}


def _value(spec: JobSpec, path: str) -> Any:
    section, _, key = path.partition(".")
    return getattr(getattr(spec, section), key)


def _grows(spec: JobSpec, path: str, value: int | str) -> bool:
    before = _value(spec, path)
    return isinstance(value, int) and isinstance(before, int) and value > before


def _distance(spec: JobSpec, edits: Edits) -> tuple[float, float, str]:
    cost = sum(COST.get(path, 1.0) for path in edits)
    factors = 0.0
    for path, value in edits.items():
        before = _value(spec, path)
        if isinstance(value, int) and isinstance(before, int):
            factors += abs(math.log2(value / before))
    return cost, factors, str(sorted(edits.items()))
