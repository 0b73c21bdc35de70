"""Which slot is sent to partners, and when the next one may be."""

import os
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from orchestrator.agent.memory.slots import MemorySlots
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan
from orchestrator.contract.memory.slot_file import NOT_SENT, SENT, set_mark
from tests.agent.processes.test_torchrun import START
from trainer.checkpoint.memory.partners import Partners
from trainer.checkpoint.memory.slot import Slot


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
