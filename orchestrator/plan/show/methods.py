"""How each axis in use is parallelised, for a person."""

from collections.abc import Mapping

from orchestrator.contract.plan import StepTime
from orchestrator.plan.setup import Setup
from orchestrator.plan.stages import STAGES_AT_ONCE, bubble


def methods_of(setup: Setup, time: StepTime) -> Mapping[str, str]:
    """Keys: `pipeline`, `data`, `context`, `tensor`, `kernels` and `adapters`, where used."""
    mesh, lora = setup.mesh, setup.lora
    methods = {}
    if mesh.pp > 1:
        methods["pipeline"] = _pipeline(setup, time)
    if mesh.data_parallel * mesh.cp > 1:
        methods["data"] = _data(setup)
    if mesh.cp > 1:
        methods["context"] = setup.context
    if mesh.tp > 1:
        methods["tensor"] = "sequence parallel, loss computed on parts of the vocabulary"
    if kernels := _kernels(setup):
        methods["kernels"] = kernels
    if lora is not None:
        quantized = f", frozen weights in {lora.quantize}" if lora.quantize != "none" else ""
        methods["adapters"] = (
            f"LoRA of rank {lora.rank} on {', '.join(lora.target_modules)}{quantized}"
        )
    return methods


def _kernels(setup: Setup) -> str:
    """What differs from one eager kernel per operation."""
    said = []
    if setup.compile:
        said.append("layers compiled (torch.compile)")
    if setup.float8:
        said.append("products of layers in float8")
    if setup.loss_chunks != "auto":
        said.append(f"head and loss in {setup.loss_chunks} chunks")
    return ", ".join(said)


def _pipeline(setup: Setup, time: StepTime) -> str:
    pipeline = setup.pipeline
    stages = f"{pipeline.stages} stage{'s' if pipeline.stages > 1 else ''} per rank"
    waits = f"bubble {time.bubble:.1%} of the step"
    ideal = bubble(pipeline, setup.mesh.pp, setup.micro_batches)
    if ideal is not None:
        # The step also has the update, and stages differ.
        waits += f" ({ideal:.1%} if it were equal passes alone)"
    return f"{pipeline.schedule}, {stages}, {setup.micro_batches} micro batches, {waits}"


def _data(setup: Setup) -> str:
    match setup.data:
        case "ddp":
            return "ddp: everything replicated"
        case "zero1":
            return "zero1: everything replicated except optimizer state"
        case "fsdp":
            return f"{'hsdp' if setup.mesh.dp_replicate > 1 else 'fsdp'}: {_fsdp(setup)}"


def _fsdp(setup: Setup) -> str:
    match setup.reshard:
        case _ if setup.mesh.dp_shard * setup.mesh.cp == 1:
            said = "everything replicated, gradients averaged layer by layer"
        case _ if setup.mesh.pp > 1 and setup.pipeline.stages > 1:
            said = "weights of whole stages stay gathered during a step"
            if setup.pipeline.stages > STAGES_AT_ONCE:
                said = f"weights gathered a whole stage at a time, {STAGES_AT_ONCE} at once"
        case True:
            said = "weights gathered layer by layer (ZeRO-3)"
        case False:
            said = "weights stay gathered from forward to backward (ZeRO-2)"
        case ranks:
            said = f"weights sharded over {ranks} ranks from forward to backward"
    if setup.reduces_each:
        said += ", gradients reduced with each micro batch"
    return f"{said}, offloaded to the host's memory" if setup.cpu_offload else said
