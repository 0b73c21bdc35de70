"""The meshes, pipelines and micro batches that no rule refuses, from which `auto` may choose."""

from typing import NamedTuple

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.train_spec import Checkpointing, chunks_of_loss
from orchestrator.contract.spec.types import Auto
from orchestrator.inventory.profile import Profile
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.meshes import divisors, meshes, sequences_per_pass, world_size
from orchestrator.plan.search.rule import Case, Request
from orchestrator.plan.search.rule_checks import splits_backward, uneven_for_float8
from orchestrator.plan.search.rules import (
    SCHEDULE_RULES,
    TENSOR_RULES,
    first_broken,
    first_refusal,
    wished_pipelines,
)
from orchestrator.plan.setup import Reduction
from orchestrator.plan.stages import can_run

SMALL_CHUNKS = (1024, 256)
"""Tokens of a chunk of the loss that the planner tries if memory requires smaller chunks than
usual."""


def first_mesh(request: Request) -> Mesh | None:
    """A mesh that breaks no rule, preferably the likely one; None if there is none."""
    likely = likely_mesh(request)
    world = world_size(request.spec)
    # The likely mesh usually passes, which saves the walk through all meshes.
    if likely.world_size == world and first_refusal(request, likely) is None:
        return likely
    candidates = meshes(request.spec, world)
    return next((mesh for mesh in candidates if first_refusal(request, mesh) is None), None)


def likely_mesh(request: Request) -> Mesh:
    """The degrees of the spec, with a number for each `auto`. If no mesh is admitted, the refusal
    explains this one.

    tp gets the largest degree that divides the world and the batch, dp_shard gets the remaining
    ranks, and the other degrees are 1.
    """
    spec = request.spec
    if spec.parallel.tp != "auto":
        return _with_tp(spec, spec.parallel.tp)
    cp = 1 if spec.parallel.cp == "auto" else spec.parallel.cp
    found = [_with_tp(spec, tp) for tp in tensor_degrees(request, cp)]
    fits_world = [mesh for mesh in found if mesh.world_size == world_size(spec)]
    fits_batch = [
        m for m in fits_world if spec.train.global_batch_size % sequences_per_pass(spec, m) == 0
    ]
    # If nothing fits, the refusal should name as few broken rules as possible.
    return (fits_batch or fits_world or found)[0]


