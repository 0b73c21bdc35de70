"""Low-rank adapters (LoRA, Hu et al. 2021): the model is frozen, and PEFT's adapters are trained.

The adapters are modules inside the layers, so each axis of the mesh treats them like other weights.
Only tensor parallel needs a plan for them (`parallel/tensor.py`). Their names are PEFT's.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from orchestrator.contract.spec.model_spec import LoraSpec, ModelSpec
from orchestrator.errors import TrainingError
from trainer.model.decoder import Decoder, is_adapter
from trainer.model.init_weights import stream_of

LINEAR = (nn.Linear, Conv1D)
"""Modules that can have an adapter. GPT-2's `Conv1D` is a linear layer with a transposed weight."""

SAMPLE_BYTES = 1 << 16
"""Bytes read from both ends of a weights file, to distinguish files of equal name and size."""


def add_adapters(decoder: Decoder, spec: LoraSpec) -> None:
    """Put adapters into the layers of `decoder`, which is on the meta device, and freeze the rest.

    Raises:
        TrainingError: PEFT is not installed, or a target is not a linear layer of the model.
    """
    _check_targets(decoder, spec.target_modules)
    config = _lora_config(spec, decoder.config)
    _peft().inject_adapter_in_model(config, decoder, low_cpu_mem_usage=True)
    for module in decoder.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            # Under autocast PEFT would widen the input to the type of the adapter's weights, and
            # each product of an adapter would narrow and store its own copy.
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]


def draw_adapters(decoder: Decoder, seed: int) -> None:
    """Initialise the adapters: A with PEFT's distribution, from seed and name; B with zeros."""
    for name, parameter in decoder.plain_parameters():
        if not is_adapter(name):
            continue
        whole = _first_values(name, parameter.shape, seed)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                whole = whole.to(parameter.device)
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
            else:
                parameter.copy_(whole)


def base_of(model: ModelSpec) -> str:
    """Identifies the frozen model under adapters, because a checkpoint has only the adapters; ""
    if all weights are trained. A model without pretrained weights follows from its config and the
    seed, and the seed is in the checkpoint anyway."""
    if model.lora is None:
        return ""
    if model.weights is None:
        config = json.dumps(dict(model.config or {}), sort_keys=True, default=str)
        weights = f"fresh {model.preset or model.path or _digest(config.encode())}"
    else:
        # A folder may move, so its content identifies it. A hub id is already unique.
        weights = _fingerprint(Path(model.weights)) or model.weights
    return f"{weights}, alpha {model.lora.alpha}, quantize {model.lora.quantize}"


def export_adapters(
    tensors: Mapping[str, torch.Tensor],
    spec: LoraSpec,
    base: PretrainedConfig,
    base_name: str | None,
    folder: Path,
) -> None:
    """Write `folder` so that `PeftModel.from_pretrained(model, folder)` loads these adapters.

    Args:
        tensors: unsharded, by their names in `Decoder.plain_parameters()`. Others than adapters
            are ignored.
        base_name: where PEFT finds the frozen model; None if it was not pretrained.
    """
    config = _lora_config(spec, base)
    config.base_model_name_or_path = base_name
    config.inference_mode = True
    config.save_pretrained(folder)
    adapters = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
        if is_adapter(name)
    }
    save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_targets(decoder: Decoder, targets: Iterable[str]) -> None:
    layer = next(iter(decoder.layers.values()))
    names = [name for name, module in layer.named_modules() if isinstance(module, LINEAR)]
    # A target matches whole components of a name, as in PEFT.
    unknown = [t for t in targets if not any(f".{name}".endswith(f".{t}") for name in names)]
    if unknown:
        raise TrainingError(
            "model.lora.target_modules: no linear layer of the model is named"
            f" {', '.join(unknown)}",
            fix=f"choose from {', '.join(names)}, or the last part of these names",
        )


def _lora_config(spec: LoraSpec, base: PretrainedConfig) -> Any:
    return _peft().LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=list(spec.target_modules),
        fan_in_fan_out=base.model_type == "gpt2",
        task_type="CAUSAL_LM",
    )


def _peft() -> Any:
    """PEFT is imported only for adapters, because it is optional and its import takes seconds."""
    try:
        return import_module("peft")
    except ImportError as exc:
        raise TrainingError(
            f"model.lora needs the package peft, which cannot be imported ({exc})",
            fix="pip install ndctl[lora]",
        ) from exc


def _first_values(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    if ".lora_B." in name:
        return torch.zeros(shape)
    # PEFT calls kaiming_uniform_ with a = √5, which gives √(6 / ((1 + 5) fan_in)) = fan_in^-0.5.
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=stream_of(f"{seed} {name}"))


def _fingerprint(folder: Path) -> str:
    """Hash of the weights in a folder, from both ends of each file; "" if it has none."""
    files = []
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(SAMPLE_BYTES)
            file.seek(max(0, size - SAMPLE_BYTES))
            files.append((path.name, size, _digest(head + file.read())))
    return _digest(json.dumps(files).encode()) if files else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
