"""Maintenance that is planned, as Slurm shows it."""

from datetime import UTC, datetime

import pytest

from orchestrator.inventory.slurm.reservations import parse_reservations, soon_in_maintenance

SHOWN = (
    "ReservationName=maint_1 StartTime=2026-11-24T08:00:00 EndTime=2026-11-24T10:00:00"
    " Duration=02:00:00 Nodes=node[1-2] NodeCnt=2 CoreCnt=4 Features=(null) PartitionName=(null)"
    " Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=4 Users=root Groups=(null) Accounts=(null)"
    " Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
    "ReservationName=class StartTime=2026-11-24T07:00:00 EndTime=2026-11-24T12:00:00"
    " Duration=05:00:00 Nodes=node[1-4] NodeCnt=4 Flags=SPEC_NODES Users=ann State=INACTIVE\n"
    "ReservationName=odd StartTime=Unknown EndTime=Unknown Nodes=node1 Flags=MAINT\n"
)
FOUND = parse_reservations(SHOWN, UTC)


def at(hour: int, minute: int = 0) -> float:
    return datetime(2026, 11, 24, hour, minute, tzinfo=UTC).timestamp()


def soon(now: float, own: str | None = None) -> dict[str, str]:
    hosts = ("node2", "node3")
    found = soon_in_maintenance(FOUND, hosts, now, 600.0, own)
    return {host: one.name for host, one in found.items()}


def test_reservations_are_read_with_their_nodes_and_times() -> None:
    maintenance, other = FOUND
    assert (maintenance.name, maintenance.nodes) == ("maint_1", ("node1", "node2"))
    assert (maintenance.begins_at, maintenance.ends_at) == (at(8), at(10))
    assert (maintenance.is_maintenance, other.is_maintenance) == (True, False)
    assert parse_reservations("No reservations in the system\n") == ()


@pytest.mark.parametrize(
    ("now", "hosts"),
    [
        (at(7), {}),
        (at(7, 49), {}),
        (at(7, 51), {"node2": "maint_1"}),
        (at(9), {"node2": "maint_1"}),
        (at(10), {}),
    ],
)
def test_a_node_is_unavailable_from_shortly_before_maintenance_to_its_end(
    now: float, hosts: dict[str, str]
) -> None:
    """A reservation that only keeps nodes for other users takes no node from a running job."""
    assert soon(now) == hosts


def test_a_job_inside_the_reservation_may_stay() -> None:
    assert soon(at(9), own="maint_1") == {}
