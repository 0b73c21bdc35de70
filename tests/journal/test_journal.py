"""The journal: whole lines, one writer, and recovery after a crash or a full disk."""

import errno
import fcntl
import json
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ndctl.rank.fence import GivenUp
from orchestrator.contract.files.fence import Fence, check_leader, write_fence
from orchestrator.contract.messages.actions import StopAttempt
from orchestrator.contract.messages.events import CancelRequested, Event, RankExited, Tick
from orchestrator.errors import JobError
from orchestrator.journal import journal as log
from orchestrator.journal.journal import (
    DAMAGED,
    MOST_LINES,
    Entry,
    Journal,
    Tail,
    complete_length,
    entries_of,
    from_line,
    has_writer,
    read,
    to_line,
)
from orchestrator.journal.supervisor import Supervisor
from orchestrator.system import SystemClock
from tests.job.job_driver import Job, exited, raised, submitted


class FakeClock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def journal(path: Path, clock: FakeClock) -> Iterator[Journal]:
    with Journal(path, clock) as journal:
        yield journal


def tick(at: float) -> Tick:
    return Tick(at=at)


STOP = StopAttempt(attempt=1, grace_s=3.0, reason="a rank ended")


def test_appended_lines_are_read(path: Path, clock: FakeClock) -> None:
    event = raised(1, "Größe falsch\n🏖️  \x00")
    with Journal(path, clock) as journal:
        assert tuple(journal.after()) == ()
        first = journal.append(event, [STOP])
        second = journal.append(tick(2))
    assert first == Entry(seq=1, event=event, actions=(STOP,))
    assert read(path) == (first, second)
    assert path.read_bytes().count(b"\n") == 2
    with Journal(path, clock) as again:
        assert tuple(again.after()) == (first, second)
        assert again.append(tick(3)).seq == 3
    assert [entry.seq for entry in read(path)] == [1, 2, 3]


def test_every_kind_of_line_reads_as_it_was_written() -> None:
    job = Job(spares=1).running()
    job.hangs()
    job.shows("host-0")
    job.loses("host-1")
    job.saves(20)
    job.cancelled()
    for seq, (event, actions) in enumerate(job.all, 1):
        entry = Entry(seq=seq, event=event, actions=actions)
        assert from_line(to_line(entry)) == entry
        assert to_line(entry).endswith(b"}\n")


def test_a_journal_that_does_not_exist_is_empty(path: Path) -> None:
    assert read(path) == ()
    assert not path.exists()


def test_an_incomplete_line_is_ignored_and_removed_by_the_next_writer(
    path: Path, clock: FakeClock
) -> None:
    with Journal(path, clock) as journal:
        kept = journal.append(tick(1))
    whole = path.read_bytes()
    line = to_line(Entry(seq=2, event=tick(2), actions=()))
    for length in range(1, len(line)):
        path.write_bytes(whole + line[:length])
        assert read(path) == (kept,)
    with Journal(path, clock) as journal:
        assert tuple(journal.after()) == (kept,)
        assert path.read_bytes() == whole
        assert journal.append(tick(2)).seq == 2
    assert path.read_bytes() == whole + line


@pytest.mark.parametrize(
    "damage",
    [
        b"not json",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"v":1,"seq":2,"event":{"kind":"Meteor","at":1},"actions":[]}',
        b'{"v":1,"seq":2,"event":{"kind":"Tick"},"actions":[]}',
    ],
)
def test_a_damaged_line_is_an_error_with_its_number(
    path: Path, clock: FakeClock, damage: bytes
) -> None:
    good = [to_line(Entry(seq=n, event=tick(n), actions=())) for n in (1, 3)]
    path.write_bytes(good[0] + damage + b"\n" + good[1] + b'{"torn')
    with pytest.raises(JobError, match=f"{path}: journal line 2 cannot be read"):
        read(path)
    with Journal(path, clock) as journal, pytest.raises(JobError, match="journal line 2 cannot"):
        Supervisor(journal)
    assert path.read_bytes() == good[0] + damage + b"\n" + good[1]
    path.write_bytes(before := good[0] + damage + b"\n")
    with pytest.raises(JobError, match="the last journal line cannot be read"):
        Journal(path, clock)
    assert path.read_bytes() == before
    assert not has_writer(path), "the lock is not kept"


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"kind": "Meteor", "at": 1}, "unknown kind 'Meteor'"),
        ({"kind": "Tick", "at": 1, "size": 2}, "size: unknown key"),
        ({"kind": "Tick", "at": "noon"}, "at: must be a finite number, got 'noon'"),
    ],
)
def test_a_line_that_cannot_be_read_has_one_fix(
    path: Path, event: dict[str, Any], why: str
) -> None:
    path.write_text(json.dumps({"v": 1, "seq": 1, "event": event, "actions": []}) + "\n")
    with pytest.raises(JobError) as caught:
        read(path)
    assert caught.value.message == f"{path}: journal line 1 cannot be read: {why}"
    assert caught.value.fix.startswith("read it with the ndctl that wrote it; ")


