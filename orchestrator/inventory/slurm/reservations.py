"""Parses `scontrol -o show reservations`: when nodes are in maintenance. Pure."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, tzinfo

from msgspec import Struct

from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.slurm.records import records, value


class Reservation(Struct, frozen=True, kw_only=True):
    name: str
    begins_at: float
    """Unix seconds."""
    ends_at: float
    nodes: tuple[str, ...]
    is_maintenance: bool
    """Whether its nodes are in maintenance. Other reservations only keep nodes for users."""


def parse_reservations(text: str, zone: tzinfo | None = None) -> tuple[Reservation, ...]:
    """`zone` is that of the times; by default the machine's. Reservations whose times cannot be
    read are ignored."""
    found = []
    for record in records(text, "ReservationName"):
        with contextlib.suppress(ValueError):
            found.append(
                Reservation(
                    name=value(record, "ReservationName"),
                    begins_at=_time(value(record, "StartTime"), zone),
                    ends_at=_time(value(record, "EndTime"), zone),
                    nodes=expand(value(record, "Nodes")),
                    is_maintenance="MAINT" in value(record, "Flags").split(","),
                )
            )
    return tuple(found)


def _time(text: str, zone: tzinfo | None) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def soon_in_maintenance(
    found: Sequence[Reservation],
    hosts: Collection[str],
    now: float,
    ahead_s: float,
    own: str | None,
) -> Mapping[str, Reservation]:
    """Host -> its first maintenance that starts within `ahead_s` or has started. The job's own
    reservation does not count, because the job was asked to run in it."""
    due = [
        one
        for one in found
        if one.is_maintenance and one.name != own and one.begins_at - ahead_s <= now < one.ends_at
    ]
    first: dict[str, Reservation] = {}
    for one in sorted(due, key=lambda reservation: reservation.begins_at):
        for node in one.nodes:
            if node in hosts:
                first.setdefault(node, one)
    return first
