"""A snapshot and the later lines give the same state as the whole journal, or it is ignored."""

import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndctl.rank.fence import GivenUp
from orchestrator.contract.codec import decode, encode
from orchestrator.contract.files.fence import Fence, check_leader, write_fence
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import StragglerFound
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal import snapshot
from orchestrator.journal.journal import Entry, Journal, Place, last_before, to_line
from orchestrator.journal.snapshot import Unfit, from_bytes, to_bytes
from orchestrator.journal.supervisor import NOTHING, Folded, Supervisor
from orchestrator.system import SystemClock
from tests.job.fake_cluster import Cluster
from tests.job.job_driver import Job

MAKER = "these sources"


def round_trip(run: Run) -> Run:
    return decode(Run, json.loads(json.dumps(encode(run))))


def same(one: Run, other: Run) -> bool:
    """Also compares the order of items, because the order of hosts influences decisions."""
    return one == other and json.dumps(encode(one)) == json.dumps(encode(other))


kinds = st.sampled_from(
    [{}, {"scheduled": True}, {"scheduled": True, "successor_s": 300.0}],
)


@settings(deadline=None, max_examples=25)
@given(
    st.randoms(use_true_random=False),
    kinds,
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 60),
    st.booleans(),
)
def test_snapshot_and_later_lines_give_the_fold_of_the_whole_journal(
    random: Random,
    kind: dict[str, Any],
    hosts: int,
    spares: int,
    turns: int,
    shrink: bool,
) -> None:
    cluster = Cluster(random, hosts, spares, shrink=shrink, preflight=bool(turns % 2), **kind)
    cluster.play(turns)
    run, folded = Run(), NOTHING
    cut, data = random.randrange(len(cluster.checker.entries)), b""
    for number, entry in enumerate(cluster.checker.entries):
        run, _ = step(run, entry.event)
        assert same(round_trip(run), run)
        data += to_line(entry)
        if number == cut:
            folded = Folded(run=run, place=Place(lines=number + 1, offset=len(data)))

    def before(offset: int, length: int) -> bytes:
        return data[offset - length : offset]

    known = from_bytes(to_bytes(folded, MAKER, before), MAKER, before)
    assert same(known.run, folded.run)
    resumed = known.run
    for entry in cluster.checker.entries[known.place.lines :]:
        resumed, actions = step(resumed, entry.event)
        assert actions == entry.actions
    assert same(resumed, run)


def test_hangs_stragglers_and_evidence_are_kept() -> None:
    job = Job(spares=1).running()
    job.saves(20)
    slow = StragglerFound(
        at=job.now(),
        attempt=1,
        rank=1,
        host="host-0",
        own_s=2.0,
        peers_s=1.0,
        step_s=2.5,
        steps=50,
        lost_tokens_per_second=3.0,
    )
    job.tell(slow)
    assert round_trip(job.run).attempt.stragglers == {1: slow}
    job.hangs(behind=(1,))
    job.shows("host-0")
    assert same(round_trip(job.run), job.run)
    job.judged(1)
    job.stops()
    assert job.run.history.incidents
    assert same(round_trip(job.run), job.run)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def feed(run_dir: RunDir, job: Job, since: int = 0) -> Folded:
    with Journal(run_dir.journal, SystemClock()) as journal:
        supervisor = Supervisor(journal, known=snapshot.load(run_dir))
        for event, _ in job.all[since:]:
            supervisor.feed(event)
        return supervisor.folded


def a_job(run_dir: RunDir) -> tuple[Job, Folded]:
    """A job with a snapshot in the middle of its journal."""
    job = Job(spares=1).running()
    folded = feed(run_dir, job)
    snapshot.write(run_dir, folded, lambda: None)
    fed = len(job.all)
    job.saves(20)
    job.fails_once()
    feed(run_dir, job, fed)
    return job, folded


def new_leader(run_dir: RunDir) -> tuple[Run, int]:
    """The state of a new leader, and the number of lines that it replayed."""
    with Journal(run_dir.journal, SystemClock()) as journal:
        known = snapshot.load(run_dir)
        supervisor = Supervisor(journal, known=known)
        return supervisor.run, journal.seq - known.place.lines


def test_a_new_leader_folds_what_came_after_the_snapshot(run_dir: RunDir) -> None:
    job, folded = a_job(run_dir)
    run, lines = new_leader(run_dir)
    assert same(run, job.run)
    assert lines == len(job.all) - folded.place.lines
    at = last_before(run_dir.journal, folded.place)
    assert at is not None
    assert at.seq == folded.place.lines
    assert last_before(run_dir.journal, Place()) is None


def test_an_incomplete_line_after_the_snapshot_is_ignored(run_dir: RunDir) -> None:
    job, _ = a_job(run_dir)
    whole = run_dir.journal.read_bytes()
    line = to_line(Entry(seq=len(job.all) + 1, event=job.all[-1][0], actions=()))
    for tail in (line[:1], line[:-1], line[:9] + bytes(30), line[:9] + bytes(30) + line[40:]):
        run_dir.journal.write_bytes(whole + tail)
        assert same(new_leader(run_dir)[0], job.run)
        assert run_dir.journal.read_bytes() == whole


