"""Bytes per device at each ZeRO level, for two ways to store weights (Rajbhandari et al. 2020)."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from orchestrator.contract.spec.train_spec import OptimizerSpec
from orchestrator.contract.spec.types import Dtype
from orchestrator.plan.figures import show_traffic
from orchestrator.plan.memory.states import MOMENTS, ModelStates, PerParameter, model_states
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.show.tables import table, wrapped
from orchestrator.plan.sizes import COMPUTE_BYTES

LEVELS = (
    "ZeRO-0  ddp: nothing sharded",
    "ZeRO-1  optimizer states sharded",
    "ZeRO-2  and gradients sharded",
    "ZeRO-3  and weights sharded",
)


class ZeroTable(Struct, frozen=True, kw_only=True):
    model_type: str
    parameters: int
    devices: int
    optimizer: str
    state_dtype: Dtype = "float32"
    device_bytes: int | None

    @classmethod
    def of(
        cls, shape: ModelShape, devices: int, optimizer: OptimizerSpec, device_bytes: int | None
    ) -> "ZeroTable":
        return cls(
            model_type=shape.model_type,
            parameters=shape.parameters,
            devices=devices,
            optimizer=optimizer.name,
            state_dtype=optimizer.state_dtype,
            device_bytes=device_bytes,
        )

    @property
    def policies(self) -> Mapping[str, PerParameter]:
        """Bytes per weight, by how weights are stored; moments are the same for both."""
        moments = COMPUTE_BYTES[self.state_dtype] * MOMENTS[self.optimizer]
        return {
            "float32 weights and gradients (the trainer's)": PerParameter(
                weights=4, gradients=4, optimizer=moments
            ),
            "bfloat16 weights and gradients, float32 master weights": PerParameter(
                weights=2, gradients=2, master=4, optimizer=moments
            ),
            "bfloat16 weights and gradients, no master weights": PerParameter(
                weights=2, gradients=2, optimizer=moments
            ),
        }

    def levels(self, policy: str) -> list[ModelStates]:
        """Per device, at each level."""
        each = self.policies[policy]
        return [
            model_states(self.parameters, self.devices, level, each) for level in range(len(LEVELS))
        ]


def describe_zero(found: ZeroTable) -> str:
    head = ["", "weights", "gradients", "master", "moments", "total"]
    kind = "" if found.state_dtype == "float32" else f" with {found.state_dtype} moments"
    limit = f" of {show_traffic(found.device_bytes)}" if found.device_bytes else ""
    lines = [
        f"{found.model_type} with {found.parameters:,} parameters and {found.optimizer}{kind} on"
        f" {found.devices:,} devices{limit}: bytes per device"
    ]
    for policy, each in found.policies.items():
        rows = [
            [level, *map(show_traffic, states), _verdict(sum(states), found.device_bytes)]
            for level, states in zip(LEVELS, found.levels(policy), strict=True)
        ]
        lines += ["", policy, *table(head, rows), *_per_parameter(each, found.parameters)]
    lines += [
        "",
        "! more than a device has; GB are 1e9 bytes",
        "not counted: activations, gathered weights, buffers (ndctl plan counts them)",
    ]
    return "\n".join(lines)


def _per_parameter(each: PerParameter, parameters: int) -> list[str]:
    """Bytes of a parameter, and of those of them that a step keeps for the next one."""
    items = (each.weights, each.gradients, each.master, each.optimizer)
    kept = sum(items) - each.gradients
    said = (
        f"bytes per parameter: {' + '.join(map(str, items))} = {sum(items)}; without gradients, as"
        f" in a checkpoint: {kept}, {show_traffic(kept * parameters)} for the model"
    )
    return wrapped(said, "  ", "  ")


def _verdict(size: int, limit: int | None) -> str:
    return show_traffic(size) + (" !" if limit is not None and size > limit else "")


def zero_json(found: ZeroTable) -> dict[str, Any]:
    return {
        "parameters": found.parameters,
        "devices": found.devices,
        "policies": [
            {
                "policy": policy,
                "levels": [
                    {"zero": level, **states._asdict(), "total": sum(states)}
                    for level, states in enumerate(found.levels(policy))
                ],
            }
            for policy in found.policies
        ],
    }
