"""Compaction of the strike file drops lines that have no effect, and survives a kill."""

import fcntl
import os
import signal
import stat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.host_strikes import (
    HALF_LIFE_S,
    STRAGGLER,
    Cleared,
    Line,
    Pinned,
    Strike,
    Unpinned,
    Withdrawn,
    fold,
    lines_in,
    path_of,
    recall,
    record,
    to_line,
)
from orchestrator.leader.records import strike_compaction, strike_writer
from orchestrator.leader.records.strike_compaction import KEPT_S, needed, shed

NOW = 1_800_000_000.0
DAY = HALF_LIFE_S
OLD = NOW - KEPT_S - 1


def strike(at: float = NOW, host: str = "node1", kind: str = "host-lost") -> Strike:
    return Strike(at=at, host=host, job=f"job-{at}", attempt=1, kind=kind, cause="silent")


def withdrawn(found: Strike) -> Withdrawn:
    return Withdrawn(
        at=found.at + 5,
        host=found.host,
        job=found.job,
        attempt=found.attempt,
        kind=found.kind,
        submitted=found.at,
    )


def kept(*lines: Line, now: float = NOW) -> list[Line]:
    texts = [to_line(line)[:-1] for line in lines]
    return [line for text in needed(texts, now) for line in lines_in(text)]


def pinned(at: float, use: Literal["never", "always"] = "never") -> Pinned:
    return Pinned(at=at, host="node1", use=use, by="ann", reason="her reasons")


def test_a_strike_is_kept_until_its_weight_is_zero() -> None:
    young = strike(NOW - KEPT_S + 1)
    assert kept(strike(OLD), young) == [young]


def test_strikes_that_decide_how_long_a_host_is_excluded_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strike_compaction, "KEPT_S", DAY)
    many = [strike(NOW - 1.2 * DAY - n) for n in range(4)]
    assert fold(many, NOW)[0].excluded_until is not None
    assert kept(*many) == many
    assert kept(*many, now=NOW + 2 * DAY) == [], "the host is used again"
    month = [strike(NOW - 30 * DAY), *(strike(NOW - n) for n in range(2))]
    assert fold(month, NOW)[0].excluded_until is not None
    assert kept(*month) == month[1:], "these two alone exclude it as long"


def test_a_withdrawn_strike_is_shed_and_its_withdrawal_is_kept() -> None:
    """A leader that repeats an action may write the strike again."""
    found = strike()
    assert kept(found, withdrawn(found)) == [withdrawn(found)]
    assert kept(found, withdrawn(found), now=NOW + KEPT_S + 6) == []


def test_the_first_straggler_strike_of_a_host_is_kept() -> None:
    """After it, the next straggler strike has full weight."""
    slow = [strike(OLD - n, kind=STRAGGLER) for n in range(3)]
    assert kept(*slow) == [slow[0]]
    again = strike(NOW, kind=STRAGGLER)
    assert fold([*kept(*slow), again], NOW)[0].score == pytest.approx(1.0, abs=1e-4)


def test_pins_and_clearances_are_kept_as_long_as_they_have_an_effect() -> None:
    cleared, unpinned = (
        Cleared(at=OLD, host="node1", by="a"),
        Unpinned(at=OLD, host="node1", by="a"),
    )
    assert kept(pinned(OLD)) == [pinned(OLD)]
    assert kept(pinned(OLD), unpinned, strike(OLD), cleared) == []
    recent: list[Line] = [replace(cleared, at=NOW - DAY), replace(unpinned, at=NOW - DAY)]
    assert kept(*recent) == recent, "a leader may write an older strike later"
    assert kept(strike(NOW - 2 * DAY), *recent) == recent


def test_lines_of_another_version_are_kept_and_torn_lines_are_dropped() -> None:
    other = b'{"warned":{"at":1,"host":"node1"}}'
    assert list(needed([b'{"strike":{"at', other, b"", b"[]", b"7"], NOW)) == [other]


def test_equal_lines_are_kept_once() -> None:
    assert kept(strike(), strike()) == [strike()]


hosts = st.sampled_from(["node1", "node2"])
times = st.one_of(
    st.floats(NOW - 3 * KEPT_S, NOW),
    st.sampled_from([NOW - days * DAY for days in range(0, 20, 4)]),
)
strikes = st.builds(strike, times, hosts, st.sampled_from(["host-lost", STRAGGLER]))
any_line: st.SearchStrategy[Line] = st.one_of(
    strikes,
    st.builds(withdrawn, strikes),
    st.builds(lambda at, host: Cleared(at=at, host=host, by="ann"), times, hosts),
    st.builds(lambda at, host: Unpinned(at=at, host=host, by="ann"), times, hosts),
    st.builds(lambda at, host: replace(pinned(at), host=host), times, hosts),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(any_line, max_size=25), st.lists(any_line, max_size=5), st.floats(0, 20 * DAY))
