"""Float8 matrix products in linear layers, through torchao, on Hopper GPUs and newer.

Weights, gradients and optimizer state keep their types. Both factors of each product are scaled to
float8 by their largest value. Embedding, head and norms are unchanged. FSDP gathers the weights in
float8, which is a quarter of the bytes.
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
"""Float8 products need both sides of a rank's part of a weight to be multiples of this."""


def apply_float8(decoder: Decoder, device: torch.device, config: TrainingConfig) -> None:
    """Convert the linear layers of the decoder layers, which are on the meta device, to float8.

    Raises:
        TrainingError: `device` does not support float8, a weight has an unsuitable shape, or
            torchao is not installed.
    """
    _check_device(device)
    convert(decoder, config)


def convert(decoder: Decoder, config: TrainingConfig, *, emulate: bool = False) -> None:
    """`apply_float8` without the check of the device. With `emulate`, the factors are rounded to
    float8 but multiplied in their own type, which works on any device."""
    shapes = {name: linear.weight.shape for name, linear in _linears(decoder)}
    _check_shapes(shapes, config.mesh.tp)
    float8 = _torchao()
    settings = float8.Float8LinearConfig(
        enable_fsdp_float8_all_gather=_gather_in_float8(shapes, config), emulate=emulate
    )
    for layer in decoder.layers.values():
        float8.convert_to_float8_training(layer, config=settings)


def scale_after_steps(stages: Sequence[Decoder], optimizer: torch.optim.Optimizer) -> None:
    """Compute the float8 scales of all gathered weights after each step of `optimizer`, with one
    collective, instead of one collective per weight at each gather."""
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
            "train.float8: the model has no linear layer that can use float8",
            fix="set train.float8 to false",
        )
    multiple = MULTIPLE * tp
    uneven = [f"{n} {tuple(s)}" for n, s in shapes.items() if any(side % multiple for side in s)]
    if uneven:
        raise TrainingError(
            f"train.float8 needs weights whose sides are multiples of {multiple} (16 x tp); wrong:"
            f" {listed(uneven)}",
            fix="change hidden_size, head_dim or intermediate_size, or set train.float8 to false",
        )


def _gather_in_float8(shapes: Mapping[str, torch.Size], config: TrainingConfig) -> bool:
    """Whether FSDP can gather the weights in float8.

    It must gather them at all. It cannot shard torchao's float8 weights unevenly or reshard them to
    fewer ranks after the forward pass. Offloaded weights get their scales on the device.
    """
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
