"""Tensor parallel with sequence parallel: every decoder layer is cut over the ranks of axis tp.

Between the layers activations are cut over the sequence, inside them over heads and features; the
embedding, the head and the loss are cut over the vocabulary, so no rank holds all logits.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel

from orchestrator.errors import TrainingError
from trainer.model import layers_of, tie_weights

SEQUENCE, VOCABULARY, HEAD = 1, -1, 2
"""Dims of hidden states [batch, sequence, features], of logits, and of a q or k norm's input
[batch, sequence, head, features]."""


def apply_tensor_parallel(model: PreTrainedModel, tp: DeviceMesh, sequence_length: int) -> None:
    check_divisible(model.config, tp.size(), sequence_length)
    parallelize_module(
        model,
        tp,
        {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(SEQUENCE)
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(SEQUENCE),
                output_layouts=Shard(VOCABULARY),
                use_local_output=False,
            ),
        },
    )
    for layer in layers_of(model):
        parallelize_module(layer, tp, layer_plan(layer))
    # Without this the head trains on a copy of the embedding, and nothing says so.
    tie_weights(model)


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
            # Each rank norms its own heads; left out, its weights would drift apart across ranks.
            plan[f"self_attn.{norm}"] = SequenceParallel(sequence_dim=HEAD, use_local_output=True)
    return plan


def check_divisible(config: PretrainedConfig, tp: int, sequence_length: int) -> None:
    """Raises TrainingError naming everything that tp does not divide."""
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "sequence_length": sequence_length,
    }
    uneven = [f"{name} ({size})" for name, size in sizes.items() if size % tp]
    if uneven:
        raise TrainingError(
            f"mesh.tp={tp} does not divide {', '.join(uneven)}",
            fix="choose a tp that divides all of them",
        )
