"""Changed values of a spec, which a refusal proposes as `--set KEY=VALUE`."""

from collections.abc import Mapping
from shlex import quote
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.mesh import AXES
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_spec import LoraSpec

Value = int | str | bool | tuple[str, ...] | LoraSpec
Edits = Mapping[str, Value]
"""Path of a key, as in `parallel.tp`, to its new value."""


def apply(spec: JobSpec, edits: Edits) -> JobSpec:
    """`spec` with other values at paths of the form `section.key`, or deeper.

    Raises:
        Invalid: the new values exclude each other or unchanged values.
    """
    changed: JobSpec = _changed_value(spec, {tuple(p.split(".")): v for p, v in edits.items()})
    return changed


def _changed_value(value: Any, edits: Mapping[tuple[str, ...], Value]) -> Any:
    """Changes all keys of one value at once, because `__post_init__` checks the combination."""
    inside: dict[str, dict[tuple[str, ...], Value]] = {}
    for (key, *rest), new in edits.items():
        inside.setdefault(key, {})[tuple(rest)] = new
    return replace(
        value,
        **{
            # An empty rest of the path means that the whole value is replaced.
            key: deeper[()] if () in deeper else _changed_value(getattr(value, key), deeper)
            for key, deeper in inside.items()
        },
    )


def value_at(spec: JobSpec, path: str) -> Any:
    value: Any = spec
    for key in path.split("."):
        value = getattr(value, key)
    return value


def free_keys(spec: JobSpec) -> dict[str, Value]:
    """The keys that `spec` fixes although a planner could choose them, with the value that leaves
    them to the planner. None of them changes what is computed."""
    values: dict[str, Value] = {
        "train.activation_checkpointing": "auto",
        "train.micro_batch_size": "auto",
        "train.loss_chunks": "auto",
        "parallel.pipeline.schedule": "auto",
        "parallel.pipeline.stages_per_rank": "auto",
        **{f"parallel.{axis}": "auto" for axis in AXES},
    }
    if spec.parallel.data == "fsdp":
        values["parallel.fsdp.reshard_after_forward"] = "auto"
        values["parallel.fsdp.reduce_gradients"] = "auto"
    else:
        # DDP and ZeRO-1 keep whole weights on each rank, so sharding saves the most.
        values["parallel.data"] = "fsdp"
    return {path: value for path, value in values.items() if value_at(spec, path) != value}


def show_edits(edits: Edits) -> str:
    """The edits as command line options."""
    return " ".join(
        f"--set {quote(f'{path}={show_value(value)}')}" for path, value in edits.items()
    )


def show_value(value: Value) -> str:
    """A value as it is typed."""
    if isinstance(value, LoraSpec):
        return "{quantize: nf4}" if value.quantize == "nf4" else "{}"
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
