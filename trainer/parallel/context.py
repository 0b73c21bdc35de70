"""Context parallel: sequences are cut over the ranks of axis cp, and attention sees them whole."""

import torch


def local_positions(sequence_length: int) -> torch.Tensor:
    """Which tokens of a sequence this rank has."""
    return torch.arange(sequence_length)
