"""Frozen weights in 4 bits under adapters (QLoRA, Dettmers et al. 2023), through torchao's NF4.

A weight takes 4 bits an element, 8 for every 64 (their scale) and 32 for every 16384 (the scale of
the scales): 4.13 bits instead of 32.

The model is built and sharded without storage, and so are its 4-bit weights: `quantise` puts empty
ones in, FSDP shards them as it does any other, and `fill_quantised` gives them their values, one
layer at a time, since only a whole weight can be quantised: never more than one layer is held in
full precision.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig

from orchestrator.errors import TrainingError
from trainer.listing import listed
from trainer.model.decoder import Decoder, NamedWeights, is_adapter

BLOCK, SCALER_BLOCK = 64, 256
"""Elements that share a scale, and scales that share one: the defaults of torchao and of QLoRA."""
UNIT = BLOCK * SCALER_BLOCK
LEVELS = 16
PARTS = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")
"""The tensors that an NF4 weight is made of; the first three are sharded with it."""


class Whole:
    """Whole weights of a decoder in full precision, for a moment."""

    def __init__(self, config: PretrainedConfig, weights: Mapping[str, nn.Parameter]) -> None:
        self.config = config
        self._weights = weights

    def plain_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._weights.items()


def quantise(decoder: Decoder, shards: int, device: torch.device) -> None:
    """Turn the frozen linear weights of the layers, which are on the meta device, into NF4 ones.

    Raises:
        TrainingError: when torchao is not installed, or a weight cannot be cut into `shards`.
    """
    linears = {
        f"{name}.weight": module
        for name, module in decoder.named_modules()
        if name.startswith(f"{decoder.family.layers}.")
        and isinstance(module, nn.Linear)
        and not is_adapter(f"{name}.")
    }
    _check(linears, shards)
    for linear in linears.values():
        linear.weight = nn.Parameter(_empty_nf4(linear.weight.shape, device), requires_grad=False)
    weights = {id(linear.weight) for linear in linears.values()}
    decoder.quantised = frozenset(
        name for name, parameter in decoder.plain_parameters() if id(parameter) in weights
    )


def fill_quantised(decoder: Decoder, fill: Callable[[NamedWeights], None]) -> None:
    """Give the 4-bit weights their values: `fill` writes them to whole tensors, layer by layer."""
    parameters = dict(decoder.quantised_parameters())
    for number in decoder.layers:
        prefix = f"{decoder.family.layers}.{number}."
        whole = {
            name: nn.Parameter(_empty_whole(parameter), requires_grad=False)
            for name, parameter in parameters.items()
            if name.startswith(prefix)
        }
        fill(Whole(decoder.config, whole))
        for name, weight in whole.items():
            _write(parameters[name], _nf4().to_nf4(weight.detach(), BLOCK, SCALER_BLOCK))


def unsharded(decoder: Decoder, shards: int) -> set[nn.Parameter]:
    """The weights that FSDP has to leave alone.

    On one shard FSDP (torch 2.13) gathers the first part of an NF4 weight alone, and fails; and
    there is nothing to gather.
    """
    return {p for _, p in decoder.quantised_parameters()} if shards == 1 else set()


def _check(linears: Mapping[str, nn.Linear], shards: int) -> None:
    if not linears:
        raise TrainingError(
            "model.lora.quantize: nf4 finds no linear layer in this model that it can quantise",
            fix="set model.lora.quantize to none",
        )
    uneven = [
        f"{name} {tuple(linear.weight.shape)}"
        for name, linear in linears.items()
        if linear.weight.shape[0] % shards or linear.weight.numel() % (UNIT * shards)
    ]
    if uneven:
        raise TrainingError(
            f"model.lora.quantize: nf4 cuts weights into blocks of {UNIT} elements, which"
            f" {shards} ranks cannot share evenly of {listed(uneven)}",
            fix="use fewer ranks for dp_shard x cp and more for dp_replicate, or quantize: none",
        )


def _empty_nf4(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """An NF4 weight on the meta device, but for the two tensors that FSDP does not shard."""
    nf4 = _nf4()
    meta = torch.device("meta")
    blocks = shape.numel() // BLOCK
    values = nf4.SubclassTensorArgs(shape, (shape[1], 1), 0, torch.float32, meta, False)
    return nf4.NF4Tensor(
        values,
        BLOCK,
        blocks,
        SCALER_BLOCK,
        torch.empty(blocks, dtype=torch.int8, device=meta),
        torch.empty(blocks // SCALER_BLOCK, device=meta),
        torch.empty((), device=device),
        torch.empty(shape.numel() // 2, dtype=torch.uint8, device=meta),
        torch.empty(LEVELS, device=device),
    )


def _empty_whole(parameter: nn.Parameter) -> torch.Tensor:
    return torch.empty(parameter.shape, device=_local(parameter).scaler_mean.device)


def _local(parameter: nn.Parameter) -> Any:
    # Not `to_local`: the view that it returns is another object with tensors of its own.
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _write(parameter: nn.Parameter, whole: Any) -> None:
    part = whole
    if isinstance(parameter, DTensor):
        for place, size, coordinate in zip(
            parameter.placements,
            parameter.device_mesh.shape,
            parameter.device_mesh.get_coordinate() or (),
            strict=True,
        ):
            if isinstance(place, Shard):
                part = torch.chunk(part, size)[coordinate]
    for name in PARTS:
        getattr(_local(parameter), name).copy_(getattr(part, name))


def _nf4() -> Any:
    try:
        return import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    except ImportError as exc:
        raise TrainingError(
            "model.lora.quantize: nf4 needs the package torchao 0.18 or newer, which cannot be"
            f" imported ({exc})",
            fix="pip install ndctl[quantize]",
        ) from exc
