"""Measures attention over the ranks of axis cp, on real ranks.

A case has `measure`, `cp`, `method` and the other arguments of that measure. The ranks are split
into groups of `cp`. The answer has, for each name, the largest value of all ranks.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.train_spec import TrainSpec
from tests.trainer.launch.tiny_runs import LLAMA
from trainer.loss import TokenLoss
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.init_weights import allocate
from trainer.model.weights import first_weights
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.context import (
    apply_context_parallel,
    attention_over,
    blocks,
    local_positions,
    ring,
)
from trainer.parallel.context.documents import shared_parts
from trainer.parallel.context.in_documents import attend_in_documents
from trainer.parallel.context.kernels import AttentionOutput

Found = dict[str, float]
SCALE = 0.4


def attention(
    cp: DeviceMesh,
    method: Any,
    tokens: int,
    heads: int,
    kv_heads: int,
    dtype: str,
    features: int = 8,
    documents: Sequence[Sequence[int]] | None = None,
) -> Found:
    """Largest error of the result and the gradients, compared with one process in float64.

    `documents`: the lengths of the documents of each of the two sequences.
    """
    torch.manual_seed(0)
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads, "grad": heads}
    whole = {
        # In memory, tokens come before heads, as in a model.
        name: torch.randn(2, tokens, count, features, dtype=torch.float64).transpose(1, 2)
        for name, count in shapes.items()
    }
    lengths = documents or [[tokens], [tokens]]
    starts_BS = torch.stack([_starts(torch.tensor(each)) for each in lengths])
    expected = _in_one_process(**whole, starts_BS=starts_BS)
    positions_T = local_positions(tokens, method, cp.size(), cp.get_local_rank())
    own = {name: x[:, :, positions_T].to(getattr(torch, dtype)) for name, x in whole.items()}
    q, k, v = (own[name].requires_grad_() for name in "qkv")
    attend = attention_over(cp.get_group(), method) if cp.size() > 1 else attend_in_documents
    out = attend(q, k, v, SCALE, None if documents is None else starts_BS)
    out.backward(own["grad"])
    found = {"out": out, "q": q.grad, "k": k.grad, "v": v.grad}
    return {
        name: _distance(tensor, expected[name][:, :, positions_T]) for name, tensor in found.items()
    }


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def _in_one_process(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, starts_BS: torch.Tensor
) -> dict[str, torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in leaves[1:])
    scores = leaves[0] @ keys.transpose(-1, -2) * SCALE
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    hidden_BSS = later | (starts_BS[:, :, None] != starts_BS[:, None, :])
    out = scores.masked_fill(hidden_BSS.unsqueeze(1), -torch.inf).softmax(-1) @ values
    out.backward(grad)
    gradients = [x.grad for x in leaves if x.grad is not None]
    return {"out": out, **dict(zip("qkv", gradients, strict=True))}


def _distance(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert found is not None
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


def saved(cp: DeviceMesh, method: Any, tokens: int, recompute: Any = "none") -> Found:
    """What a model keeps for the backward pass, and how often the ring sends.

    `bytes` is the size of the kept tensors, `squares` is how many of them grow with the square of
    the sequence, and `sends` counts calls in both passes.
    """
    decoder = _decoder(cp, method, tokens, recompute)
    train = TrainSpec(steps=1, global_batch_size=1)
    head = decoder.get_parameter("lm_head.weight")
    decoder.loss = TokenLoss(tokens, torch.device("cpu"), train)
    positions_T = decoder.positions_1T[0]
    ids_BT = torch.arange(tokens).remainder(251)[positions_T].unsqueeze(0)
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # The loss also keeps the gradient of the head's weights, whose size does not depend on cp.
        if storage.data_ptr() not in weights and tensor.shape != head.shape:
            kept[storage.data_ptr()] = tensor
        return tensor

    with mock.patch.object(ring, "send_to_next", wraps=ring.send_to_next) as sends:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = decoder(ids_BT, ids_BT)
        loss.backward()
    shapes = [x.shape for x in kept.values()]
    return {
        "bytes": float(sum(x.untyped_storage().nbytes() for x in kept.values())),
        "squares": float(sum(sum(n >= len(positions_T) for n in s) > 1 for s in shapes)),
        "sends": float(sends.call_count),
    }


def _decoder(cp: DeviceMesh, method: Any, tokens: int, recompute: Any) -> Decoder:
    config = read_model_config(ModelSpec(config={**LLAMA, "max_position_embeddings": tokens}))
    decoder = build_stages(config, [StageSlice(0, 3, 3)])[0]
    if cp.size() > 1:
        apply_context_parallel(decoder, cp, method)
    apply_activation_checkpointing(decoder, recompute, None)
    allocate(decoder, torch.device("cpu"))
    first_weights([decoder], None, 0, resumed=False)
    positions_T = local_positions(tokens, method, cp.size(), cp.get_local_rank())
    decoder.set_positions(positions_T.unsqueeze(0))
    return decoder


MEASURES: dict[str, Callable[..., Found]] = {"attention": attention, "saved": saved}


def plain_mean(out: torch.Tensor, lse: torch.Tensor, more: AttentionOutput) -> None:
    out.lerp_(more.out_BHTD, 0.5)


def first_key_missing(hop: int, rank: int, num_ranks: int, tokens: int) -> blocks.Part:
    part = PART_AT(hop, rank, num_ranks, tokens)
    return part if hop == 0 else blocks.Part(part.queries, slice(1, part.keys.stop))


def in_order(tokens: int, method: str, cp: int, cp_rank: int) -> torch.Tensor:
    return torch.arange(tokens).chunk(cp)[cp_rank]


def document_one_key_short(*given: Any) -> Iterator[blocks.Part]:
    for part in SHARED_PARTS(*given):
        yield part._replace(keys=slice(part.keys.start + 1, part.keys.stop))


PART_AT = ring.part_at
SHARED_PARTS = shared_parts
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "blocks averaged without weights": (blocks, "merge_", plain_mean),
    "a key is never seen": (ring, "part_at", first_key_missing),
    "a document is one key short": (ring, "shared_parts", document_one_key_short),
    "tokens distributed in order": (sys.modules[__name__], "local_positions", in_order),
}


@contextmanager
def broken(name: str) -> Iterator[None]:
    with mock.patch.object(*BROKEN[name]):
        yield


@cache
def mesh_of(cp: int, world_size: int) -> DeviceMesh:
    """The groups of `cp` ranks, cached for all cases: creating them takes longer than most cases,
    and their threads never end."""
    mesh = init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("others", "cp"))
    return mesh["cp"]


def run_case(case: dict[str, Any], env: RankEnv) -> Found:
    rest = dict(case)
    measure, cp, name = MEASURES[rest.pop("measure")], rest.pop("cp"), rest.pop("broken", None)
    with broken(name) if name else nullcontext():
        found = measure(mesh_of(cp, env.world_size), **rest)
    values = torch.tensor([*found.values()], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(found, values.tolist(), strict=True))
