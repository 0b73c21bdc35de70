"""Tensor parallel with sequence parallel: decoder layers are sharded over the ranks of axis tp.

Activations are sharded over the sequence between layers, and over heads and features inside them.
Embedding, head and loss are sharded over the vocabulary, so no rank holds all logits.

Parameters become DTensors. Modules get a class that computes with the plain tensors inside, in
eager mode as well as compiled (`model/sequence.py` has the reasons).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PretrainedConfig

from orchestrator.errors import TrainingError
from trainer.model.decoder import Decoder
from trainer.model.families import family_of
from trainer.model.sequence import (
    TensorRanks,
    gather_again,
    gather_sequence,
    local_weight,
    scatter_sequence,
    stored_as_part,
)

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
MOVES = frozenset(
    [
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.cat.default,
        torch.ops.aten.view.default,
    ]
)
"""Follow a gather of several sequences: parts of ranks are put together along the sequence."""


class Sharded(nn.Module):
    """Base of the classes below, which are put in front of a module's own class."""

    own: ClassVar[type[nn.Module]]
    tensor_ranks: TensorRanks
    weight: nn.Parameter


class Local(Sharded):
    """A linear layer or norm whose result is complete on this rank: all features of its own tokens,
    or its own features of all tokens."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, "bias", None)
        with stored_as_part(input):
            return compute(self, input, None if bias is None else local_weight(bias))


class Scattering(Sharded):
    """A linear layer with part of the input features. Its results are summands, which are added up
    and scattered over the sequence."""

    bias: nn.Parameter | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part_BtD = scatter_sequence(compute(self, input, None), self.tensor_ranks)
        # The bias is added to the sum, not to each summand.
        return part_BtD if self.bias is None else part_BtD + local_weight(self.bias)


class Gathering(Sharded):
    """Attention or MLP: gets this rank's tokens, and computes its own heads or features of all
    tokens."""

    regathers: bool = False
    """The backward pass gathers the tokens again, instead of keeping them until then."""

    def forward(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        if not self.regathers or not torch.compiler.is_compiling():
            return self.gathered(*args, **kwargs)
        # torch.compile cannot trace the hooks of `stored_as_part`. It reads `recompute_gathers`
        # when it traces the layer, and decides by itself what else to keep.
        return checkpoint(
            self.gathered,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=recompute_gathers,
            **kwargs,
        )

    def gathered(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        if args:
            return self.own.forward(self, self.gather(args[0]), *args[1:], **kwargs)
        part_BtD = kwargs["hidden_states"]
        return self.own.forward(self, **{**kwargs, "hidden_states": self.gather(part_BtD)})

    def gather(self, part_BtD: torch.Tensor) -> torch.Tensor:
        kind = part_BtD.device.type
        if torch.is_autocast_enabled(kind):
            # Otherwise each product would store a cast copy of the wider gathered tokens.
            part_BtD = part_BtD.to(torch.get_autocast_dtype(kind))
        again = self.regathers and not torch.compiler.is_compiling()
        return (gather_again if again else gather_sequence)(part_BtD, self.tensor_ranks)


def regather(layer: nn.Module) -> None:
    """Make `layer` gather its inputs again in the backward pass. It does nothing without tp."""
    for module in layer.modules():
        if isinstance(module, Gathering):
            module.regathers = True


def recompute_gathers() -> tuple[Any, Any]:
    """The contexts of a compiled region that recomputes only what it gathers."""
    return create_selective_checkpoint_contexts(gathers_again())


def gathers_again() -> Callable[..., CheckpointPolicy]:
    """Decides for each operation of a region, in their order, whether it is computed again."""
    gathers = False

    def policy(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        nonlocal gathers
        # What only moves the gathered tokens belongs to the gather: its result is as large.
        gathers = op is GATHER or (gathers and op in MOVES)
        return CheckpointPolicy.MUST_RECOMPUTE if gathers else CheckpointPolicy.PREFER_SAVE

    return policy


class PlainWeights:
    """A module, but with plain tensors as weight and bias. The module itself keeps its DTensors,
    because FSDP and torchao look for them there."""

    def __init__(self, module: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.module = module
        self.weight = weight
        self.bias = bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def compute(module: Sharded, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What the module's own class computes, with plain tensors."""
    weights: Any = PlainWeights(module, local_weight(module.weight), bias)
    result: torch.Tensor = module.own.forward(weights, input)
    return result


