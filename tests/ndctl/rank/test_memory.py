"""A script's state in the memory of its host: complete on all ranks, or not used."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ndctl
from ndctl.rank.agreement import Ranks
from ndctl.rank.link import Link
from ndctl.rank.memory import kept as module
from ndctl.rank.memory import slots as memory_slots
from ndctl.rank.memory.available import HostRoom
from ndctl.rank.memory.kept import Kept
from ndctl.rank.memory.slots import NOT_SENT, ROOM, SENT, Memory, Slot
from orchestrator.agent.memory.digest import is_sound
from orchestrator.contract.memory import slot_file
from orchestrator.contract.memory.slot_file import Label
from tests.ndctl.rank.many_ranks import World, place_in

SIZE = 2


class Host:
    """The agent of one host: it owns the slots of its ranks, which outlive them."""

    def __init__(self, slots: int = 3, copies: int = 0) -> None:
        self.files = [[os.memfd_create("slot") for _ in range(slots)] for _ in range(SIZE)]
        self.copies, self.lineage, self.resumed = copies, 1, ()
        self.restored: memory_slots.Made | None = None
        self.told: list[dict[str, Any]] = []

    def start(self, attempt: int, size: int = SIZE) -> tuple[World, list[Kept]]:
        """The ranks of an attempt."""
        return World(size), [self._rank(rank, attempt, size) for rank in range(size)]

    def _rank(self, rank: int, attempt: int, size: int) -> Kept:
        environ = {"RANK": str(rank), "WORLD_SIZE": str(size), "NDCTL_ATTEMPT": str(attempt)}
        link = Link(environ)
        link.send = self.told.append  # type: ignore[method-assign, assignment]
        paths = [f"/proc/self/fd/{file}" for file in self.files[rank]]
        memory = Memory(self.lineage, paths, self.resumed, self.restored, self.copies)
        return Kept(link, memory, [Slot(path) for path in paths])

    def close(self) -> None:
        for file in (file for files in self.files for file in files):
            os.close(file)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {"step": step, "w": torch.full((1000,), float(step)) + rank, "lr": 0.1 / (1 + step)}


def save(world: World, kept: list[Kept], step: int) -> list[Any]:
    def work(ranks: Ranks) -> bool:
        state = state_of(step, ranks.rank)
        return kept[ranks.rank].save(ranks, step, state, 20.0)

    return world.together(work)


def load(world: World, kept: list[Kept], folder: Path) -> list[Any]:
    return world.together(lambda ranks: kept[ranks.rank].load(ranks, place_in(folder)))


def assert_state(found: Any, step: int, rank: int) -> None:
    assert found[0] == step
    expected = state_of(step, rank)
    assert torch.equal(found[1]["w"], expected["w"])
    assert (found[1]["step"], found[1]["lr"]) == (step, expected["lr"])


def test_a_new_process_gets_the_newest_state_bit_by_bit(host: Host, tmp_path: Path) -> None:
    world, kept = host.start(1)
    for step in range(1, 8):
        assert save(world, kept, step) == [True, True]
    assert host.told[0] == {"kind": "TrainingResumed", "attempt": 1, "step": 0}
    world, kept = host.start(2)
    for rank, found in enumerate(load(world, kept, tmp_path)):
        assert_state(found, 7, rank)
    assert {"attempt": 2, "step": 7, "in_memory": True}.items() <= host.told[-1].items()
    assert save(world, kept, 8) == [True, True]
    host.resumed = ((7, 2),)  # type: ignore[assignment]
    world, kept = host.start(3)
    assert [found[0] for found in load(world, kept, tmp_path)] == [8, 8]


def test_at_any_moment_all_ranks_have_one_step(host: Host, tmp_path: Path) -> None:
    """Rank 1 dies while it writes, and rank 0 has written already."""
    world, kept = host.start(1)
    for step in range(1, 6):
        save(world, kept, step)
        _, others = host.start(2)
        slot = kept[0]._to_overwrite()
        assert slot is not None
        slot.write(lambda file: file.write(b"half"))
        fresh, _ = host.start(2)
        assert [found[0] for found in load(fresh, others, tmp_path)] == [step, step]


def test_a_rank_that_dies_between_the_agreement_and_its_mark_costs_one_step(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, kept = host.start(1)
    save(world, kept, 1)
    save(world, kept, 2)
    complete = Slot.complete

    def dies(slot: Slot, header: memory_slots.Header) -> None:
        if header.rank == 1:
            raise KeyboardInterrupt
        complete(slot, header)

    monkeypatch.setattr(Slot, "complete", dies)
    save(world, kept, 3)
    world, kept = host.start(2)
    assert [found[0] for found in load(world, kept, tmp_path)] == [2, 2]


def test_agents_read_whose_checkpoint_a_slot_has(host: Host) -> None:
    world, kept = host.start(1)
    save(world, kept, 3)
    labels = [label for file in host.files[1] if (label := slot_file.label_of(file)) is not None]
    (label,) = labels
    assert isinstance(label, Label)
    assert (label.made.step, label.made.attempt, label.rank, label.ranks) == (3, 1, 1, 2)
    assert (memory_slots.BEGIN.format, memory_slots.MARK_AT) == (
        slot_file.BEGIN.format,
        slot_file.MARK_AT,
    )
    marks = (slot_file.SENDING, slot_file.SENT, slot_file.NOT_SENT)
    assert marks == (memory_slots.SENDING, SENT, NOT_SENT)


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_flipped_bit_is_noticed_by_all_ranks(host: Host, tmp_path: Path, rank: int) -> None:
    world, kept = host.start(1)
    save(world, kept, 4)
    save(world, kept, 5)
    newest = kept[rank].common
    assert newest is not None
    byte = os.pread(newest.file, 1, ROOM + 700)
    os.pwrite(newest.file, bytes([byte[0] ^ 4]), ROOM + 700)
    world, kept = host.start(2)
    assert [found[0] for found in load(world, kept, tmp_path)] == [4, 4]


@pytest.mark.parametrize("has_numpy", [True, False])
def test_agents_check_what_a_script_keeps(
    host: Host, monkeypatch: pytest.MonkeyPatch, *, has_numpy: bool
) -> None:
    world, kept = host.start(1)
    with monkeypatch.context() as patch:
        if not has_numpy:
            patch.setattr(memory_slots, "sys", SimpleNamespace(modules={}))
        save(world, kept, 4)
    newest = kept[1].common
    assert newest is not None
    length = len(slot_file.header_of(newest.file) or b"")
    assert is_sound(newest.file, length)
    byte = os.pread(newest.file, 1, ROOM + 700)
    os.pwrite(newest.file, bytes([byte[0] ^ 4]), ROOM + 700)
    assert not is_sound(newest.file, length)


def test_steps_of_another_line_of_training_are_not_used(host: Host, tmp_path: Path) -> None:
    world, kept = host.start(1)
    save(world, kept, 4)
    host.lineage = 2
    assert load(*host.start(3), tmp_path) == [None, None]
    host.lineage, host.resumed = 1, ((3, 2),)  # type: ignore[assignment]
    assert load(*host.start(3), tmp_path) == [None, None], "step 4 was trained again since"


def test_another_number_of_ranks_starts_from_the_disk(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, kept = host.start(1)
    save(world, kept, 4)
    assert load(*host.start(2, size=1), tmp_path) == [None]
    assert "step 4 in memory is of 2 ranks, and this job has 1 now" in capsys.readouterr().err


def test_a_newer_checkpoint_on_the_disk_is_preferred(host: Host, tmp_path: Path) -> None:
    from tests.ndctl.rank.test_saving import one_file

    world, kept = host.start(1)
    save(world, kept, 4)
    World(2).together(lambda ranks: one_file(ranks, tmp_path, step=4))
    assert [found[0] for found in load(*host.start(2), tmp_path)] == [4, 4]
    World(2).together(lambda ranks: one_file(ranks, tmp_path, step=5))
    assert load(*host.start(2), tmp_path) == [None, None]


def test_a_host_without_room_keeps_nothing_and_says_so_once(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, kept = host.start(1)
    monkeypatch.setattr(memory_slots, "host_room", lambda: HostRoom(1 << 30, 1 << 20))
    assert save(world, kept, 1) == [False, False]
    said = capsys.readouterr().err
    assert "keeps nothing: rank" in said
    assert "less than 64 MiB left" in said
    assert all(os.fstat(file).st_size == 0 for files in host.files for file in files)
    assert all(one.warned for one in kept)


def test_ranks_that_save_different_steps_get_an_error(host: Host) -> None:
    world, kept = host.start(1)

    def work(ranks: Ranks) -> bool:
        return kept[ranks.rank].save(ranks, 5 + ranks.rank, {}, 20.0)

    for result in world.together(work):
        assert isinstance(result, RuntimeError)
        assert "rank 0 saves step 5, and rank 1 saves step 6" in str(result)


def test_a_slot_that_is_being_sent_is_not_overwritten() -> None:
    host = Host(slots=4, copies=1)
    try:
        world, kept = host.start(1)
        for step in range(1, 9):
            assert save(world, kept, step) == [True, True]
            sent = kept[0].sending
            assert sent is not None
            header = sent.header()
            assert header is not None
            assert header.made == (1, 1)
        told = [one for one in host.told if one["kind"] == "CopyReady" and one["rank"] == 0]
        assert {(one["step"], one["slot"], one["copies"]) for one in told} == {(1, 0, 1)}
        for each in kept:
            assert each.sending is not None
            slot_file.set_mark(each.sending.file, SENT)
        assert save(world, kept, 9) == [True, True]
        assert [(each.sent, each.shared) for each in kept] == [((9, 1), (1, 1))] * 2
    finally:
        host.close()


def test_a_copy_that_failed_on_one_host_is_not_taken_for_shared() -> None:
    host = Host(slots=4, copies=1)
    try:
        world, kept = host.start(1)
        save(world, kept, 1)
        for each, mark in zip(kept, (SENT, NOT_SENT), strict=True):
            assert each.sending is not None
            slot_file.set_mark(each.sending.file, mark)
        save(world, kept, 2)
        assert [(each.sent, each.shared) for each in kept] == [((2, 1), None)] * 2
    finally:
        host.close()


def test_what_hosts_have_fetched_from_partners_is_shared(host: Host, tmp_path: Path) -> None:
    world, kept = host.start(1)
    save(world, kept, 4)
    host.restored = (4, 1)
    world, kept = host.start(2)
    load(world, kept, tmp_path)
    assert [each.shared for each in kept] == [(4, 1)] * 2


def test_without_torch_a_state_is_pickled(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, kept = host.start(1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_has_torch", lambda: False)
        world.together(lambda ranks: kept[ranks.rank].save(ranks, 2, {"r": ranks.rank}, 20.0))
    world, kept = host.start(2)
    assert load(world, kept, tmp_path) == [(2, {"r": 0}), (2, {"r": 1})]


def test_large_states_are_written_in_parts(host: Host, tmp_path: Path) -> None:
    world, kept = host.start(1)
    big = torch.arange(9 << 20, dtype=torch.int32)
    world.together(lambda ranks: kept[ranks.rank].save(ranks, 1, big + ranks.rank, 60.0))
    world, kept = host.start(2)
    for rank, (step, found) in enumerate(load(world, kept, tmp_path)):
        assert step == 1
        assert torch.equal(found, big + rank)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Sets the environment of a script of one rank."""

    def set_to(environ: dict[str, str]) -> None:
        monkeypatch.setattr(os, "environ", environ)
        link = Link(environ)
        monkeypatch.setattr(module, "current", lambda: link)
        module._kept.cache_clear()

    yield set_to
    module._kept.cache_clear()