def test_a_crash_may_cut_the_journal_up_to_the_snapshot(run_dir: RunDir) -> None:
    job, folded = a_job(run_dir)
    data = run_dir.journal.read_bytes()
    for size in (*range(folded.place.offset, len(data), 97), len(data)):
        run_dir.journal.write_bytes(data[:size])
        run, lines = new_leader(run_dir)
        known = data[:size].count(b"\n")
        assert lines == known - folded.place.lines
        expected = Run()
        for event, _ in job.all[:known]:
            expected, _ = step(expected, event)
        assert run == expected


def damaged(data: bytes, journal: bytes) -> dict[str, tuple[bytes, bytes]]:
    """Snapshot and journal, each of which does not fit the other."""
    head, _, rest = data.partition(b"\n")
    head_values = json.loads(head)

    def with_head(**more: object) -> bytes:
        return json.dumps(head_values | more).encode() + b"\n" + rest

    def at(**more: object) -> bytes:
        return with_head(place=head_values["place"] | more)

    offset = head_values["place"]["offset"]
    flipped = rest.replace(b'"number":1', b'"number":2', 1)
    assert flipped != rest
    return {
        "empty": (b"", journal),
        "no JSON": (b"\xff\n" + rest, journal),
        "a list": (b"[]\n" + rest, journal),
        "without its head": (rest, journal),
        "a flipped digit": (head + b"\n" + flipped, journal),
        "of another ndctl": (with_head(made_by="others"), journal),
        "of another form": (with_head(v=2), journal),
        "of a later place": (at(offset=offset + 100), journal),
        "of a place within a line": (at(offset=offset - 1), journal),
        "of a place before the first": (at(offset=-5), journal),
        "of the beginning": (at(offset=0), journal),
        "a word for a number": (at(lines="many"), journal),
        "of a longer journal": (data, journal[: offset - 1]),
        "of another journal": (data, journal.replace(b"1700000", b"1800000")),
        "of no journal": (data, b""),
    }


DAMAGES = sorted(damaged(b'{"place":{"offset":1}}\n{"number":1}\n', b""))


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_invalid_snapshot_is_ignored(
    run_dir: RunDir, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    a_job(run_dir)
    written, journal = damaged(run_dir.state.read_bytes(), run_dir.journal.read_bytes())[damage]
    run_dir.journal.write_bytes(journal)
    run_dir.state.unlink()
    expected = new_leader(run_dir)
    assert not caplog.messages
    run_dir.state.write_bytes(written)
    with caplog.at_level(logging.INFO):
        assert new_leader(run_dir) == expected
    assert "folding the whole journal" in caplog.text


def test_an_incomplete_snapshot_is_ignored(run_dir: RunDir) -> None:
    a_job(run_dir)
    data = run_dir.state.read_bytes()
    for size in range(0, len(data), 61):
        run_dir.state.write_bytes(data[:size])
        assert snapshot.load(run_dir) is NOTHING
    run_dir.state.write_bytes(data)
    assert snapshot.load(run_dir) is not NOTHING


def test_no_snapshot_is_made_of_lines_that_the_journal_lacks() -> None:
    folded = Folded(run=Run(), place=Place(lines=2, offset=100))
    with pytest.raises(Unfit, match="a longer version of this one"):
        to_bytes(folded, MAKER, lambda offset, length: b"\n")


def test_a_replaced_leader_leaves_the_snapshot_as_it_is(run_dir: RunDir) -> None:
    _, folded = a_job(run_dir)
    before = run_dir.state.read_bytes()
    write_fence(run_dir.fence, Fence(leader="another", attempt=1))
    with pytest.raises(GivenUp):
        snapshot.write(run_dir, folded, lambda: check_leader(run_dir.fence, "me"))
    assert run_dir.state.read_bytes() == before
    assert [p.name for p in run_dir.path.glob("state*")] == ["state.json"]


def test_other_sources_give_another_digest(tmp_path: Path) -> None:
    """A copy of the sources that differs in one line has another digest."""
    root = Path(snapshot.__file__).parent.parent
    copy = tmp_path / "orchestrator"
    for part in snapshot.DECIDE:
        for path in [root / part] if part.endswith(".py") else (root / part).rglob("*.*"):
            if path.suffix != ".pyc":
                (copy / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
                (copy / path.relative_to(root)).write_bytes(path.read_bytes())
    assert snapshot.digest(copy) == snapshot.digest(root) == snapshot.made_by()
    rules = copy / "job/failures/policy.yaml"
    rules.write_text(rules.read_text() + "# another rule\n")
    assert snapshot.digest(copy) != snapshot.digest(root)


def test_the_digest_is_that_of_the_sources_at_start(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a snapshot: the sources may be upgraded before the leader writes one."""
    snapshot.made_by.cache_clear()
    assert snapshot.load(run_dir) is NOTHING
    before = snapshot.digest(Path(snapshot.__file__).parent.parent)
    monkeypatch.setattr(snapshot, "digest", lambda root: "of the upgrade")
    assert snapshot.made_by() == before
