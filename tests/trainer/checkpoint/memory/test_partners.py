"""Which slot is sent to partners, when the next one may be, and how many copies fit."""

import os
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from orchestrator.agent.memory.slots import MemorySlots
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan
from orchestrator.contract.memory.slot_file import NOT_SENT, SENT, set_mark
from tests.agent.processes.test_torchrun import START
from trainer.checkpoint.memory.agreement import Room, agreed_copies
from trainer.checkpoint.memory.partners import Partners
from trainer.checkpoint.memory.slot import Slot

GIB = 1 << 30


@pytest.fixture
def memory() -> Iterator[MemorySlots]:
    memory = MemorySlots()
    yield memory
    memory.close()


def made(step: int) -> Made:
    return Made(step=step, attempt=1)


def test_one_slot_is_sent_at_a_time_and_counts_once_all_ranks_have_sent_it(
    memory: MemorySlots,
) -> None:
    paths = memory.of_attempt(replace(START, ranks_per_host=1), CopyPlan()).slots[0]
    first, second, *_ = (Slot(path) for path in paths)
    for path in paths:
        os.truncate(path, 4096)  # ranks have reserved their memory
    told: list[tuple[int, Slot, int]] = []
    partners = Partners(2, lambda *said: told.append(said), made(3))
    assert partners.has_ended
    partners.begin(first, made(5))
    partners.announce(done=4)
    assert told == [], "the slot is not complete yet"
    partners.announce(done=5)
    partners.announce(done=6)
    assert told == [(5, first, 2)] * 2, "the message may be lost, so it is repeated"
    partners.begin(second, made(6))
    assert partners.slot is first
    assert not partners.has_ended
    file = memory.file(0, 0)
    assert file is not None
    set_mark(file, SENT)
    assert partners.has_ended
    partners.announce(done=6)
    assert len(told) == 2, "nothing to ask for any more"
    partners.after_step(all_ended=False, failed=False)
    assert (partners.slot, partners.shared) == (first, made(3)), "another rank has not ended"
    partners.after_step(all_ended=True, failed=False)
    assert (partners.slot, partners.shared) == (None, made(5))
    partners.begin(second, made(7))
    other = memory.file(0, 1)
    assert other is not None
    set_mark(other, NOT_SENT)
    assert partners.has_failed
    partners.after_step(all_ended=True, failed=True)
    assert (partners.slot, partners.shared) == (None, made(5)), "not all ranks have step 7"


def room(available: int, **changes: int) -> Room:
    known = {"local_ranks": 2, "slot_bytes": GIB, "num_reserved": 0, "held_bytes": 0, "partners": 2}
    return Room(host="h", available=available * GIB, **{**known, **changes})


def test_copies_are_fewer_where_memory_is_short() -> None:
    asked = [
        # Two ranks: 4 own slots and 2 copies per partner of 1 GiB each.
        (room(16), 2, ""),
        (room(15), 1, "less than 2 copies of each on other hosts: they need 16.0 GiB on h"),
        (room(12), 1, "less than 2"),
        (room(11), 0, "less than 1 copy of each on other hosts: they need 12.0 GiB on h"),
        (room(6), 0, "less than 1 copy"),
        (room(5), -1, "no checkpoints in memory: they need 6.0 GiB on h, and 5.0 GiB are"),
        # In a later attempt most of the memory is taken already.
        (room(0, num_reserved=4, held_bytes=8 * GIB), 2, ""),
        (room(3, num_reserved=4, held_bytes=4 * GIB), 1, "less than 2"),
    ]
    for one, copies, why in asked:
        found, said = agreed_copies([room(99), one])
        assert (found, said[: len(why)]) == (copies, why), one


def test_hosts_make_room_for_the_largest_slot_of_any_rank() -> None:
    large = room(99, slot_bytes=3 * GIB, partners=1)
    assert agreed_copies([large, room(19, partners=1)])[0] == 0
    assert agreed_copies([large, room(20, partners=1)])[0] == 1


def test_all_ranks_make_as_many_copies_as_the_host_with_the_fewest_partners() -> None:
    copies, why = agreed_copies([room(99), room(99, partners=1)])
    assert copies == 1
    assert "1 in place of 2 copies of each on other hosts" in why