def test_without_ndctl_nothing_is_kept_and_that_is_said_once(
    alone: Callable[[dict[str, str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    alone({})
    assert ndctl.load_from_memory() is None
    assert ndctl.save_in_memory(1, {}) is False
    assert ndctl.save_in_memory(2, {}) is False
    said = "ndctl: ndctl.save_in_memory keeps nothing: this job keeps no checkpoints in memory\n"
    assert capsys.readouterr().err == said


def test_an_agent_that_has_ended_is_reported(
    alone: Callable[[dict[str, str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    memory = {"lineage": 0, "slots": [["/proc/self/fd/999"]]}
    alone({"NDCTL_MEMORY": json.dumps(memory), "NDCTL_HEARTBEAT_SOCKET": "/nowhere"})
    assert ndctl.load_from_memory() is None
    assert ndctl.save_in_memory(1, {}) is False
    assert "cannot be opened" in capsys.readouterr().err


@pytest.mark.parametrize("step", [-1, True, 1.5, "3"])
def test_a_step_that_is_none_is_refused(step: Any) -> None:
    with pytest.raises(ValueError, match="give the number of steps done"):
        ndctl.save_in_memory(step, {})


def test_the_agents_variable_is_read() -> None:
    from orchestrator.contract.codec import encode
    from orchestrator.contract.files.checkpoint_names import Made
    from orchestrator.contract.memory.peers import HostMemory

    written = HostMemory(
        lineage=3,
        slots=(("/a", "/b"), ("/c", "/d")),
        resumed=(Made(step=4, attempt=2),),
        restored=Made(step=5, attempt=2),
        copies=1,
    )
    found = Memory.of(json.dumps(encode(written)), 1)
    assert found == Memory(3, ["/c", "/d"], [(4, 2)], (5, 2), 1)
