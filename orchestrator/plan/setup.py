"""A fully decided way to run a job: the input of the memory and cost models."""

import math
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.devices import CPU
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD
from orchestrator.contract.spec.train_spec import Checkpointing
from orchestrator.contract.spec.types import Auto, Dtype
from orchestrator.inventory.software import has_even_stages
from orchestrator.plan.model.shape import ModelShape

Reduction = Literal["each", "last"]


class Setup(Struct, frozen=True, kw_only=True):
    shape: ModelShape
    tokens: int
    """Tokens of a sequence."""
    document_tokens: int | None = None
    """Mean tokens of a document, if attention does not cross its end. None: unknown, or it does."""
    mesh: Mesh
    micro_batch_size: int
    """Sequences that a data-parallel rank passes through the model at once."""
    micro_batches: int
    """Micro batches of a rank per step (gradient accumulation)."""
    checkpointing: Checkpointing = "none"
    checkpoint_every: int | None = None
    """See `every`."""
    data: Literal["fsdp", "ddp", "zero1"] = "fsdp"
    reshard: bool | int = True
    """After the forward pass: true, false, or over this many ranks."""
    reduce: Reduction = "last"
    """See `reduces_each`."""
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    cpu_offload: bool = False
    context: Literal["ring", "ulysses", "all_gather"] = "ring"
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    dtype: Dtype = "bfloat16"
    """Type that the model computes in; master weights are always float32."""
    reduce_dtype: Dtype = "float32"
    output_dtype: Dtype | None = None
    optimizer: str = "adamw"
    state_dtype: Dtype = "float32"
    """Of the optimizer's moments."""
    loss_chunks: int | Auto = "auto"
    compile: bool = False
    compiles_recomputation: bool = False
    """Whole layers are also recomputed by compiled code under tp, which leaves out what no gradient
    needs. The trainer cannot (`trainer/parallel/compile.py`)."""
    even_stages: bool = False
    """All stages of a pipeline have as many layers, as in Megatron. The trainer gives the stage
    with the head fewer (`contract/spec/pipeline_spec.py`)."""
    float8: bool = False
    lora: LoraSpec | None = None
    host_slots: int = 0
    """Checkpoints that a host keeps in its memory for each of its ranks (`checkpoint.memory`)."""

    @property
    def global_batch_size(self) -> int:
        """Sequences per step."""
        return self.mesh.data_parallel * self.micro_batch_size * self.micro_batches

    @property
    def reduces_each(self) -> bool:
        """Each of several micro batches reduce-scatters its gradients."""
        splits = self.mesh.pp > 1 and self.pipeline.schedule == SPLITS_BACKWARD
        shards = self.mesh.dp_shard * self.mesh.cp
        several = self.data == "fsdp" and self.micro_batches > 1 and shards > 1
        return several and self.reduce == "each" and not splits

    @property
    def tokens_of_step(self) -> int:
        return self.global_batch_size * self.tokens


def every(setup: Setup) -> int:
    """The k of `every_k`: √L, rounded, by default (Chen et al. 2016, section 4)."""
    return setup.checkpoint_every or max(1, round(math.sqrt(setup.shape.num_layers)))


def setup_of(
    spec: JobSpec | TrainingConfig,
    shape: ModelShape,
    mesh: Mesh,
    micro: int,
    kind: Checkpointing,
    pipeline: PipelineSpec | None = None,
) -> Setup:
    """The setup for `spec` with all open keys decided. `pipeline` defaults to that of the spec.
    `compile` and `float8` are off if they are `auto`."""
    train, parallel, fsdp = spec.train, spec.parallel, spec.parallel.fsdp
    return Setup(
        shape=shape,
        tokens=spec.data.sequence_length,
        document_tokens=spec.data.document_tokens if spec.data.masks_documents else None,
        mesh=mesh,
        micro_batch_size=micro,
        micro_batches=max(1, train.global_batch_size // (mesh.data_parallel * micro)),
        checkpointing=kind,
        checkpoint_every=train.checkpoint_every,
        data=parallel.data,
        reshard=fsdp.reshard,
        reduce=fsdp.reduce,
        forward_prefetch=fsdp.forward_prefetch,
        backward_prefetch=fsdp.backward_prefetch,
        cpu_offload=fsdp.cpu_offload,
        context=parallel.context,
        pipeline=pipeline or parallel.pipeline,
        dtype=train.compute_dtype,
        reduce_dtype=train.reduce_dtype,
        output_dtype=train.output_dtype,
        optimizer=train.optimizer.name,
        state_dtype=train.optimizer.state_dtype,
        loss_chunks=train.loss_chunks,
        compile=train.compile is True,
        float8=train.float8 is True,
        lora=spec.model.lora,
        host_slots=_host_slots(spec),
    )


def _host_slots(spec: JobSpec | TrainingConfig) -> int:
    memory = spec.checkpoint.memory
    if isinstance(spec, JobSpec):
        memory = memory.on_hosts(spec.cluster.hosts)
    return memory.slots


def setup_of_plan(spec: JobSpec, plan: Plan, shape: ModelShape) -> Setup:
    """The setup that `plan` decided for `spec`."""
    assert plan.micro_batch_size is not None
    assert plan.work is not None
    memory = spec.checkpoint.memory.on_devices(cpu=plan.profile == CPU)
    known = replace(
        spec,
        train=replace(spec.train, dtype=plan.work.dtype),
        checkpoint=replace(spec.checkpoint, memory=memory),
    )
    decided = setup_of(
        known, shape, plan.mesh, plan.micro_batch_size, plan.activation_checkpointing, plan.pipeline
    )
    decided = replace(
        decided,
        compile=plan.compile,
        float8=plan.float8,
        loss_chunks=plan.loss_chunks,
        even_stages=plan.software is not None and has_even_stages(plan.software),
    )
    if spec.parallel.data != "fsdp":
        return decided
    return replace(decided, reshard=plan.reshard_after_forward, reduce=plan.reduce_gradients)
