"""Where the ranks of a host keep checkpoints in its memory, as their agent tells them."""

from msgspec import Struct


class HostMemory(Struct, frozen=True, kw_only=True):
    lineage: int
    """The attempt in which training last started from the disk or at step 0; 0 if none has trained.
    Only checkpoints with this lineage are used: those of an earlier one are of steps that were
    trained again since."""
    slots: tuple[tuple[str, str], ...]
    """Local rank -> paths of its two slots: files in memory, empty at first, which exist as long as
    the agent."""
