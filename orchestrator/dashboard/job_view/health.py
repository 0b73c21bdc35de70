"""The health of ranks, as screens show it."""

from functools import lru_cache
from typing import Literal

from msgspec import Struct

from orchestrator.dashboard import format

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
    agent_lost: bool = False
    """The current attempt lost its agent. The host itself may work."""

    @property
    def worst(self) -> Health:
        return _worst(self.ranks)


def host_text(host: HostRow) -> str:
    """The worst that is known of the host, in words about its ranks or its agent: a host whose rank
    has exited is not dead."""
    worst = host.worst
    if host.agent_lost:
        return "its agent is lost"
    if worst not in UNHEALTHY:
        return format.health_text(worst)
    ranks = [rank for rank, one in enumerate(host.ranks, host.first_rank) if one == worst]
    who = format.rank_list(tuple(ranks))
    return f"{who} exited" if worst == "dead" else f"{who}: {format.health_text(worst)}"


@lru_cache(maxsize=1 << 10)
def _worst(ranks: tuple[Health, ...]) -> Health:
    """Nearly all of thousands of hosts have the same health."""
    return min(ranks, key=WORST_FIRST.index)
