"""The account of a job's time, from its run directory."""

from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.time_spent.account import KINDS, TimeAccount, TimeSpent
from orchestrator.dashboard.time_spent.pauses import PauseTail
from orchestrator.job.stage import ENDED
from orchestrator.journal.journal import entries_of


def time_spent(snapshot: Snapshot) -> TimeSpent:
    """Raises OSError, and JobError if the journal is damaged."""
    account = TimeAccount()
    account.add(entries_of(snapshot.run_dir.journal, *KINDS))
    return account.spent(PauseTail(snapshot.run_dir.metrics).more(), counted_until(snapshot))


def counted_until(snapshot: Snapshot) -> float:
    """Until when time passes for the job: now, or its last sign of life if it has failed."""
    standing = snapshot.standing
    known = standing.as_of is None and standing.state not in ENDED
    return snapshot.now if known else snapshot.heard_at
