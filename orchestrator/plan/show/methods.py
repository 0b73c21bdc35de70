"""The method of every axis in use, in words."""

from collections.abc import Mapping

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec import JobSpec
from orchestrator.plan.stages import bubble


def methods_of(spec: JobSpec, mesh: Mesh, micro_batches: int) -> Mapping[str, str]:
    """Of a plan with so many micro batches a step; keys are `pipeline`, `data`, `context`, `tensor`
    and `adapters`, each there where it is used."""
    wish, lora = spec.parallel, spec.model.lora
    methods = {}
    if mesh.pp > 1:
        methods["pipeline"] = _pipeline(spec, mesh, micro_batches)
    if mesh.data_parallel * mesh.cp > 1:
        methods["data"] = _data(spec, mesh)
    if mesh.cp > 1:
        methods["context"] = wish.context
    if mesh.tp > 1:
        methods["tensor"] = "with sequence parallel and a loss over parts of the vocabulary"
    if lora is not None:
        quantized = f", the frozen weights in {lora.quantize}" if lora.quantize != "none" else ""
        methods["adapters"] = (
            f"lora of rank {lora.rank} on {', '.join(lora.target_modules)}{quantized}"
        )
    return methods


def _pipeline(spec: JobSpec, mesh: Mesh, micro_batches: int) -> str:
    pipeline = spec.parallel.pipeline
    stages = f"{pipeline.stages} stage{'s' if pipeline.stages > 1 else ''} a rank"
    idle = bubble(pipeline, mesh.pp, micro_batches)
    waits = f", ranks wait about {idle:.0%}" if idle is not None else ""
    return f"{pipeline.schedule}, {stages}, {micro_batches} micro batches{waits}"


def _data(spec: JobSpec, mesh: Mesh) -> str:
    match spec.parallel.data:
        case "ddp":
            return "ddp: everything copied"
        case "zero1":
            return "zero1: everything copied but the optimizer's state"
        case "fsdp":
            return f"{'hsdp' if mesh.dp_replicate > 1 else 'fsdp'}: {_fsdp(spec, mesh)}"


def _fsdp(spec: JobSpec, mesh: Mesh) -> str:
    fsdp = spec.parallel.fsdp
    match fsdp.reshard_after_forward:
        case _ if mesh.pp > 1 and spec.parallel.pipeline.stages > 1:
            said = "weights of whole stages stay gathered within a step"
        case True:
            said = "weights gathered layer by layer (ZeRO-3)"
        case False:
            said = "weights stay gathered from forward to backward (ZeRO-2)"
        case ranks:
            said = f"weights sharded over {ranks} ranks from forward to backward"
    return f"{said}, offloaded to the host's memory" if fsdp.cpu_offload else said
