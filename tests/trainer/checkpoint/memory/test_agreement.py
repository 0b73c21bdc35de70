"""Whether checkpoints in memory are kept, and with how many copies, by the memory of all hosts."""

from typing import Any

import pytest

from ndctl.rank.memory.available import HostRoom
from orchestrator.contract.spec.job_spec import MemoryCheckpointSpec
from trainer.checkpoint.memory.agreement import Agreed, Room, agree

GIB = 1 << 30
ON, AUTO = MemoryCheckpointSpec(every="on"), MemoryCheckpointSpec(every="auto")


def host(
    available: float, *, name: str = "h", machine: str = "", total: float = 0.0, **changes: Any
) -> list[Room]:
    """The two ranks of a host, with slots of 1 GiB. `available` in GiB; `total` is 0 if nothing is
    left free, as in tests of what fits at all."""
    known = {"slot_bytes": GIB, "reserved_bytes": 0, "held_bytes": 0, "partners": 2}
    memory = HostRoom(int(total * GIB), int((available + 0.1 * total) * GIB))
    room = Room(host=name, machine=machine or name, memory=memory, **{**known, **changes})
    return [room, room]


PLENTY = host(9999, name="other")


@pytest.mark.parametrize(
    ("rooms", "copies", "why"),
    [
        # Two ranks: 4 own slots and 2 copies per partner of 1 GiB each.
        (host(16), 2, ""),
        (host(15), 1, "less than 2 copies of each on other hosts: they need 16.0 GiB on h"),
        (host(12), 1, "less than 2"),
        (host(11), 0, "less than 1 copy of each on other hosts: they need 12.0 GiB on h"),
        (host(6), 0, "less than 1 copy"),
        (host(5), None, "they need 6.0 GiB on h, and 5.0 GiB are available"),
        # In a later attempt most of the memory is taken already.
        (host(0, reserved_bytes=4 * GIB, held_bytes=8 * GIB), 2, ""),
        (host(3, reserved_bytes=4 * GIB, held_bytes=4 * GIB), 1, "less than 2"),
    ],
)
def test_copies_are_fewer_where_memory_is_short(
    rooms: list[Room], copies: int | None, why: str
) -> None:
    found = agree(ON, [*PLENTY, *rooms])
    assert (found.copies, found.why[: len(why)]) == (copies, why)


@pytest.mark.parametrize(
    ("gib", "copies", "why"),
    [
        # 16, 12 and 6 GiB, as above, may each be a quarter of what can be used.
        (64, 2, ""),
        (
            63,
            1,
            "less than 2 copies of each on other hosts: they take 16.0 GiB on h, more than 25%",
        ),
        (48, 1, "less than 2"),
        (47, 0, "less than 1 copy of each on other hosts: they take 12.0 GiB on h"),
        (24, 0, "less than 1 copy"),
        (23, None, "they take 6.0 GiB on h, more than 25% of the 23.0 GiB that can be used there"),
    ],
)
def test_by_default_they_take_a_quarter_of_what_a_host_can_use(
    gib: float, copies: int | None, why: str
) -> None:
    assert agree(ON, [*PLENTY, *host(gib)]).copies == 2
    found = agree(AUTO, [*PLENTY, *host(gib)])
    assert (found.copies, found.why[: len(why)]) == (copies, why)


def test_without_partners_the_default_keeps_the_host_s_own_or_nothing() -> None:
    assert agree(AUTO, host(24, partners=0)) == Agreed(copies=0, host_bytes=6 * GIB)
    assert agree(AUTO, host(23, partners=0)).copies is None


def test_what_a_host_has_reserved_counts_as_usable() -> None:
    """A later attempt decides as the first one."""
    assert agree(AUTO, host(64 - 16, reserved_bytes=4 * GIB, held_bytes=8 * GIB)).copies == 2
    assert agree(AUTO, host(63 - 16, reserved_bytes=4 * GIB, held_bytes=8 * GIB)).copies == 1


def test_a_tenth_of_the_memory_of_a_host_or_its_control_group_stays_free() -> None:
    assert agree(ON, host(16, total=1000)).copies == 2
    assert agree(ON, host(15.9, total=1000)).copies == 1


def test_hosts_of_one_machine_share_its_memory() -> None:
    """As the agents of `backend: local`."""
    four = [room for n in range(4) for room in host(64, name=f"h{n}", machine="m", partners=1)]
    assert agree(ON, four).copies == 1
    found = agree(AUTO, four)
    assert (found.copies, found.host_bytes) == (None, 0)
    assert "they take 24.0 GiB on the machine of h0 to h3" in found.why
    apart = [room for n in range(4) for room in host(64, name=f"h{n}", partners=1)]
    assert agree(AUTO, apart) == Agreed(copies=1, host_bytes=12 * GIB)


def test_hosts_make_room_for_the_largest_slot_of_any_rank() -> None:
    large = host(99, name="large", slot_bytes=3 * GIB, partners=1)
    assert agree(ON, [*large, *host(19, partners=1)]).copies == 0
    found = agree(ON, [*large, *host(20, partners=1)])
    assert (found.copies, found.host_bytes) == (1, 2 * (4 + 2) * 3 * GIB)


def test_all_ranks_make_as_many_copies_as_the_host_with_the_fewest_partners() -> None:
    found = agree(ON, [*PLENTY, *host(99, partners=1)])
    assert found.copies == 1
    assert "1 in place of 2 copies of each on other hosts" in found.why
