"""Creates the trainer's configuration for a plan."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict, replace

from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import JobSpec


def trainer_config(
    spec: JobSpec, plan: Plan, config: Mapping[str, Any], out: str
) -> TrainingConfig:
    """The trainer's configuration, with the plan's value for each `auto` and the model's config
    inline.

    The trainer decides `auto` itself for data formats, module classes, the number format, the usual
    chunks of the loss and steps that run ahead.
    """
    assert plan.micro_batch_size is not None
    fsdp, limits = spec.parallel.fsdp, spec.resilience
    given = (limits.init_timeout, limits.checkpoint_timeout, limits.hang_timeout)
    if spec.parallel.data == "fsdp":
        if fsdp.reshard_after_forward == "auto":
            fsdp = replace(fsdp, reshard_after_forward=plan.reshard_after_forward)
        if fsdp.reduce_gradients == "auto":
            fsdp = replace(fsdp, reduce_gradients=plan.reduce_gradients)
    return TrainingConfig(
        model=replace(spec.model, preset=None, config=dict(config), path=None),
        data=replace(spec.data, document_mask=spec.data.masks_documents),
        train=replace(
            spec.train,
            micro_batch_size=plan.micro_batch_size,
            activation_checkpointing=plan.activation_checkpointing,
            compile=plan.compile,
            float8=plan.float8,
            loss_chunks=plan.loss_chunks,
        ),
        checkpoint=spec.checkpoint,
        parallel=replace(spec.parallel, fsdp=fsdp, pipeline=plan.pipeline, **asdict(plan.mesh)),
        micro_batch_size=plan.micro_batch_size,
        pause_s=max((limit for limit in given if limit != "auto"), default=0.0),
        out=out,
    )
