"""Warnings about a spec that is valid."""

from collections.abc import Iterator

from orchestrator.app.submission.secret_warnings import secret_warnings
from orchestrator.contract.devices import CPU
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import CommonSpec, JobSpec


def spec_warnings(spec: CommonSpec, plan: Plan | None = None) -> Iterator[str]:
    """Secrets in plain text, and settings that few users want. Without a plan, those that depend on
    the devices are left out."""
    yield from secret_warnings(spec)
    if isinstance(spec, JobSpec):
        yield from _packed_answers(spec)
        if plan is not None:
            yield from _slow_products(spec, plan)


def _slow_products(spec: JobSpec, plan: Plan) -> Iterator[str]:
    if spec.train.dtype == "float32" and plan.profile not in (None, CPU):
        yield (
            f"train.dtype=float32 on {plan.profile}: the trainer does not use TF32, so matrix"
            " products run many times slower than in bfloat16\n"
            "  fix: remove train.dtype, or set it to bfloat16"
        )


def _packed_answers(spec: JobSpec) -> Iterator[str]:
    data = spec.data
    if data.prompt_column is not None:
        yield (
            f"data.prompt_column={data.prompt_column}: prompts and answers are packed into"
            f" sequences of {data.sequence_length:,} tokens without masks between documents. An"
            " answer also attends to the prompts and answers before it in its sequence, and the end"
            " of a sequence may cut an answer"
        )