def test_compaction_does_not_change_which_hosts_are_excluded(
    before: list[Line], recent: list[Line], later: float
) -> None:
    """Now and later, and with lines that are written later."""
    rest = [replace(line, at=max(line.at, NOW - DAY)) for line in recent]
    now = NOW + later

    def scores(lines: list[Line]) -> dict[str, tuple[object, float]]:
        return {
            found.host: (found.pin, round(found.score, 2))
            for found in fold(lines, now)
            if found.pin or found.score > 0.01
        }

    def near(one: dict[str, tuple[object, float]], other: dict[str, tuple[object, float]]) -> bool:
        hosts = {*one, *other}
        pairs = [(one.get(host, (None, 0.0)), other.get(host, (None, 0.0))) for host in hosts]
        return all(a[0] == b[0] and abs(a[1] - b[1]) <= 0.02 for a, b in pairs)

    assert near(scores([*kept(*before), *rest]), scores([*before, *rest]))
    assert kept(*kept(*before)) == kept(*before)


# The file


def a_file(root: Path, old: int = 50) -> Path:
    path = path_of(root, "tb")
    for n in range(old):
        record(path, strike(OLD - n))
    record(path, strike())
    return path


def test_a_large_file_is_shortened_and_keeps_its_permissions(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    path = a_file(tmp_path)
    size = path.stat().st_size
    assert not shed(path, NOW, large_bytes=size + 1)
    assert path.stat().st_size == size
    assert shed(path, NOW, large_bytes=size)
    assert recall(path) == (strike(),)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664
    record(path, strike(NOW + 1))
    assert recall(path) == (strike(), strike(NOW + 1))
    assert [p.name for p in path.parent.iterdir()] == ["tb.jsonl"]


def test_nothing_is_written_if_few_lines_would_be_dropped(tmp_path: Path) -> None:
    path = path_of(tmp_path, "tb")
    for n in range(9):
        record(path, strike(NOW - n))
    record(path, strike(OLD))
    before = path.stat()
    assert not shed(path, NOW, large_bytes=1)
    assert path.stat() == before


def test_the_file_is_not_replaced_while_another_process_appends(tmp_path: Path) -> None:
    path = a_file(tmp_path)
    before = path.read_bytes()
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(BlockingIOError):
            shed(path, NOW, large_bytes=1)
    assert path.read_bytes() == before


@pytest.mark.process
@pytest.mark.parametrize(
    "at",
    [(os, "fsync"), (strike_compaction, "share"), (Path, "replace")],
    ids=lambda where: where[1],
)
def test_nothing_is_lost_if_the_compaction_is_killed(tmp_path: Path, at: tuple[Any, str]) -> None:
    path = a_file(tmp_path)
    before = path.read_bytes()
    child = os.fork()
    if not child:
        setattr(*at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        shed(path, NOW, large_bytes=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == before
    record(path, strike(NOW + 1))
    assert shed(path, NOW, large_bytes=1), "the temporary file of the killed process does no harm"
    assert recall(path) == (strike(), strike(NOW + 1))


def _appends(path: Path, job: str) -> None:
    for attempt in range(60):
        record(path, replace(strike(), job=job, attempt=attempt))
        for n in range(3):
            record(path, strike(OLD - n))


def _sheds(path: Path, done: Path) -> None:
    while not done.exists():
        try:
            shed(path, NOW, large_bytes=1)
        except OSError:
            continue


@pytest.mark.process
def test_lines_appended_during_the_compaction_are_kept(tmp_path: Path) -> None:
    path, done, context = a_file(tmp_path), tmp_path / "done", get_context("fork")
    shedder = context.Process(target=_sheds, args=(path, done))
    writers = [context.Process(target=_appends, args=(path, f"job-{i}")) for i in range(3)]
    for process in (shedder, *writers):
        process.start()
    for writer in writers:
        writer.join(60)
    done.touch()
    shedder.join(20)
    assert [process.exitcode for process in (*writers, shedder)] == [0, 0, 0, 0]
    expected = {(f"job-{i}", attempt) for i in range(3) for attempt in range(60)}
    found = [(line.job, line.attempt) for line in recall(path) if isinstance(line, Strike)]
    assert expected <= set(found)
    assert len(found) < 600, "it was shortened again and again"


def test_a_leader_compacts_the_file_if_it_is_large_after_a_strike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(tmp_path, "tb")
    long = replace(strike(OLD), evidence=tuple("x" * 2000 for _ in range(5)))
    for n in range(27):
        record(path, replace(long, attempt=n))
    assert path.stat().st_size > strike_compaction.LARGE_BYTES
    strike_writer.record(path, strike())
    assert recall(path) == (strike(),)


def test_a_file_that_may_not_be_replaced_has_the_strike_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = a_file(tmp_path)
    monkeypatch.setattr(strike_compaction, "LARGE_BYTES", 1)

    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "replace", refuses)
    monkeypatch.setattr(strike_writer, "shed", lambda path, now: shed(path, now, 1))
    before = recall(path)
    strike_writer.record(path, strike(NOW + 1))
    assert recall(path) == (*before, strike(NOW + 1))
    assert "failed to write" not in caplog.text
