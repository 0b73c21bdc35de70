"""The health of ranks, as screens show it."""

from functools import lru_cache
from typing import Literal

from msgspec import Struct

Health = Literal[
    "culprit", "dead", "silent", "straggler", "slow", "starting", "stopped", "done", "ok"
]
"""`slow`: late heartbeat. `silent`: no heartbeat. `straggler`: slow own work. `culprit`: the root
cause of the present incident."""
WORST_FIRST: tuple[Health, ...] = (
    "culprit",
    "dead",
    "silent",
    "straggler",
    "slow",
    "starting",
    "stopped",
    "done",
    "ok",
)
UNHEALTHY: tuple[Health, ...] = ("culprit", "dead", "silent", "straggler", "slow")


class HostRow(Struct, frozen=True, kw_only=True):
    name: str
    first_rank: int
    ranks: tuple[Health, ...]
    """In order of local ranks."""

    @property
    def worst(self) -> Health:
        return _worst(self.ranks)


@lru_cache(maxsize=1 << 10)
def _worst(ranks: tuple[Health, ...]) -> Health:
    """Nearly all of thousands of hosts have the same health."""
    return min(ranks, key=WORST_FIRST.index)
