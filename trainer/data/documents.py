"""Documents of packed sequences, for attention that does not cross their ends.

B: sequences, S: tokens of a whole sequence, T: tokens of this rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree


@dataclass(frozen=True)
class Documents:
    """torch's pipelines split it into micro batches, because it is a registered node of trees of
    tensors. FSDP does not know it, so it leaves `starts_BS` in host memory."""

    starts_BS: torch.Tensor
    """For each token the place in its sequence of the first token of its document, int64. In host
    memory on every device, because the host starts kernels by it."""
    positions_BT: torch.Tensor
    """Position in its document of each token of this rank, int64, on the device."""


def documents_at(starts_BS: torch.Tensor, positions_T: torch.Tensor) -> Documents:
    """`positions_T`: places in a sequence of this rank's tokens."""
    return Documents(starts_BS, positions_T - starts_BS[:, positions_T])


def concatenated(parts: Iterable[Documents | None]) -> Documents | None:
    """Of several micro batches; None if they have none."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return Documents(
        torch.cat([part.starts_BS for part in found]),
        torch.cat([part.positions_BT for part in found]),
    )


def _leaves_of(documents: Documents) -> tuple[list[torch.Tensor], None]:
    return [documents.starts_BS, documents.positions_BT], None


def _from_leaves(leaves: Iterable[Any], _: None) -> Documents:
    return Documents(*leaves)


_pytree.register_pytree_node(Documents, _leaves_of, _from_leaves)
