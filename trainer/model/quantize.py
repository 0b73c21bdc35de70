"""Frozen weights in 4 bits under adapters (QLoRA, Dettmers et al. 2023), through torchao's NF4.

Each element takes 4 bits, plus 8 bits per 64 elements (their scale) and 32 bits per 16384 elements
(the scale of the scales): 4.13 bits instead of 32.

The model is built and sharded without storage. `quantise` replaces weights by empty 4-bit weights,
FSDP shards them like any other, and `fill_quantised` computes their values. Only a whole weight can
be quantised, so this goes layer by layer: at most one layer is in full precision at a time.
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
"""Elements per scale, and scales per second-level scale: the defaults of torchao and QLoRA."""
UNIT = BLOCK * SCALER_BLOCK
LEVELS = 16
PARTS = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")
"""The tensors inside an NF4 weight. The first three are sharded with it."""


class FullPrecisionWeights:
    """Unsharded weights of one decoder layer in full precision, before they are quantised."""

    def __init__(self, config: PretrainedConfig, weights: Mapping[str, nn.Parameter]) -> None:
        self.config = config
        self._weights = weights

    def plain_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._weights.items()


def quantise(decoder: Decoder, shards: int, device: torch.device) -> None:
    """Replace the frozen linear weights of the layers, on the meta device, by empty NF4 weights.

    Raises:
        TrainingError: torchao is not installed, or a weight cannot be split into `shards`.
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
    """Quantise the weights layer by layer. `fill` writes the full-precision values of a layer."""
    parameters = dict(decoder.quantised_parameters())
    for number in decoder.layers:
        prefix = f"{decoder.family.layers}.{number}."
        whole = {
            name: nn.Parameter(_empty_whole(parameter), requires_grad=False)
            for name, parameter in parameters.items()
            if name.startswith(prefix)
        }
        fill(FullPrecisionWeights(decoder.config, whole))
        for name, weight in whole.items():
            _write(parameters[name], _nf4().to_nf4(weight.detach(), BLOCK, SCALER_BLOCK))


def unsharded(decoder: Decoder, shards: int) -> set[nn.Parameter]:
    """The weights that FSDP must ignore.

    With one shard there is nothing to gather, and FSDP (torch 2.13) would fail, because it gathers
    only the first tensor of an NF4 weight.
    """
    return {p for _, p in decoder.quantised_parameters()} if shards == 1 else set()


def _check(linears: Mapping[str, nn.Linear], shards: int) -> None:
    if not linears:
        raise TrainingError(
            "model.lora.quantize: nf4: the model has no linear layer that can be quantised",
            fix="set model.lora.quantize to none",
        )
    uneven = [
        f"{name} {tuple(linear.weight.shape)}"
        for name, linear in linears.items()
        if linear.weight.shape[0] % shards or linear.weight.numel() % (UNIT * shards)
    ]
    if uneven:
        raise TrainingError(
            f"model.lora.quantize: nf4 needs weights that {shards} ranks can split evenly into"
            f" blocks of {UNIT} elements; wrong: {listed(uneven)}",
            fix="use fewer ranks for dp_shard x cp and more for dp_replicate, or quantize: none",
        )


def _empty_nf4(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """An NF4 weight on the meta device, except the two tensors that FSDP does not shard."""
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
    # Not `to_local()`: it returns another object with its own tensors.
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
