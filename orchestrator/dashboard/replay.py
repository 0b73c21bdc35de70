"""What the views know of a job at some place of its journal, without reading all of one of weeks.

The state there is the leader's snapshot. What the views keep beside it is of the present attempt,
whose lines are read again.
"""

from collections.abc import Iterator

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.dashboard.view import Seen, fold_seen, seen_at
from orchestrator.journal import snapshot
from orchestrator.journal.journal import BEGINNING, Entry, Place, Tail, newest


def recall(run_dir: RunDir) -> tuple[Seen, Tail]:
    """What is known at a place of the journal, and what reads on from there. Raises OSError and
    JobError."""
    run, tail = snapshot.recall(run_dir)
    if tail.place == BEGINNING:
        return Seen(), tail
    began = newest(run_dir.journal, StartAttempt, tail.place)
    return seen_at(run, _between(Tail(run_dir.journal, began), tail.place)), tail


def _between(tail: Tail, end: Place) -> Iterator[Entry]:
    if tail.place == end:
        return
    for entry in tail.each():
        yield entry
        if tail.place == end:
            return


def look(run_dir: RunDir) -> Seen:
    """What is known by now."""
    seen, tail = recall(run_dir)
    return fold_seen(seen, tail.each())
