"""Orders of an agent to a rank: signals while it trains, and one JSON datagram each to a rank that
is kept between two attempts.

The rank binds its socket before it imports anything slow. An order to a rank that has none yet
fails, and then the agent ends the rank.
"""

import signal
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.messages import wire

STOP_IN_MEMORY = signal.SIGRTMIN + 4
"""To the bundled trainer: stop after this step, as at SIGTERM, and write the disk only if the step
does not reach all partner hosts. glibc keeps the first real-time signals for itself."""
SAVE = signal.SIGRTMIN + 5
"""To the bundled trainer: save a checkpoint to the disk after this step."""


class LeaveAttempt(Struct, frozen=True, kw_only=True):
    """Break off the collectives of the attempt, and wait for the next order."""

    attempt: int


class JoinAttempt(Struct, frozen=True, kw_only=True):
    """Take part in the next attempt."""

    environ: Mapping[str, str]
    """What differs from the environment in which the process started."""
    config: str
    """The trainer's CONFIG."""
    log: str
    """File for the output of the rank."""


RankOrder = LeaveAttempt | JoinAttempt
ORDERS = wire.Decoder(RankOrder)
MAX_BYTES = 200_000
"""Most bytes of an order."""


def to_bytes(order: RankOrder) -> bytes:
    return wire.encode(order)


def from_bytes(data: bytes) -> RankOrder:
    """Raises ValueError when the bytes are not an order of this version."""
    order: RankOrder = ORDERS.decode(data)
    return order


def socket_path(agent: Path, local_rank: int) -> Path:
    """Where a rank listens: beside the socket of its agent, in a folder that no other user can
    enter."""
    return agent.parent / f"orders-{local_rank}"
