"""What a person should know of how a plan came about."""

from collections.abc import Iterator

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec import JobSpec
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.degrees import tensor_split
from orchestrator.plan.stages import bubble

IDLE = 0.25
"""Share of a step that ranks of a pipeline wait, above which it is worth a note."""


def notes_of_split(spec: JobSpec, shape: ModelShape, mesh: Mesh) -> Iterator[str]:
    if spec.parallel.tp == "auto":
        yield _why_tp(spec, shape, mesh)
    if spec.parallel.dp_shard == "auto" and spec.parallel.data == "fsdp":
        yield f"dp_shard={mesh.dp_shard} (auto): the ranks that the other axes leave"
    yield from _across_hosts(spec, mesh)
    if spec.data.tokenizer != "bytes":
        yield (
            f"data.tokenizer={spec.data.tokenizer}: whether its tokens are within the model's"
            f" vocabulary of {shape.vocab_size} is seen when the ranks start"
        )


def _why_tp(spec: JobSpec, shape: ModelShape, mesh: Mesh) -> str:
    if shape.fused:
        return f"tp={mesh.tp} (auto): the projections of {shape.model_type} are fused"
    if spec.train.compile:
        return f"tp={mesh.tp} (auto): compile works without tensor parallel alone"
    parts = ", ".join(f"{size} {what}" for what, size in tensor_split(spec, shape).items())
    return (
        f"tp={mesh.tp} (auto): the largest degree that divides the"
        f" {spec.cluster.gpus_per_host} ranks of a host, {parts}"
    )


def _across_hosts(spec: JobSpec, mesh: Mesh) -> Iterator[str]:
    """Axes outside tp whose ranks are on several hosts, with what then goes between these."""
    ranks = spec.cluster.gpus_per_host
    if mesh.cp > 1 and ranks % (mesh.tp * mesh.cp):
        yield (
            f"cp={mesh.cp}: its groups span hosts, between which keys and values go in every layer;"
            f" they stay inside where tp x cp divides the {ranks} ranks of a host"
        )
    if mesh.pp > 1 and spec.cluster.hosts > 1:
        yield (
            f"pp={mesh.pp}: its stages are on different hosts, between which the hidden states of"
            " each micro batch go and their gradients come back"
        )


def notes_of_batch(spec: JobSpec, mesh: Mesh, micro: int, kind: str, bound: str) -> Iterator[str]:
    """`bound` says what the estimate is held against."""
    if spec.train.activation_checkpointing == "auto":
        yield f"activation_checkpointing={kind} (auto): the least that keeps {bound}"
    share = spec.train.global_batch_size // mesh.data_parallel
    if spec.train.micro_batch_size == "auto":
        filling = _filling(spec, mesh, share // micro)
        yield (
            f"micro_batch_size={micro} (auto): the largest divisor of the {share} sequences of a"
            f" data-parallel rank that {filling}keeps {bound}"
        )
    idle = bubble(spec.parallel.pipeline, mesh.pp, share // micro)
    if idle is not None and idle > IDLE:
        yield (
            f"pp={mesh.pp}: with {share // micro} micro batches a step its ranks wait about"
            f" {idle:.0%} of the time; a larger train.global_batch_size shortens that"
        )


def _filling(spec: JobSpec, mesh: Mesh, micro_batches: int) -> str:
    if mesh.pp == 1:
        return ""
    for least in (2 * mesh.pp, mesh.pp):
        if micro_batches >= least:
            return f"makes {least} or more micro batches for pp={mesh.pp} and "
    return f"{spec.parallel.pipeline.schedule} can do with pp={mesh.pp} and "
