"""Tensor parallel with sequence parallel: decoder layers are sharded over the ranks of axis tp.

Activations are sharded over the sequence between layers, and over heads and features inside them.
Embedding, head and loss are sharded over the vocabulary, so no rank holds all logits.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PretrainedConfig

from orchestrator.errors import TrainingError
from trainer.model.decoder import Decoder
from trainer.model.families import family_of
from trainer.model.vocabulary import SEQUENCE

HEAD = 2
"""Dim of a q or k norm's input [batch, sequence, head, features]."""


class Replicated(ParallelStyle):
    """Each rank has the whole weight. An input that is sharded over the sequence stays so."""

    def __init__(self, *, use_local_output: bool) -> None:
        super().__init__()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.use_local_output:
            module.register_forward_hook(lambda _module, _inputs, output: output.to_local())
        return distribute_module(module, device_mesh)


class VocabularyParallel(ParallelStyle):
    """Embedding and head (`model/vocabulary.py`): each rank has part of the rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, weight in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(weight, mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(part))

        return distribute_module(module, device_mesh, shard)


def apply_tensor_parallel(decoder: Decoder, tp: DeviceMesh) -> None:
    frozen = {name for name, p in decoder.named_parameters() if not p.requires_grad}
    parallelize_module(decoder, tp, outer_plan(decoder))
    for layer in decoder.layers.values():
        parallelize_module(layer, tp, layer_plan(layer))
    # Without this, the head would silently train a copy of the embedding.
    decoder.tie()
    # `SequenceParallel` creates new parameters with requires_grad=True, also for frozen ones.
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name not in frozen)


def outer_plan(decoder: Decoder) -> dict[str, ParallelStyle]:
    """Styles of the modules before and after the layers that this stage has."""
    family = decoder.family
    plan: dict[str, ParallelStyle] = {}
    if decoder.part.is_first:
        plan[family.embedding] = VocabularyParallel()
    if decoder.part.is_last:
        plan[family.norm] = SequenceParallel()
        plan[family.head] = VocabularyParallel()
    return plan


def layer_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    to_sequence = RowwiseParallel(output_layouts=Shard(SEQUENCE))
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(SEQUENCE)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": to_sequence,
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(SEQUENCE),), desired_input_layouts=(Replicate(),)
        ),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": to_sequence,
    }
    for norm in ("q_norm", "k_norm"):
        if hasattr(layer.self_attn, norm):
            # Each rank norms its own heads. Without a plan, its weights would diverge across ranks.
            plan[f"self_attn.{norm}"] = SequenceParallel(sequence_dim=HEAD, use_local_output=True)
    return with_adapters(plan, layer)


def with_adapters(plan: dict[str, ParallelStyle], layer: nn.Module) -> dict[str, ParallelStyle]:
    """`plan` with styles for the adapters of linear layers.

    The output of an adapter must have the layout of the linear layer's output: sharded over
    features after a colwise layer, over the sequence after a rowwise one. Only the narrow
    activations between A and B are communicated.
    """
    full: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        if not hasattr(layer.get_submodule(name), "base_layer"):
            full[name] = style
            continue
        full[f"{name}.base_layer"] = style
        if isinstance(style, ColwiseParallel):
            full[f"{name}.lora_A.default"] = Replicated(use_local_output=False)
            full[f"{name}.lora_B.default"] = ColwiseParallel()
        else:
            full[f"{name}.lora_A.default"] = RowwiseParallel(
                output_layouts=Shard(SEQUENCE), use_local_output=False
            )
            full[f"{name}.lora_B.default"] = Replicated(use_local_output=True)
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
