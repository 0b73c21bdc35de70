"""Fetch of the new lines in a run directory over a byte stream."""

import fcntl
import io
from pathlib import Path

import pytest

from orchestrator.backends.kubernetes.mirror import fetch
from orchestrator.backends.kubernetes.mirror.fetch import main, newest_launch, news, read_news
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import LeaderStarted
from orchestrator.job.transitions import fold
from orchestrator.journal import snapshot
from orchestrator.journal.journal import Entry, Place, read, to_line
from orchestrator.journal.supervisor import Folded
from tests.agent.world import LAUNCH, a_job


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.journal.write_bytes(to_line(Entry(seq=1, event=a_job(tmp_path), actions=())))
    run_dir.metrics.write_bytes(b'{"step":1}\n{"step":2}\n{"st')
    return run_dir


def asked(run_dir: RunDir, journal: int, metrics: int) -> tuple[fetch.News, bytes, bytes]:
    told, lines, state, metric_lines = answer(run_dir, journal, metrics)
    assert (told.state, state) == (0, b"")
    return told, lines, metric_lines


def answer(
    run_dir: RunDir, journal: int, metrics: int = 0
) -> tuple[fetch.News, bytes, bytes, bytes]:
    out = io.BytesIO()
    main([str(run_dir.path), str(journal), str(metrics)], out)
    return read_news(out.getvalue())


def test_whole_lines_are_read_from_the_last_position(run_dir: RunDir) -> None:
    told, journal, metrics = asked(run_dir, 0, 11)
    assert (told.launch, told.led, told.metrics_from) == (LAUNCH, False, 11)
    assert journal == run_dir.journal.read_bytes()
    assert metrics == b'{"step":2}\n'
    told, journal, metrics = asked(run_dir, len(journal), 22)
    assert (told.journal, told.metrics, journal, metrics) == (0, 0, b"", b"")


def test_a_position_behind_the_end_belongs_to_another_run(run_dir: RunDir) -> None:
    told, journal, metrics = asked(run_dir, 10**6, 10**6)
    assert journal == run_dir.journal.read_bytes()
    assert (told.metrics_from, metrics) == (0, b'{"step":1}\n{"step":2}\n')


def test_only_the_newest_lines_of_long_metrics_are_fetched(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MOST_METRICS", 15)
    told, _, metrics = asked(run_dir, 0, 0)
    assert (told.metrics_from, metrics) == (11, b'{"step":2}\n')


def test_the_pod_that_writes_the_journal_is_the_leader(run_dir: RunDir) -> None:
    with run_dir.journal.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert news(run_dir, 0, 0)[0].led


def test_missing_files_are_omitted(tmp_path: Path) -> None:
    told, body = news(RunDir(tmp_path), 0, 0)
    assert (told.launch, told.led, body) == (0, False, b"")


def test_the_newest_launch_is_from_the_last_submission(run_dir: RunDir) -> None:
    later = a_job(run_dir.path)
    line = to_line(Entry(seq=2, event=later, actions=()))
    line = line.replace(b'"launch":3', b'"launch":4')
    with run_dir.journal.open("ab") as file:
        file.write(line)
        file.write(b'{"v":1,"seq":3,"event":{"kind":"Tick","at":1.0},"actions":[]}\n')
    assert newest_launch(run_dir, None) == 4
    remembered(run_dir, 1)
    assert newest_launch(run_dir, snapshot.read_head(run_dir)) == 4
    remembered(run_dir, 2)
    with run_dir.journal.open("r+b") as file:  # the file is not read again
        file.write(b"?" * 100)
    assert newest_launch(run_dir, snapshot.read_head(run_dir)) == 4


def remembered(run_dir: RunDir, lines: int) -> None:
    """Write a leader's snapshot of the first lines of the journal."""
    told = read(run_dir.journal)[:lines]
    place = Place(lines=lines, offset=sum(len(to_line(entry)) for entry in told))
    folded = Folded(run=fold(entry.event for entry in told), place=place)
    snapshot.write(run_dir, folded, lambda: None)


def test_a_long_journal_is_fetched_in_pieces_with_a_matching_snapshot(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    leads = to_line(Entry(seq=2, event=LeaderStarted(at=1.0, host="a", pid=1), actions=()))
    with run_dir.journal.open("ab") as file:
        file.write(leads + leads.replace(b'"seq":2', b'"seq":3'))
    size = run_dir.journal.stat().st_size
    remembered(run_dir, 2)
    monkeypatch.setattr(fetch, "MOST_JOURNAL", size - 2 * len(leads) + 10)
    came, states, more = b"", [], True
    while more:
        told, lines, state, _ = answer(run_dir, len(came))
        came, more = came + lines, told.more
        states.append(state)
    assert came == run_dir.journal.read_bytes()
    known = run_dir.state.read_bytes()
    assert states == [b"", known]
    assert answer(run_dir, size - len(leads))[2] == b"", (
        "the mirror has the state before these lines"
    )


def test_a_snapshot_is_not_fetched_before_the_lines_it_includes(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered(run_dir, 1)
    run_dir.state.write_bytes(b"{}\n")
    assert answer(run_dir, 0)[2] == b""
    remembered(run_dir, 1)
    monkeypatch.setattr(fetch, "MOST_JOURNAL", 10)
    assert answer(run_dir, 0)[2] == b""


def test_an_answer_that_was_cut_short_is_no_answer(run_dir: RunDir) -> None:
    out = io.BytesIO()
    main([str(run_dir.path), "0", "0"], out)
    with pytest.raises(ValueError, match="incomplete"):
        read_news(out.getvalue()[:-1])
