"""Allocates the weights and initialises those that are not loaded.

Each value depends on the seed, the parameter's name and the position in it, but not on the mesh.
"""

import hashlib
import itertools

import torch
from transformers import PretrainedConfig

from orchestrator.errors import TrainingError
from trainer.model.decoder import Decoder
from trainer.model.regions import Region, local_part, local_region, overlap, within

TILE = 256
"""Matrices are drawn in squares of this side. It is small because a rank draws whole squares, also
those that its part only touches."""


def allocate(decoder: Decoder, device: torch.device, offload: bool = False) -> None:
    """Allocate this rank's shards (on the host with `offload`) and compute the buffers."""
    decoder.to_empty(device="cpu" if offload else device)
    decoder.tie()
    _fill_buffers(decoder, device)


@torch.no_grad()
def draw(name: str, parameter: torch.Tensor, seed: int, config: PretrainedConfig) -> None:
    """Initialise this rank's part of `parameter`; `name` is its plain name."""
    local = local_part(parameter)
    if name.endswith(".bias"):
        local.zero_()
    elif parameter.ndim == 1:
        local.fill_(1.0)  # a norm's scale
    else:
        draw_part(local, local_region(parameter), f"{seed} {name}", _spread(name, config))


def _fill_buffers(decoder: Decoder, device: torch.device) -> None:
    """Compute the rotary frequencies again: `to_empty` leaves them undefined."""
    for name, module in decoder.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        if name != decoder.family.rotary:
            raise TrainingError(
                f"{name} has buffers ({', '.join(buffers)}) that this trainer cannot compute",
                fix="use a model of another type",
            )
        fresh = dict(type(module)(config=decoder.config).named_buffers())
        for key in buffers:
            setattr(module, key, fresh[key].to(device))


def draw_part(local: torch.Tensor, region: Region, key: str, spread: float) -> None:
    """Draw the tiles that overlap `region`, and keep the part inside it.

    Each tile has its own random stream, so a rank draws only the tiles that it needs, and the
    values do not depend on the sharding.
    """
    starts = (range(side.start // TILE * TILE, side.stop, TILE) for side in region)
    for corner in itertools.product(*starts):
        tile = tuple(slice(start, start + TILE) for start in corner)
        kept = overlap(tile, region)
        if kept is None:
            continue
        values = torch.empty([TILE] * len(corner))
        values.normal_(0.0, spread, generator=stream_of(f"{key} {corner}"))
        local[within(kept, region)].copy_(values[within(kept, tile)])


def stream_of(key: str) -> torch.Generator:
    """A random generator whose seed is the hash of `key`."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _spread(name: str, config: PretrainedConfig) -> float:
    std = float(config.initializer_range)
    if config.model_type == "gpt2" and name.endswith("c_proj.weight"):
        # GPT-2 scales the weights of residual layers by 1/√N (Radford et al. 2019, section 2.3).
        return std / (2 * config.num_hidden_layers) ** 0.5
    return std