def _with_tp(spec: JobSpec, tp: int) -> Mesh:
    wish = spec.parallel
    pp, replicate, cp = (1 if d == "auto" else d for d in (wish.pp, wish.dp_replicate, wish.cp))
    rest = max(1, world_size(spec) // (pp * replicate * cp * tp))
    shard = 1 if wish.dp_shard == "auto" else wish.dp_shard
    # Only one axis may take the remaining ranks; dp_shard is preferred, because it needs less
    # memory.
    if wish.dp_shard == "auto" and wish.data == "fsdp":
        shard = rest
    elif wish.dp_replicate == "auto":
        replicate = max(1, rest // shard)
    return Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)


def tensor_degrees(request: Request, cp: int) -> list[int]:
    """The tp degrees that no rule about tp refuses with this cp, largest first."""
    hosts, ranks = request.spec.cluster.hosts, request.spec.cluster.gpus_per_host
    # Groups wider than a host are possible only inside an NVLink block.
    wide = [ranks * many for many in divisors(hosts)[1:]] if request.hosts.blocks else []
    return [tp for tp in reversed([*divisors(ranks), *wide]) if _admits_tensors(request, tp, cp)]


def _admits_tensors(request: Request, tp: int, cp: int) -> bool:
    # A degree of 1 always stays, so that a refusal has a mesh to explain.
    case = Case(*request, Mesh(cp=cp, tp=tp), request.spec.parallel.pipeline)
    return tp == 1 or first_broken(case, TENSOR_RULES) is None


def pipelines(request: Request, mesh: Mesh) -> tuple[PipelineSpec, ...]:
    """Schedules that can run on `mesh`, which no other rule refuses."""
    return tuple(
        pipeline
        for pipeline in wished_pipelines(request.spec.parallel.pipeline, mesh.pp)
        if first_broken(Case(*request, mesh, pipeline), SCHEDULE_RULES) is None
    )


def micro_sizes(spec: JobSpec, mesh: Mesh, pipeline: PipelineSpec) -> list[int]:
    """Micro batch sizes that divide a data-parallel rank's share of the batch and that the schedule
    can run, the smallest first."""
    share, left = divmod(spec.train.global_batch_size, mesh.data_parallel)
    # The rule `batch-ranks` refuses this mesh.
    if left:
        return []
    asked = spec.train.micro_batch_size
    sizes = divisors(share) if asked == "auto" else (asked,) if share % asked == 0 else ()
    return [size for size in sizes if can_run(pipeline, mesh.pp, share // size)]


def checkpointings(spec: JobSpec, mesh: Mesh, pipeline: PipelineSpec) -> tuple[Checkpointing, ...]:
    """The modes that `auto` may choose from, least recomputation first."""
    wish = spec.train.activation_checkpointing
    if wish != "auto":
        return (wish,)
    some: tuple[Checkpointing, ...] = ("every_k",) if spec.train.checkpoint_every else ()
    # The rule `zbv-selective` refuses it there, so `auto` must not choose it.
    if not splits_backward(mesh.pp, pipeline):
        some = ("elementwise", "selective", *some)
    if mesh.tp > 1:
        some = ("gathers", *some)
    return ("none", *some, "full")


class Kernels(NamedTuple):
    """How the operations of a layer are computed."""

    compile: bool
    float8: bool


def kernels(
    spec: JobSpec, shape: ModelShape, profile: Profile, mesh: Mesh, pipeline: PipelineSpec
) -> tuple[Kernels, ...]:
    """The ways that `auto` may choose from on devices of `profile`, the simplest first."""
    train = spec.train
    # On a CPU compilation takes longer than it saves, and it needs a C++ compiler. The rule
    # `zbv-compile` refuses it there.
    able = profile.device == "cuda" and not splits_backward(mesh.pp, pipeline)
    if train.float8 is True:
        return (Kernels(compile=True, float8=True),)
    compiles = (train.compile,) if train.compile != "auto" else (False, True) if able else (False,)
    found = [Kernels(compile=compile, float8=False) for compile in compiles]
    # The rules `float8-device`, `float8-adapters` and `float8-sides` refuse it otherwise.
    can = (
        "float8" in profile.flops
        and spec.model.lora is None
        and not uneven_for_float8(shape, mesh.tp)
    )
    if train.float8 == "auto" and True in compiles and can:
        found.append(Kernels(compile=True, float8=True))
    return tuple(found)


def chunkings(spec: JobSpec, tokens: int) -> tuple[int | Auto, ...]:
    """Chunks of the loss for a micro batch of `tokens` on a rank, the fastest first."""
    asked = spec.train.loss_chunks
    if asked != "auto":
        return (asked,)
    usual = chunks_of_loss("auto", tokens)
    return ("auto", *(tokens // size for size in SMALL_CHUNKS if tokens // size > usual))


def reshardings(spec: JobSpec, mesh: Mesh, pipeline: PipelineSpec) -> tuple[bool | int, ...]:
    """The values that `auto` may choose from, fewest gathers first."""
    fsdp = spec.parallel.fsdp
    # The user has chosen, or nothing is sharded.
    if fsdp.reshard_after_forward != "auto" or spec.parallel.data != "fsdp":
        return (fsdp.reshard,)
    # A single rank has nothing to gather. With several stages per rank, the schedule gathers and
    # frees whole stages itself.
    by_schedule = mesh.pp > 1 and pipeline.stages > 1
    return (True,) if mesh.dp_shard * mesh.cp == 1 or by_schedule else (False, True)


def reductions(
    spec: JobSpec, mesh: Mesh, pipeline: PipelineSpec, micro_batches: int
) -> tuple[Reduction, ...]:
    """The values of `reduce_gradients` that `auto` may choose from, least traffic first."""
    fsdp = spec.parallel.fsdp
    # The user has chosen, or both values do the same.
    same = mesh.dp_shard * mesh.cp == 1 or micro_batches == 1 or splits_backward(mesh.pp, pipeline)
    if fsdp.reduce_gradients != "auto" or spec.parallel.data != "fsdp" or same:
        return (fsdp.reduce,)
    return ("last", "each")
