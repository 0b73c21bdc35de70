"""From a spec, the hosts that there are and the model's config to one plan, with its reasons."""

from collections.abc import Mapping
from typing import Any

from orchestrator.cluster.inventory import Inventory
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.pipeline import SPLITS_BACKWARD
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec import JobSpec
from orchestrator.errors import PlanError
from orchestrator.plan.memory.peak import memory_of, show_bytes
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.alternatives import nearest_plans
from orchestrator.plan.search.degrees import choose_mesh, divisors
from orchestrator.plan.search.refusals import BYTE_TOKENS, refusals
from orchestrator.plan.setup import Checkpointing, setup_of
from orchestrator.plan.show.methods import methods_of
from orchestrator.plan.show.notes import notes_of_batch, notes_of_split
from orchestrator.plan.stages import takes

USED_OF_DEVICE = 0.8
"""What an estimate without allocator slack and buffers may take of a device's memory."""
MODEST_BYTES = 256 << 20
"""Activations and logits of a micro batch where the memory of a device is not known."""


def plan(spec: JobSpec, inventory: Inventory, config: Mapping[str, Any]) -> Plan:
    """The plan for `spec` on `inventory`; `config` holds the values of the model's config.json.

    Raises:
        PlanError: with every reason why not, and the nearest plans that can.
    """
    shape = shape_of(config)
    mesh = choose_mesh(spec, shape)
    reasons = refusals(spec, inventory, shape, mesh)
    if reasons:
        raise _refusal(spec, inventory, shape, reasons)
    hosts = inventory.with_devices(spec.cluster.gpus_per_host)[: spec.cluster.hosts]
    known = [host.device_bytes for host in hosts if host.device_bytes is not None]
    device_bytes = min(known) if len(known) == len(hosts) else None
    kind, micro = _fill(spec, shape, mesh, device_bytes)
    memory = memory_of(setup_of(spec, shape, mesh, micro, kind), None)
    accumulation = spec.train.global_batch_size // (mesh.data_parallel * micro)
    return Plan(
        mesh=mesh,
        micro_batch_size=micro,
        gradient_accumulation=accumulation,
        activation_checkpointing=kind,
        hosts=tuple(host.name for host in hosts),
        ranks_per_host=spec.cluster.gpus_per_host,
        memory=memory,
        methods=methods_of(spec, mesh, accumulation),
        notes=(
            *notes_of_split(spec, shape, mesh),
            *notes_of_batch(spec, mesh, micro, kind, _bound(device_bytes)),
            *_notes_of_hosts(spec, inventory, memory.peak_bytes, device_bytes),
            *shape.notes,
        ),
    )


def _refusal(
    spec: JobSpec, inventory: Inventory, shape: ModelShape, reasons: tuple[str, ...]
) -> PlanError:
    cluster = spec.cluster
    head = f"no plan for {spec.name} on {cluster.hosts} hosts x {cluster.gpus_per_host} ranks:"
    fixes = [str(found) for found in nearest_plans(spec, inventory, shape)]
    if shape.vocab_size < BYTE_TOKENS:
        fixes = [
            f"use a model with a vocab_size of {BYTE_TOKENS} or more"
            f" (--set model.config.vocab_size={BYTE_TOKENS} where the config is inline)"
        ]
    many = "the nearest plans that can:\n    " if len(fixes) > 1 else ""
    fix = many + "\n    ".join(fixes) if fixes else "free or add hosts, or ask for fewer"
    return PlanError("\n  ".join([head, *reasons]), fix=fix)


def _fill(
    spec: JobSpec, shape: ModelShape, mesh: Mesh, device_bytes: int | None
) -> tuple[Checkpointing, int]:
    """The checkpointing that is needed, and the largest micro batch that then fits."""

    def fits(micro: int, kind: Checkpointing) -> bool:
        memory = memory_of(setup_of(spec, shape, mesh, micro, kind), None)
        if device_bytes is not None:
            return memory.peak_bytes <= USED_OF_DEVICE * device_bytes
        return memory.items["activations"] + memory.items["logits"] <= MODEST_BYTES

    wish, asked = spec.train.activation_checkpointing, spec.train.micro_batch_size
    sizes = micro_sizes(spec, mesh) if asked == "auto" else [asked]
    kinds = checkpointings(spec, mesh) if wish == "auto" else (wish,)
    kind = next((kind for kind in kinds if fits(sizes[0], kind)), kinds[-1])
    return kind, next((micro for micro in reversed(sizes) if fits(micro, kind)), sizes[0])


def checkpointings(spec: JobSpec, mesh: Mesh) -> tuple[Checkpointing, ...]:
    """What `auto` may choose from, the least first."""
    split = mesh.pp > 1 and spec.parallel.pipeline.schedule == SPLITS_BACKWARD
    return ("none", "full") if split else ("none", "selective", "full")


def micro_sizes(spec: JobSpec, mesh: Mesh) -> list[int]:
    """Micro batches that `auto` may choose from, the smallest first.

    Those that divide a data-parallel rank's share of the batch and suit the pipeline's schedule;
    and of these, as far as there are any, those that make two micro batches or more for each of its
    ranks, else one: with fewer, ranks wait for each other.
    """
    share = spec.train.global_batch_size // mesh.data_parallel
    pipeline = spec.parallel.pipeline
    sizes = [size for size in divisors(share) if takes(pipeline, mesh.pp, share // size)]
    if mesh.pp == 1:
        return sizes
    for least in (2 * mesh.pp, mesh.pp):
        if filling := [size for size in sizes if share // size >= least]:
            return filling
    return sizes[:1]


def _bound(device_bytes: int | None) -> str:
    """What an estimate is held against, in words."""
    if device_bytes is not None:
        return f"all within {USED_OF_DEVICE:.0%} of a device's {show_bytes(device_bytes)}"
    return (
        f"activations and logits within {show_bytes(MODEST_BYTES)}"
        " (the memory of a device is not known)"
    )


def _notes_of_hosts(
    spec: JobSpec, inventory: Inventory, peak_bytes: int, device_bytes: int | None
) -> list[str]:
    notes = []
    able = len(inventory.with_devices(spec.cluster.gpus_per_host))
    spares = able - spec.cluster.hosts
    if spares < spec.cluster.spare_hosts:
        notes.append(f"{spec.cluster.spare_hosts} spare hosts asked for, {spares} there")
    if device_bytes is not None and peak_bytes > device_bytes:
        notes.append(
            f"the fullest rank needs about {show_bytes(peak_bytes)}, a device has"
            f" {show_bytes(device_bytes)}: expect it to run out of memory;"
            " --set train.activation_checkpointing=full, a smaller micro batch or more hosts help"
        )
    return notes
