"""First values of weights that no one has trained yet, and storage for all of them.

Each parameter's values depend on the seed and its own name, never on the mesh.
"""

import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig

from orchestrator.errors import TrainingError
from trainer.model.decoder import Decoder, NamedWeights


def allocate(decoder: Decoder, device: torch.device, offload: bool = False) -> None:
    """Give the decoder's shards storage, on the host with `offload`, and fill what is computed
    rather than learned."""
    decoder.to_empty(device="cpu" if offload else device)
    decoder.tie()
    _fill_buffers(decoder, device)


def draw_weights(decoder: NamedWeights, seed: int) -> None:
    """Fill every parameter with its first values."""
    for name, parameter in decoder.plain_parameters():
        whole = _first_values(name, parameter.shape, seed, decoder.config)
        with torch.no_grad():
            local_part(parameter).copy_(_part_of(whole, parameter))


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `parameter`; writing to it writes to the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _fill_buffers(decoder: Decoder, device: torch.device) -> None:
    """Compute the rotary frequencies again: `to_empty` leaves them undefined."""
    for name, module in decoder.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        if name != decoder.family.rotary:
            raise TrainingError(
                f"{name} has buffers ({', '.join(buffers)}) that this trainer cannot fill",
                fix="train a model of another type",
            )
        fresh = dict(type(module)(config=decoder.config).named_buffers())
        for key in buffers:
            setattr(module, key, fresh[key].to(device))


def _first_values(
    name: str, shape: torch.Size, seed: int, config: PretrainedConfig
) -> torch.Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)  # a norm's scale
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, _spread(name, config), generator=generator)


def _spread(name: str, config: PretrainedConfig) -> float:
    std = float(config.initializer_range)
    if config.model_type == "gpt2" and name.endswith("c_proj.weight"):
        # Residual layers are scaled down by their number (Radford et al. 2019, section 2.3).
        return std / (2 * config.num_hidden_layers) ** 0.5
    return std


def _part_of(whole: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.device_type != "cpu":
        whole = whole.to(parameter.device)
    # Every rank has the whole already: with no source rank nothing is sent.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