@dataclass(frozen=True, slots=True)
class Style:
    """How a module is sharded."""

    kind: type[Sharded] | None
    """None: the module's own class knows tensor parallel."""
    placements: Mapping[str, Placement]
    """Of the parameters."""


COLUMNS = Style(Local, {"weight": Shard(0), "bias": Shard(0)})
ROWS = Style(Scattering, {"weight": Shard(1), "bias": Replicate()})
WHOLE = Style(Local, {"weight": Replicate(), "bias": Replicate()})
GATHERED = Style(Gathering, {})
VOCABULARY = Style(None, {"weight": Shard(0)})

Plan = dict[str, Style]
"""Style by path of a module."""


def apply_tensor_parallel(decoder: Decoder, tp: DeviceMesh) -> None:
    shard(decoder, outer_plan(decoder), tp)
    for layer in decoder.layers.values():
        shard(layer, layer_plan(layer), tp)
    # Without this, the head would silently train a copy of the embedding.
    decoder.tie()


def shard(root: nn.Module, plan: Plan, tp: DeviceMesh) -> None:
    ranks = TensorRanks(tp.get_group().group_name, tp.size())
    for path, style in plan.items():
        module: Any = root.get_submodule(path)
        for name, whole in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(whole, tp, [style.placements[name]])
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        if style.kind is not None:
            module.__class__ = sharded_class(style.kind, type(module))  # type: ignore[arg-type]
            module.tensor_ranks = ranks


@cache
def sharded_class(kind: type[Sharded], own: type[nn.Module]) -> type[nn.Module]:
    """`own` with the forward function of `kind`. It keeps its name, which `parallel.fsdp.wrap` may
    give. It is cached because layers of one class share one compiled graph."""
    return type(own.__name__, (kind, own), {"own": own, "__module__": own.__module__})


def outer_plan(decoder: Decoder) -> Plan:
    """Styles of the modules before and after the layers that this stage has."""
    family = decoder.family
    plan: Plan = {}
    if decoder.part.is_first:
        plan[family.embedding] = VOCABULARY
    if decoder.part.is_last:
        plan[family.norm] = WHOLE
        plan[family.head] = VOCABULARY
    return plan


def layer_plan(layer: nn.Module) -> Plan:
    plan = {
        "input_layernorm": WHOLE,
        "self_attn": GATHERED,
        "self_attn.q_proj": COLUMNS,
        "self_attn.k_proj": COLUMNS,
        "self_attn.v_proj": COLUMNS,
        "self_attn.o_proj": ROWS,
        "post_attention_layernorm": WHOLE,
        "mlp": GATHERED,
        "mlp.gate_proj": COLUMNS,
        "mlp.up_proj": COLUMNS,
        "mlp.down_proj": ROWS,
    }
    for norm in ("q_norm", "k_norm"):
        if hasattr(layer.self_attn, norm):
            # Each rank norms its own heads. Without a plan, its weights would diverge across ranks.
            plan[f"self_attn.{norm}"] = WHOLE
    return with_adapters(plan, layer)


def with_adapters(plan: Plan, layer: nn.Module) -> Plan:
    """`plan` with styles for the adapters of linear layers.

    The output of an adapter must have the layout of the linear layer's output: sharded over
    features after a layer of columns, over the sequence after one of rows. Only the narrow
    activations between A and B are communicated.
    """
    full: Plan = {}
    for name, style in plan.items():
        if not hasattr(layer.get_submodule(name), "base_layer"):
            full[name] = style
            continue
        full[f"{name}.base_layer"] = style
        first, second = (WHOLE, COLUMNS) if style is COLUMNS else (ROWS, WHOLE)
        full[f"{name}.lora_A.default"] = first
        full[f"{name}.lora_B.default"] = second
    return full


def check_tensor_parallel(config: PretrainedConfig, tp: int, tokens: int) -> None:
    """Raises TrainingError with all sizes that tp does not divide. `tokens` is the number of tokens
    of a sequence after context parallel."""
    if not family_of(config).tensor_parallel:
        raise TrainingError(
            f"parallel.tp={tp}: the fused projections of {config.model_type} cannot be sharded",
            fix="set tp to 1 and give its ranks to dp_shard",
        )
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "tokens of a sequence": tokens,
    }
    uneven = [f"{name} ({size})" for name, size in sizes.items() if size % tp]
    if uneven:
        raise TrainingError(
            f"parallel.tp={tp} does not divide {', '.join(uneven)}",
            fix="choose a tp that divides all of them",
        )
