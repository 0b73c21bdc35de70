"""What rules a mesh out before a byte is counted, told of the axis rather than of one mesh.

It rules out what `refusals` refuses, which says it of one mesh in numbers
(`tests/plan/search/test_constraints.py` holds them together), and quickly: a search asks it of
thousands.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from orchestrator.contract.codec import Invalid
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.degrees import (
    Blocks,
    divisors,
    stays_near,
    tensor_split,
    ulysses_refusals,
)
from orchestrator.plan.setup import Checkpointing
from orchestrator.plan.stages import takes

Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zbv"]
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "interleaved_1f1b", "zbv")
"""Of pipelines, the one that is simplest to reason about first."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """Why a family of meshes cannot be."""

    axis: str
    constraint: str


def barrier(spec: JobSpec, shape: ModelShape, mesh: Mesh, blocks: Blocks) -> Barrier | None:
    """The first thing that rules `mesh` out; None where it can be, as far as memory allows."""
    return (
        _of_tensors(spec, shape, mesh, blocks)
        or _of_context(spec, shape, mesh)
        or _of_sharding(spec, mesh)
        or _of_pipeline(spec, shape, mesh)
    )


def pipelines(spec: JobSpec, shape: ModelShape, pp: int) -> tuple[PipelineSpec, ...]:
    """Those that `auto` may choose from with so many ranks and the model's layers."""
    return _pipelines(spec.parallel.pipeline, _may_split_backward(spec), shape.num_layers, pp)


@lru_cache(maxsize=1024)
def _pipelines(
    wish: PipelineSpec, may_split: bool, layers: int, pp: int
) -> tuple[PipelineSpec, ...]:
    if pp == 1:
        return (replace(wish, schedule="1f1b") if _is_plain(wish) else wish,)
    found = []
    for schedule in SCHEDULES if wish.schedule == "auto" else (wish.schedule,):
        if schedule == SPLITS_BACKWARD and not may_split:
            continue
        try:
            pipeline = replace(wish, schedule=schedule)
        except Invalid:
            continue  # It has another number of stages than the spec fixes.
        if layers >= pp * pipeline.stages:
            found.append(pipeline)
    return tuple(found)


def micro_sizes(spec: JobSpec, mesh: Mesh, pipeline: PipelineSpec) -> list[int]:
    """Micro batches that a data-parallel rank's share of the batch and the schedule take, the
    smallest first."""
    share, left = divmod(spec.train.global_batch_size, mesh.data_parallel)
    if left:
        return []
    asked = spec.train.micro_batch_size
    sizes = divisors(share) if asked == "auto" else (asked,) if share % asked == 0 else ()
    return [size for size in sizes if takes(pipeline, mesh.pp, share // size)]


def checkpointings(spec: JobSpec, pp: int, pipeline: PipelineSpec) -> tuple[Checkpointing, ...]:
    """What `auto` may choose from, that which computes least again first."""
    wish = spec.train.activation_checkpointing
    if wish != "auto":
        return (wish,)
    some: tuple[Checkpointing, ...] = ("every_k",) if spec.train.checkpoint_every else ()
    if pp == 1 or pipeline.schedule != SPLITS_BACKWARD:
        some = ("selective", *some)
    return ("none", *some, "full")


def reshardings(spec: JobSpec, mesh: Mesh, pipeline: PipelineSpec) -> tuple[bool | int, ...]:
    """What `auto` may choose from, that which gathers least often first."""
    fsdp = spec.parallel.fsdp
    if fsdp.reshard_after_forward != "auto" or spec.parallel.data != "fsdp":
        return (fsdp.reshard,)
    stays = mesh.pp > 1 and pipeline.stages > 1
    return (True,) if mesh.dp_shard * mesh.cp == 1 or stays else (False, True)


def context_parts(spec: JobSpec, cp: int) -> int:
    """Equal parts that a sequence is cut into: Ulysses one for each rank, the others an early and a
    late one."""
    return cp * (1 if spec.parallel.context == "ulysses" else 2)


def _is_plain(wish: PipelineSpec) -> bool:
    return wish.schedule == "auto" and wish.stages == 1


def _may_split_backward(spec: JobSpec) -> bool:
    return not spec.train.compile and spec.train.activation_checkpointing != "selective"


def _of_tensors(spec: JobSpec, shape: ModelShape, mesh: Mesh, blocks: Blocks) -> Barrier | None:
    if not stays_near(spec, blocks, mesh.tp):
        devices = spec.cluster.gpus_per_host
        if blocks:
            most = f"at most {blocks[0]} hosts x {devices} devices"
            what = f"its groups share a host or are whole hosts of one NVLink block, {most}"
            return Barrier("tp", what)
        return Barrier("tp", f"its groups stay inside a host: tp divides the {devices} devices")
    if mesh.tp == 1:
        return None
    if shape.fused:
        return Barrier("tp", f"the projections of {shape.model_type} are fused and cannot be cut")
    if spec.train.compile:
        return Barrier("tp", "torch computes wrong gradients with train.compile")
    for what, size in tensor_split(spec, shape, mesh.cp).items():
        if size % mesh.tp:
            return Barrier("tp", f"must divide the {size} {what}")
    return None


def _of_context(spec: JobSpec, shape: ModelShape, mesh: Mesh) -> Barrier | None:
    if mesh.cp == 1:
        return None
    length, method = spec.data.sequence_length, spec.parallel.context
    if length % context_parts(spec, mesh.cp):
        parts = "cp" if method == "ulysses" else "2 x cp"
        return Barrier("cp", f"{method} cuts the {length} tokens of a sequence into {parts} parts")
    if method == "ulysses" and ulysses_refusals(shape, mesh.tp, mesh.cp):
        return Barrier("cp", "ulysses deals out the heads of a tp rank, which cp must divide")
    if shape.attention_dropout:
        return Barrier("cp", "attention in blocks has no dropout, and the model's config asks it")
    return None


def _of_sharding(spec: JobSpec, mesh: Mesh) -> Barrier | None:
    wanted = spec.parallel.fsdp.reshard
    if spec.parallel.data != "fsdp" or isinstance(wanted, bool):
        return None
    if mesh.dp_shard * mesh.cp % wanted == 0:
        return None
    return Barrier("dp_shard", f"x cp is a multiple of reshard_after_forward={wanted}")


def _of_pipeline(spec: JobSpec, shape: ModelShape, mesh: Mesh) -> Barrier | None:
    found = pipelines(spec, shape, mesh.pp)
    if not found:
        return Barrier("pp", f"a layer or more for each stage; the model has {shape.num_layers}")
    batch, micro = spec.train.global_batch_size, spec.train.micro_batch_size
    each = mesh.data_parallel * (1 if micro == "auto" else micro)
    if batch % each:
        by = "" if micro == "auto" else f" x micro batch {micro}"
        what = f"the data-parallel ranks{by} divide the global batch of {batch}"
        return Barrier("dp_replicate x dp_shard", what)
    if not any(micro_sizes(spec, mesh, pipeline) for pipeline in found):
        return Barrier("pp", f"the batch of {batch} makes too few micro batches for the schedule")
    return None
