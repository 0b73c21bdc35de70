"""Reads one job again and again, each time only what was added to its journal and metrics."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import CheckpointSaved
from orchestrator.dashboard.cluster_report import apply_report
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.job_view.replay import read_snapshot_state
from orchestrator.dashboard.job_view.replayed_job import fold_seen
from orchestrator.dashboard.metrics import NO_PROGRESS, Metric, MetricTail, fold_metrics
from orchestrator.dashboard.snapshot import Snapshot, is_full
from orchestrator.dashboard.time_spent.account import KINDS, Counted, TimeAccount, TimeSpent
from orchestrator.dashboard.time_spent.pauses import Pause, pause_of
from orchestrator.dashboard.time_spent.read import counted_until
from orchestrator.job.reports.job_report import read_report
from orchestrator.job.stage import ENDED
from orchestrator.journal import journal

MOST_SAVES = 1024
"""Beyond this, every second complete checkpoint is forgotten: a chart has fewer columns."""

Stamp = tuple[int, int, int]
"""Size and time of change of a journal, and size of the metrics."""


class ReadJob(Struct, frozen=True, kw_only=True):
    """A job at one time."""

    snapshot: Snapshot
    counted: Counted
    last_pause_s: float | None
    """Seconds for which the last save paused training; None: none did yet."""
    owner: str
    """User that owns the run directory."""
    lines: int
    """Lines of the journal that were read."""
    saved_steps: tuple[int, ...] = ()
    """Steps of complete checkpoints, ascending."""

    @property
    def time(self) -> TimeSpent:
        return self.counted.until(counted_until(self.snapshot))

    @property
    def path(self) -> Path:
        return self.snapshot.run_dir.path


class JobReader:
    """Holds what is known of one job between two looks at its run directory."""

    def __init__(
        self, run_dir: RunDir, commands: Commands | None = None, *, led: bool = False
    ) -> None:
        """
        Args:
            led: this process is the leader, so it need not look for one.
        """
        self.run_dir, self.commands, self.led = run_dir, commands, led
        # First: a journal that takes the place of this one meanwhile is another file.
        self.inode = run_dir.journal.stat().st_ino
        self.seen, self.tail = read_snapshot_state(run_dir)
        self.metrics, self.progress = MetricTail(run_dir.metrics), NO_PROGRESS
        self.account, self.accounted = TimeAccount(), 0
        self.saved: list[int] = []
        self._account_for(journal.entries_of(run_dir.journal, *KINDS, CheckpointSaved))
        self.pauses: list[Pause] = []
        self.owner = _owner(run_dir.path)
        self.ended: tuple[Stamp, ReadJob] | None = None
        """The job, once it has ended and its leader has exited, and its files at that time."""

    def is_current(self) -> bool:
        """Whether the journal is still the file whose lines were read. Raises OSError."""
        seen = self.run_dir.journal.stat()
        # A new file may get the number of a removed one.
        return seen.st_ino == self.inode and seen.st_size >= self.tail.offset

    def look(self, now: float) -> ReadJob | None:
        """The job now; None if its submission has not finished.

        Raises:
            OSError: the files cannot be read.
            JobError: the journal is damaged.
        """
        stamp = _stamp(self.run_dir)
        if self.ended is not None and self.ended[0] == stamp:
            # Of a thousand jobs most have ended long ago. They cost little.
            job = self.ended[1]
            return replace(job, snapshot=replace(job.snapshot, now=now))
        self.ended = None
        # The leader is looked for before the journal is read: see `read_snapshot`.
        alive = self.led or journal.has_writer(self.run_dir.journal)
        if entries := self.tail.more():
            self.seen = fold_seen(self.seen, entries)
            self._account_for(entries)
        self.progress = fold_metrics(self.progress, self._more_metrics())
        if self.seen.run.job is None:
            return None
        seen, progress = apply_report(self.seen, self.progress, read_report(self.run_dir))
        snapshot = Snapshot(
            run_dir=self.run_dir,
            seen=seen,
            progress=progress,
            leader_alive=alive,
            now=now,
            disk_is_full=is_full(self.run_dir, seen.run),
            known_by=self.commands,
        )
        job = ReadJob(
            snapshot=snapshot,
            counted=self.account.counted(self.pauses),
            last_pause_s=self.pauses[-1].seconds if self.pauses else None,
            owner=self.owner,
            lines=self.tail.lines,
            saved_steps=tuple(self.saved),
        )
        if seen.run.state in ENDED and not alive and not self.led:
            self.ended = (stamp, job)
        return job

    def _more_metrics(self) -> Iterator[Metric]:
        for metric in self.metrics.each():
            if (pause := pause_of(metric)) is not None:
                self.pauses.append(pause)
            yield metric

    def _account_for(self, entries: Iterable[journal.Entry]) -> None:
        """Entries may come twice, because the account reads the journal from its start."""
        for entry in entries:
            if entry.seq > self.accounted:
                self.account.add([entry])
                self.accounted = entry.seq
                if isinstance(entry.event, CheckpointSaved):
                    self._saved(entry.event.step)

    def _saved(self, step: int) -> None:
        while self.saved and self.saved[-1] >= step:  # the job went back before that step
            self.saved.pop()
        self.saved.append(step)
        if len(self.saved) > MOST_SAVES:
            self.saved = self.saved[::2]


def _stamp(run_dir: RunDir) -> Stamp:
    """Raises OSError."""
    seen = run_dir.journal.stat()
    try:
        return seen.st_size, seen.st_mtime_ns, run_dir.metrics.stat().st_size
    except FileNotFoundError:
        return seen.st_size, seen.st_mtime_ns, 0


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:  # the user database does not know the number
        return str(path.stat().st_uid)
