"""Linear layers that multiply in float8, through torchao: on Hopper GPUs and newer.

Weights, their gradients and the optimizer stay as they are; each product's two factors are scaled
to float8 by their largest value. Embedding, head and norms compute as before. Under FSDP the
weights travel in float8 too, at a quarter of their size.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.errors import TrainingError
from trainer.listing import listed
from trainer.model.decoder import Decoder

HOPPER = (9, 0)
"""Compute capability."""
MULTIPLE = 16
"""What float8 matrix products need both sides of a rank's part of a weight to be a multiple of."""


def apply_float8(decoder: Decoder, device: torch.device, config: TrainingConfig) -> None:
    """Let the linear layers inside the decoder layers, on the meta device, multiply in float8.

    Raises:
        TrainingError: when `device` cannot do that, a weight's shape does not fit, or torchao is
            not installed.
    """
    _check_device(device)
    convert(decoder, config)


def convert(decoder: Decoder, config: TrainingConfig, *, emulate: bool = False) -> None:
    """As `apply_float8`; with `emulate` factors are rounded to float8 and multiplied in the type
    that they had, which any device can."""
    shapes = {name: linear.weight.shape for name, linear in _linears(decoder)}
    _check_shapes(shapes, config.mesh.tp)
    float8 = _torchao()
    settings = float8.Float8LinearConfig(
        enable_fsdp_float8_all_gather=_gather_in_float8(shapes, config), emulate=emulate
    )
    for layer in decoder.layers.values():
        float8.convert_to_float8_training(layer, config=settings)


def scale_after_steps(stages: Sequence[Decoder], optimizer: torch.optim.Optimizer) -> None:
    """Scale the weights that are gathered in float8 once, after each step of `optimizer`: with one
    collective for all, instead of one for each weight when it is gathered."""
    float8 = _torchao()

    def scale(*_: Any) -> None:
        for stage in stages:
            float8.precompute_float8_dynamic_scale_for_fsdp(stage)

    optimizer.register_step_post_hook(scale)


def _linears(decoder: Decoder) -> list[tuple[str, nn.Linear]]:
    return [
        (f"{number}.{name}", module)
        for number, layer in decoder.layers.items()
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        name = device.type
    elif torch.cuda.get_device_capability(device) < HOPPER:
        name = torch.cuda.get_device_name(device)
    else:
        return
    raise TrainingError(
        f"train.float8 needs an NVIDIA GPU, Hopper or newer, and this device is {name}",
        fix="set train.float8 to false",
    )


def _check_shapes(shapes: Mapping[str, torch.Size], tp: int) -> None:
    if not shapes:
        raise TrainingError(
            "train.float8 finds no linear layer in this model that it can change",
            fix="set train.float8 to false",
        )
    multiple = MULTIPLE * tp
    uneven = [f"{n} {tuple(s)}" for n, s in shapes.items() if any(side % multiple for side in s)]
    if uneven:
        raise TrainingError(
            f"train.float8 needs weights whose sides are multiples of {multiple} (16 x tp); these"
            f" are not: {listed(uneven)}",
            fix="change hidden_size, head_dim or intermediate_size, or set train.float8 to false",
        )


def _gather_in_float8(shapes: Mapping[str, torch.Size], config: TrainingConfig) -> bool:
    """Where weights are gathered at all. FSDP can shard what torchao puts in their place neither
    unevenly nor again after the forward pass; and offloaded weights are scaled on the device."""
    parallel, shards = config.parallel, config.mesh.dp_shard * config.mesh.cp
    return (
        parallel.data == "fsdp"
        and shards > 1
        and not parallel.fsdp.cpu_offload
        and isinstance(parallel.fsdp.reshard, bool)
        and not any(shape[0] % (shards * config.mesh.tp) for shape in shapes.values())
    )


def _torchao() -> Any:
    try:
        return import_module("torchao.float8")
    except ImportError as exc:
        raise TrainingError(
            f"train.float8 needs the package torchao, which cannot be imported ({exc})",
            fix="pip install ndctl[quantize]",
        ) from exc
