"""Rebuilds the state of the views from the leader's snapshot, instead of the whole journal.

A journal of weeks is long. The snapshot holds the job state at some place of the journal. The views
keep more (for example the health of each rank), but only of the current attempt, so only the lines
since the start of that attempt are read again.
"""

from collections.abc import Iterator

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.dashboard.job_view.replayed_job import ReplayedJob, fold_seen, seen_at
from orchestrator.journal import snapshot
from orchestrator.journal.journal import BEGINNING, Entry, Place, Tail, position_after


def read_snapshot_state(run_dir: RunDir) -> tuple[ReplayedJob, Tail]:
    """The state at the place of the snapshot, and a reader of the journal from that place on.

    Raises:
        OSError: the journal cannot be read.
        JobError: the journal is damaged.
    """
    run, tail = snapshot.recall(run_dir)
    if tail.place == BEGINNING:
        return ReplayedJob(), tail
    began = position_after(run_dir.journal, StartAttempt, tail.place)
    return seen_at(run, _between(Tail(run_dir.journal, began), tail.place)), tail


def _between(tail: Tail, end: Place) -> Iterator[Entry]:
    if tail.place == end:
        return
    for entry in tail.each():
        yield entry
        if tail.place == end:
            return


def read_state(run_dir: RunDir) -> ReplayedJob:
    """The state at the end of the journal."""
    seen, tail = read_snapshot_state(run_dir)
    return fold_seen(seen, tail.each())
