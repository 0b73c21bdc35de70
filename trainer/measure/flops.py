"""Model FLOPs per token, and the peak FLOPS of devices, which give the MFU.

The formula is that of PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H Q T per token, with N
weights, L layers, H heads of Q features and sequences of T tokens. N excludes the embedding, which
is a lookup, and includes the head, also if both are one matrix. The attention term is not halved
for the causal mask, but with document masks T is the mean length of a document, if the job says it.
Recomputation in the backward pass does not count: these are FLOPs of the model, not of the
hardware.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from orchestrator.contract.spec.data_spec import DataSpec
from trainer.model.decoder import Decoder
from trainer.rank.ranks import Ranks

TERA = 1e12

PEAKS: tuple[tuple[str, float, float], ...] = (
    # NVIDIA's data sheets: H100 (SXM, PCIe, NVL) and H200 (SXM, NVL). bfloat16 is half the figure
    # "with sparsity". float32 is without tensor cores, because the trainer does not enable TF32.
    ("H100 PCIe", 756.5, 51.0),
    ("H100 NVL", 835.5, 60.0),
    ("H100", 989.5, 67.0),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.5, 67.0),
    # NVIDIA A100 data sheet; the same for all form factors.
    ("A100", 312.0, 19.5),
    # NVIDIA HGX B200: 4500 with sparsity.
    ("B200", 2250.0, 75.0),
    # NVIDIA L40S data sheet.
    ("L40S", 362.05, 91.6),
    # NVIDIA Ada GPU architecture white paper, appendix A: bfloat16 with float32 accumulation.
    ("RTX 4090", 165.2, 82.6),
)
"""Part of the device name (the first match counts), and the dense peaks in bfloat16 and float32, in
1e12 operations per second."""


def device_peak(device_name: str, dtype: str) -> float | None:
    """Operations per second; None for an unknown device."""
    for name, bfloat16, float32 in PEAKS:
        if name in device_name:
            return TERA * (bfloat16 if dtype == "bfloat16" else float32)
    return None


def job_peak(ranks: Ranks, dtype: str, device_tflops: float | None) -> float | None:
    """Operations per second of all devices together; None if unknown."""
    if device_tflops is not None:
        return ranks.mesh.size() * device_tflops * TERA
    if ranks.device.type != "cuda":
        return None
    peak = device_peak(torch.cuda.get_device_name(ranks.device), dtype)
    return None if peak is None else ranks.mesh.size() * peak


def attended_tokens(data: DataSpec) -> int:
    """Tokens that attention can see from a token, as if there were no causal mask. The same as in
    the plan, so that its MFU and the measured one compare."""
    if data.masks_documents and data.document_tokens is not None:
        return min(data.sequence_length, data.document_tokens)
    return data.sequence_length


def flops_per_token(stages: Sequence[Decoder], ranks: Ranks, attended: int) -> float:
    """FLOPs of forward and backward of the whole model. All ranks must call it."""
    weights = sum(_weight_flops(stage) for stage in stages)
    total = torch.tensor(float(weights), dtype=torch.float64, device=ranks.device)
    if ranks.mesh["pp"].size() > 1:
        dist.all_reduce(total, group=ranks.mesh.get_group("pp"))
    config = stages[0].config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return total.item() + 12.0 * config.num_hidden_layers * heads * head_dim * attended


def _weight_flops(stage: Decoder) -> int:
    modules = [*stage.layers.values()]
    if stage.part.is_last:
        modules += [stage.get_submodule(stage.family.norm), stage.get_submodule(stage.family.head)]
    return sum(_flops(parameter) for module in modules for parameter in module.parameters())


def _flops(parameter: nn.Parameter) -> int:
    """Per token and weight: 2 for the forward pass, 2 for the gradient of the input, and 2 for the
    gradient of the weight, which frozen weights do not have."""
    return (6 if parameter.requires_grad else 4) * parameter.numel()
