"""Context parallel: sequences are split over the ranks of axis cp; attention covers all of them.

Only attention combines tokens, so the other modules need just the positions of a rank's tokens.
Each method has its own file: `ring`, `ulysses` and `gather`.

torch's own context parallel (torch.distributed.tensor.experimental) is not used. In torch 2.13 it
has no kernel for CPUs ("aten._scaled_dot_product_flash_attention_for_cpu does not have a sharding
strategy"), where each axis is compared with one process, and no Ulysses. It takes flash, efficient
or cuDNN attention on GPUs; so does `kernels`.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from orchestrator.contract.mesh import Mesh
from orchestrator.errors import TrainingError
from trainer.model.attention import Attend, attend_with
from trainer.model.decoder import Decoder
from trainer.parallel.context.gather import gathered_attention
from trainer.parallel.context.operator import attend_with_operator
from trainer.parallel.context.ring import ring_attention
from trainer.parallel.context.ulysses import ulysses_attention

Method = Literal["ring", "ulysses", "all_gather"]

DROPOUTS = ("attention_dropout", "attn_pdrop")


def apply_context_parallel(decoder: Decoder, cp: DeviceMesh, method: Method) -> None:
    """Make each layer attend to the tokens of all ranks of `cp`."""
    attend = attention_over(cp.get_group(), method)
    for layer in decoder.layers.values():
        attend_with(layer.get_submodule(decoder.family.attention), attend)


def attention_over(group: ProcessGroup, method: Method) -> Attend:
    match method:
        case "ring":
            return attend_with_operator(ring_attention, group)
        case "all_gather":
            return attend_with_operator(gathered_attention, group)
        case "ulysses":
            return ulysses_attention(group)


def local_positions(sequence_length: int, method: Method, cp: int, cp_rank: int) -> torch.Tensor:
    """The positions of this rank's tokens in the sequence, in their order in its tensors."""
    if cp == 1 or method == "ulysses":
        return _piece(sequence_length // cp, cp_rank)
    # Later tokens attend to more keys, so each rank gets an early and a late chunk (zigzag).
    chunk = sequence_length // (2 * cp)
    return torch.cat([_piece(chunk, cp_rank), _piece(chunk, 2 * cp - 1 - cp_rank)])


def _piece(length: int, number: int) -> torch.Tensor:
    return torch.arange(number * length, (number + 1) * length)


def check_context_parallel(
    config: PretrainedConfig, method: Method, mesh: Mesh, sequence_length: int
) -> None:
    """Raises TrainingError with all reasons why sequences cannot be split over mesh.cp."""
    if mesh.cp == 1:
        return
    reasons = [
        *_uneven_tokens(method, mesh, sequence_length),
        *_uneven_heads(config, method, mesh),
        *_dropout(config),
    ]
    if reasons:
        raise TrainingError(
            f"parallel.cp={mesh.cp} with context: {method} is not possible: "
            + "; ".join(reason for reason, _ in reasons),
            fix="; ".join(fix for _, fix in reasons),
        )


def check_document_masks(config: PretrainedConfig) -> None:
    """Raises TrainingError if the model cannot attend inside documents only."""
    if reasons := [*_dropout(config)]:
        raise TrainingError(
            "data.document_mask is not possible: " + "; ".join(reason for reason, _ in reasons),
            fix="; ".join(fix for _, fix in reasons) + ", or set data.document_mask to false",
        )


def _uneven_tokens(method: Method, mesh: Mesh, sequence_length: int) -> Iterator[tuple[str, str]]:
    """Reason and fix, as in the functions below."""
    chunks = 1 if method == "ulysses" else 2
    # Sequence parallel splits a rank's tokens over tp too.
    unit = mesh.cp * math.lcm(chunks, mesh.tp)
    if sequence_length % unit:
        among = f"cp={mesh.cp}" + (f" x tp={mesh.tp}" if mesh.tp > 1 else "")
        pieces = " in two chunks each" if chunks == 2 else ""
        yield (
            f"data.sequence_length is {sequence_length}, but splitting it over {among}"
            f" ranks{pieces} needs a multiple of {unit}",
            f"set data.sequence_length to {max(1, sequence_length // unit) * unit}",
        )


def _uneven_heads(
    config: PretrainedConfig, method: Method, mesh: Mesh
) -> Iterator[tuple[str, str]]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if method != "ulysses" or heads % mesh.tp:  # tensor parallel refuses the second case itself
        return
    heads, kv_heads = heads // mesh.tp, max(1, kv_heads // mesh.tp)
    left = " that remain after tp" if mesh.tp > 1 else ""
    fix = "set parallel.context to ring"
    if heads % mesh.cp:
        yield f"cp does not divide the {heads} attention heads{left}", fix
    if kv_heads % mesh.cp and mesh.cp % kv_heads:
        yield f"cp neither divides nor is a multiple of the {kv_heads} kv heads{left}", fix


def _dropout(config: PretrainedConfig) -> Iterator[tuple[str, str]]:
    for key in DROPOUTS:
        if rate := getattr(config, key, 0):
            yield f"{key} is {rate}, but attention in blocks has no dropout", f"set {key} to 0"
