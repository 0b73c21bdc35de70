"""A small language model on bytes, and text that every machine has: Python's own sources.

The other scripts of this folder train it, so that they download nothing.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn

VOCABULARY = 256


class ByteModel(nn.Module):
    """A causal transformer that predicts the next byte. `forward` gives the loss."""

    def __init__(self, width: int = 32, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        length = inputs.shape[1]
        hidden = self.embed(inputs) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def read_text(num_files: int = 20) -> torch.Tensor:
    """The bytes of some modules of the standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:num_files]
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, paths))), dtype=torch.uint8)


def batch_of(
    text: torch.Tensor, step: int, rank: int, size: int = 8, length: int = 64
) -> torch.Tensor:
    """The samples of one rank in one step. They depend on nothing else, so that a script that
    resumes at a step sees the data of that step."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(text) - length, (size,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts]).long()
