"""All data about one job at one time, for every view except the live dashboard."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.cluster_report import apply_report
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.job_view.replay import read_state
from orchestrator.dashboard.job_view.replayed_job import ReplayedJob
from orchestrator.dashboard.job_view.standing import Standing, effective_state, heard_at
from orchestrator.dashboard.job_view.view import View, view
from orchestrator.dashboard.measured.steady import Steady
from orchestrator.dashboard.metrics import Progress, read_ends
from orchestrator.job.reports.job_report import read_report
from orchestrator.job.state import Run
from orchestrator.journal import journal
from orchestrator.seams import LaunchStatus

MIN_FREE = 1 << 16
"""Bytes that a leader needs for the next lines of its journal."""

UNCONFIRMED = ", whose end is not confirmed: the scheduler was not reached to end it"


class Snapshot(Struct, frozen=True, kw_only=True):
    run_dir: RunDir
    seen: ReplayedJob
    progress: Progress
    leader_alive: bool
    now: float
    disk_is_full: bool = False
    """The disk of the run directory has no room for a line of the journal."""
    end_unconfirmed: bool = False
    """The job has ended, and its scheduler was not reached to end what it may still have of it."""
    launch_status: LaunchStatus | None = None
    """The scheduler's name of the job and, while the job has no leader, its state there."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """For a pending job: excluded hosts, each with the reason and the command that allows it."""
    steady: Steady | None = None
    """What the job measured with its present plan; None: too few steps, or not read."""
    known_by: Commands | None = None
    """Commands that find the job from the user's folder, if its name alone is not enough."""

    @property
    def commands(self) -> Commands:
        run_dir = self.run_dir
        return self.known_by or Commands(job=run_dir.path.name, spec=str(run_dir.spec))

    @property
    def checkpoints(self) -> Path:
        """The checkpoint folder as the hosts see it."""
        return self.on_hosts(self.run_dir.checkpoints)

    def on_hosts(self, path: Path) -> Path:
        """A path in the run directory; if it does not exist here, as the hosts see it."""
        # On Kubernetes `run_dir` may be a copy that has the journal but no checkpoints.
        job = self.seen.run.job
        if job is None or path.exists():
            return path
        return Path(job.launch.run_dir) / path.relative_to(self.run_dir.path)

    @property
    def view(self) -> View:
        return view(
            self.seen,
            self.progress,
            leader_alive=self.leader_alive,
            now=self.now,
            launch_status=self.launch_status,
            commands=self.commands,
        )

    @property
    def standing(self) -> Standing:
        fix, status = self.commands.submit(), self.launch_status
        return effective_state(self.seen, self.leader_alive, self.now, fix, status, self.progress)

    @property
    def scheduler(self) -> str | None:
        """The scheduler's name of the job, or what it says about it."""
        words = self.launch_status.words if self.launch_status is not None else None
        return f"{words}{UNCONFIRMED}" if words and self.end_unconfirmed else words

    @property
    def heard_at(self) -> float:
        return heard_at(self.seen.run, self.progress)

    @property
    def held(self) -> bool:
        """The scheduler still has the job queued, or is unreachable."""
        return self.launch_status is not None and self.launch_status.held


def read_snapshot(run_dir: RunDir, now: float, commands: Commands | None = None) -> Snapshot | None:
    """None if the journal is empty, that is, the job was not submitted."""
    # Check for a leader before reading the journal. If the leader ends between the two, its last
    # line is then already in the journal. In the other order the job would look abandoned.
    alive = journal.has_writer(run_dir.journal)
    seen = read_state(run_dir)
    if seen.run.job is None:
        return None
    seen, progress = apply_report(seen, read_ends(run_dir.metrics), read_report(run_dir))
    return Snapshot(
        run_dir=run_dir,
        seen=seen,
        progress=progress,
        leader_alive=alive,
        now=now,
        disk_is_full=is_full(run_dir, seen.run),
        end_unconfirmed=is_unconfirmed(run_dir, seen.run),
        known_by=commands,
    )


def is_full(run_dir: RunDir, run: Run) -> bool:
    """`Snapshot.disk_is_full`."""
    # On Kubernetes `run_dir` may be a copy, on another disk than that of the leader.
    if run.job is None or run.job.backend == "kubernetes":
        return False
    try:
        return shutil.disk_usage(run_dir.path).free < MIN_FREE
    except OSError:
        return False


def is_unconfirmed(run_dir: RunDir, run: Run) -> bool:
    if run.job is None or run.ending is None:
        return False
    return run_dir.end_unconfirmed(run.job.launch.launch).exists()
