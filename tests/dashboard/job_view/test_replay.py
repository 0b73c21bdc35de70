"""A view from a snapshot and the lines after it equals the view from the whole journal."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.events import CheckpointFailed, Event, HealthChanged
from orchestrator.dashboard.job_view.replay import read_snapshot_state, read_state
from orchestrator.dashboard.job_view.replayed_job import ReplayedJob, fold_seen
from orchestrator.job.transitions import fold
from orchestrator.journal import journal as log
from orchestrator.journal import snapshot
from orchestrator.journal.journal import BEGINNING, Entry, Place, position_after, to_line
from orchestrator.journal.supervisor import Folded
from tests.dashboard.dashboard_story import (
    broken,
    finished,
    journal,
    recovered,
    short_of_a_host,
    started,
)
from tests.job.fake_cluster import Cluster
from tests.job.test_replan_and_rollback import job_with_checkpoints, loss_diverges


def written(path: Path, entries: Sequence[Entry], cut: int) -> RunDir:
    """A journal with a snapshot of its first `cut` lines."""
    path.mkdir(exist_ok=True)
    run_dir = RunDir(path)
    lines = [to_line(entry) for entry in entries]
    run_dir.journal.write_bytes(b"".join(lines))
    place = Place(lines=cut, offset=sum(map(len, lines[:cut])))
    folded = Folded(run=fold(entry.event for entry in entries[:cut]), place=place)
    snapshot.write(run_dir, folded, lambda: None)
    return run_dir


def check_everywhere(path: Path, entries: Sequence[Entry]) -> None:
    whole = fold_seen(ReplayedJob(), entries)
    for cut in range(1, len(entries) + 1):
        run_dir = written(path, entries, cut)
        seen, tail = read_snapshot_state(run_dir)
        assert tail.lines == cut
        assert seen == fold_seen(ReplayedJob(), entries[:cut]), cut
        assert read_state(run_dir) == whole


def diverged_and_resumed() -> list[Entry]:
    """A job that rolls back to an older checkpoint after its last save failed."""
    job = job_with_checkpoints(20, 40, on_nan="rollback")
    for step in (41, 42):
        job.tell(CheckpointFailed(at=job.now(), attempt=1, step=step, why="the disk is full"))
    loss_diverges(job, 25, 42)
    job.trains()
    return journal(event for event, _ in job.all)


@pytest.mark.parametrize("story", [started, broken, recovered, finished, short_of_a_host])
def test_a_view_does_not_depend_on_where_the_snapshot_was_taken(
    story: Callable[[], list[Event]], tmp_path: Path
) -> None:
    check_everywhere(tmp_path / "run", journal(story()))


def test_a_view_after_a_rollback_does_not_depend_on_the_snapshot(tmp_path: Path) -> None:
    entries = diverged_and_resumed()
    check_everywhere(tmp_path / "run", entries)
    assert fold_seen(ReplayedJob(), entries).run.progress.rollbacks


@settings(deadline=None, max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 40), st.booleans())
def test_a_view_of_any_events_does_not_depend_on_the_snapshot(
    tmp_path_factory: pytest.TempPathFactory, random: Random, hosts: int, turns: int, shrink: bool
) -> None:
    cluster = Cluster(random, hosts, 1, shrink=shrink)
    cluster.play(turns)
    entries = cluster.checker.entries
    cut = random.randrange(1, len(entries) + 1)
    run_dir = written(tmp_path_factory.mktemp("run"), entries, cut)
    assert read_snapshot_state(run_dir)[0] == fold_seen(ReplayedJob(), entries[:cut])
    assert read_state(run_dir) == fold_seen(ReplayedJob(), entries)


def test_without_a_snapshot_the_whole_journal_is_read(tmp_path: Path) -> None:
    entries = journal(recovered())
    run_dir = written(tmp_path, entries, 3)
    run_dir.state.unlink()
    seen, tail = read_snapshot_state(run_dir)
    assert (seen, tail.place) == (ReplayedJob(), BEGINNING)
    assert read_state(run_dir) == fold_seen(ReplayedJob(), entries)


def test_only_lines_of_the_current_attempt_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = journal(recovered())
    run_dir = written(tmp_path, entries, len(entries))
    first = max(entry.seq for entry in entries if "StartAttempt" in str(entry.actions))
    read: list[int | None] = []
    entry_of = log._entry

    def counted(line: bytes, number: int | None, path: Path | None = None) -> Entry:
        read.append(number)
        return entry_of(line, number, path)

    monkeypatch.setattr(log, "_entry", counted)
    read_state(run_dir)
    assert read == list(range(first + 1, len(entries) + 1))


@pytest.mark.parametrize("least", [1, 7, 64, 1 << 18])
def test_the_newest_line_with_a_mark_is_found_with_any_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(log, "LEAST_READ", least)
    path = tmp_path / "journal.jsonl"
    marked = [b'{"kind":"StartAttempt"}\n', b'[{"kind":"StartAttempt","of":"length"}]\n']
    lines = [b"one\n", marked[0], b"two\n", marked[1], b"three\n", b"four\n"]
    path.write_bytes(b"".join(lines))

    def place(count: int) -> Place:
        return Place(lines=count, offset=sum(map(len, lines[:count])))

    found = [position_after(path, StartAttempt, place(count)) for count in range(len(lines) + 1)]
    assert found == [place(n) for n in (0, 0, 2, 2, 4, 4, 4)]


def test_a_text_that_looks_like_a_command_is_not_executed(tmp_path: Path) -> None:
    said = '{"kind":"StartAttempt"'
    fake = CheckpointFailed(at=1.0, attempt=1, step=2, why=said)
    slow = HealthChanged(at=2.0, attempt=1, ranks=((0, 0),), health="slow", age_s=3.0)
    check_everywhere(tmp_path / "run", journal([*started(), fake, slow]))