def test_a_journal_of_another_version_says_so(path: Path) -> None:
    body = json.loads(to_line(Entry(seq=1, event=tick(1), actions=())))
    path.write_text(json.dumps(body | {"v": 2}) + "\n")
    with pytest.raises(JobError, match="journal version 2, this ndctl reads 1"):
        read(path)


def test_a_second_writer_is_refused_after_a_while(journal: Journal, clock: FakeClock) -> None:
    with pytest.raises(JobError, match="is being written by another process") as caught:
        Journal(journal.path, clock)
    assert "ndctl status" in caught.value.fix
    assert log.LOCK_PATIENCE_S <= clock.at < log.LOCK_PATIENCE_S + 1
    journal.append(tick(1))


def test_a_writer_waits_for_a_process_that_tests_the_lock(path: Path) -> None:
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)

    class Asking(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.at > 1:
                fcntl.flock(fd, fcntl.LOCK_UN)

    with Journal(path, Asking()) as journal:
        journal.append(tick(1))
    os.close(fd)


def test_another_process_can_see_whether_the_journal_has_a_writer(
    path: Path, clock: FakeClock
) -> None:
    assert not has_writer(path)
    with Journal(path, clock):
        assert has_writer(path)
    assert not has_writer(path)
    assert path.exists()


class Disk:
    """`os` for the journal, with a disk that fails as configured."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.broken: set[str] = set()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _check(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise OSError(errno.EIO, f"{name} failed")

    def write(self, fd: int, data: bytes) -> int:
        self._check("write")
        return os.write(fd, data if self.room is None else data[: self.room])

    def fsync(self, fd: int) -> None:
        self._check("fsync")
        os.fsync(fd)

    def ftruncate(self, fd: int, size: int) -> None:
        self._check("ftruncate")
        os.ftruncate(fd, size)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(log, "os", disk)
    return disk


@pytest.mark.parametrize("fault", ["room", "write", "fsync"])
def test_a_failed_write_of_a_line_leaves_no_trace(journal: Journal, disk: Disk, fault: str) -> None:
    journal.append(tick(1))
    before = journal.path.read_bytes()
    disk.broken, disk.room = {fault}, 10 if fault == "room" else None
    for _ in range(2):
        with pytest.raises(OSError, match=r"part of a line|failed"):
            journal.append(tick(2))
        assert journal.path.read_bytes() == before
    disk.broken, disk.room = set(), None
    assert journal.append(tick(2)).seq == 2
    assert len(read(journal.path)) == 2


BATCH = [(tick(n), (STOP,) if n == 4 else ()) for n in range(2, 5)]
"""Only the last event has an action, as in a batch of `Supervisor.take`."""


def test_several_lines_are_written_in_one_write(path: Path, clock: FakeClock, disk: Disk) -> None:
    checks = []
    with Journal(path, clock, guard=lambda: checks.append("checked")) as journal:
        journal.append(tick(1))
        disk.calls.clear()
        checks.clear()
        written = journal.extend(BATCH)
        assert [entry.seq for entry in written] == [2, 3, 4]
        assert (checks, disk.calls) == (["checked"], ["write", "fsync"])
        assert read(path)[1:] == written
        assert journal.append(tick(5)).seq == 5
    assert [entry.seq for entry in read(path)] == [1, 2, 3, 4, 5]


def test_after_a_crash_the_complete_lines_are_kept(path: Path, clock: FakeClock) -> None:
    with Journal(path, clock) as journal:
        journal.append(tick(1))
        size_before = len(path.read_bytes())
        journal.extend(BATCH)
    data = path.read_bytes()
    for length in range(size_before, len(data) + 1):
        path.write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        assert [entry.seq for entry in read(path)] == [1, 2, 3, 4][:whole]
        with Journal(path, clock) as journal:
            assert journal.append(tick(9)).seq == whole + 1
        assert [entry.seq for entry in read(path)] == list(range(1, whole + 2))


def test_lines_after_zeros_of_a_crash_are_ignored(path: Path, clock: FakeClock) -> None:
    with Journal(path, clock) as journal:
        kept = journal.append(tick(1))
        whole = path.read_bytes()
        journal.extend(BATCH)
    data = path.read_bytes()
    for first in range(len(whole), len(data) - 1, 7):
        path.write_bytes(data[:first] + bytes(len(data) - 1 - first) + data[-1:])
        assert read(path)[:1] == (kept,)
        with Journal(path, clock) as journal:
            assert journal.seq == data[:first].count(b"\n")
            assert b"\0" not in path.read_bytes()


def test_what_can_be_read_behind_zeros_is_kept_in_a_file(path: Path, clock: FakeClock) -> None:
    with Journal(path, clock) as journal:
        journal.append(tick(1))
        hole = path.stat().st_size
        journal.extend([(tick(2), ()), (tick(3), ())])
    data = path.read_bytes()
    path.write_bytes(data[:hole] + bytes(20) + data[hole + 20 :])
    with Journal(path, clock):
        pass
    assert path.read_bytes() == data[:hole]
    assert path.with_name(DAMAGED).read_bytes() == data[hole + 20 :]


def test_zeros_further_back_than_one_write_are_damage(path: Path, clock: FakeClock) -> None:
    with Journal(path, clock) as journal:
        journal.append(tick(1))
        hole = path.stat().st_size
        journal.append(tick(2))
        journal.extend([(tick(n), ()) for n in range(MOST_LINES)])
    data = bytearray(path.read_bytes())
    data[hole + 3] = 0
    path.write_bytes(data)
    with Journal(path, clock) as journal:
        for reads in (partial(read, path), partial(tuple, journal.after())):
            with pytest.raises(JobError, match="journal line 2 cannot be read"):
                reads()
    assert path.read_bytes() == data


@pytest.mark.parametrize("hole", [0, 1, 255, 256, 400])
def test_only_the_end_of_a_large_journal_is_read_for_repair(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, hole: int
) -> None:
    """For any size of the part that is read first, and any start of the zeros."""
    lines = [to_line(Entry(seq=n, event=tick(n), actions=())) for n in range(1, 601)]
    behind = b"".join(lines[600 - hole :]) if hole else b""
    data = b"".join(lines[: 600 - hole]) + (bytes(70_000) + behind if hole else b"")
    for length in (1, 100, 5_000, 1 << 30):
        monkeypatch.setattr(log, "LEAST_READ", length)
        path.write_bytes(data)
        if hole > MOST_LINES:  # zeros this far back are damage and are kept
            with Journal(path, clock) as journal:
                assert (journal.seq, journal.size) == (600, len(data))
            continue
        with Journal(path, clock) as journal:
            assert (journal.seq, journal.size) == (600 - hole, complete_length(data))
        assert path.read_bytes() == data[: complete_length(data)]


@pytest.mark.parametrize("fault", ["room", "write", "fsync"])
def test_a_failed_write_of_several_lines_leaves_none(
    journal: Journal, disk: Disk, fault: str
) -> None:
    journal.append(tick(1))
    before = journal.path.read_bytes()
    disk.broken = {fault}
    disk.room = 2 * len(before) if fault == "room" else None
    with pytest.raises(OSError, match=r"part of a line|failed"):
        journal.extend(BATCH)
    assert journal.path.read_bytes() == before
    disk.broken, disk.room = set(), None
    assert [entry.seq for entry in journal.extend(BATCH)] == [2, 3, 4]


def test_a_file_that_reached_its_size_limit_stays_as_it_was(journal: Journal) -> None:
    """The kernel writes ten bytes of the line and refuses the rest."""
    journal.append(tick(1))
    before = journal.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(OSError, match="only part of a line was written"):
            journal.append(tick(2))
        after = journal.path.read_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert after == before
    journal.append(tick(2))
    assert len(read(journal.path)) == 2


def test_half_a_line_is_removed_before_the_next_write(journal: Journal, disk: Disk) -> None:
    journal.append(tick(1))
    disk.broken, disk.room = {"ftruncate"}, 10
    for _ in range(2):
        with pytest.raises(OSError, match="ftruncate failed"):
            journal.append(tick(2))
    assert len(read(journal.path)) == 1
    disk.broken, disk.room = set(), None
    journal.append(tick(2))
    assert [entry.event for entry in read(journal.path)] == [tick(1), tick(2)]


def test_a_tail_reads_the_lines_added_since_the_last_read(journal: Journal) -> None:
    tail = Tail(journal.path)
    assert tail.more() == ()
    first, second = journal.append(submitted()), journal.append(exited(1))
    assert tail.more() == (first, second)
    assert tail.more() == ()
    line = to_line(Entry(seq=3, event=CancelRequested(at=1, by="ann"), actions=()))
    with journal.path.open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert tail.more() == ()
        file.write(line[20:])
    assert [entry.seq for entry in tail.more()] == [3]
    with journal.path.open("ab") as file:
        file.write(b"damage\n")
    for _ in range(2):
        with pytest.raises(JobError, match="line 4 cannot"):
            tail.more()


def test_a_tail_may_wait_for_a_journal_to_be_created(path: Path, clock: FakeClock) -> None:
    tail = Tail(path)
    assert tail.more() == ()
    with Journal(path, clock) as journal:
        journal.append(tick(1))
    assert len(tail.more()) == 1


def test_a_replaced_writer_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    fence = tmp_path / "fence.json"
    write_fence(fence, Fence(leader="mine", attempt=1))
    guard = partial(check_leader, fence, "mine")
    path = tmp_path / "journal.jsonl"
    with Journal(path, SystemClock(), guard=guard) as journal:
        journal.append(Tick(at=1.0))
        before = path.read_bytes()
        write_fence(fence, Fence(leader="another", attempt=1))
        with pytest.raises(GivenUp):
            journal.append(Tick(at=2.0))
    assert path.read_bytes() == before


def test_entries_of_a_kind_and_an_attempt_are_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    text = '{"kind":"RankExited","attempt":1,'
    events: list[Event] = [
        submitted(2),
        exited(0, 1),
        exited(1, 12),
        raised(2, text, 2),
        CancelRequested(at=3.0, by=text),
    ]
    lines = [to_line(Entry(seq=seq, event=one, actions=())) for seq, one in enumerate(events, 1)]
    path.write_bytes(b"".join(lines) + lines[1][:-1])
    assert [entry.event for entry in entries_of(path, RankExited)] == events[1:4]
    assert [entry.event for entry in entries_of(path, RankExited, attempt=1)] == events[1:2]
    assert [entry.seq for entry in entries_of(path, CancelRequested, RankExited)] == [2, 3, 4, 5]
    assert not list(entries_of(tmp_path / "none", RankExited))


def test_an_action_for_the_next_attempt_does_not_select_the_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    exit_event, order = exited(0, 1), StopAttempt(attempt=2, grace_s=3.0, reason="the next one")
    path.write_bytes(to_line(Entry(seq=1, event=exit_event, actions=(order,))))
    assert not list(entries_of(path, RankExited, attempt=2))
    assert [entry.event for entry in entries_of(path, RankExited, attempt=1)] == [exit_event]


def test_entries_after_zeros_are_not_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = [to_line(Entry(seq=n, event=exited(n, 1), actions=())) for n in range(1, 4)]
    path.write_bytes(lines[0] + b"\0" * 9 + lines[1][9:] + lines[2])
    assert [entry.seq for entry in entries_of(path, RankExited)] == [1]
