"""One job at one moment: what every view but the live one reads."""

from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.rundir import RunDir
from orchestrator.dashboard.commands import Commands
from orchestrator.dashboard.metrics import Progress, glance
from orchestrator.dashboard.recalled import look
from orchestrator.dashboard.view import Seen, Standing, View, effective_state, view
from orchestrator.supervise import log
from orchestrator.supervise.state import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What `status`, `describe` and `list` say of a job is all in here."""

    run_dir: RunDir
    seen: Seen
    progress: Progress
    leader_alive: bool
    now: float
    scheduler: str | None = None
    """What a scheduler calls the job and, while it has no leader, says of it."""
    held: bool = False
    """The scheduler still has it, or cannot be asked: it waits for a leader."""
    known_by: Commands | None = None
    """What finds it from where ndctl was asked, where its name alone may not."""

    @property
    def commands(self) -> Commands:
        run_dir = self.run_dir
        return self.known_by or Commands(job=run_dir.path.name, spec=str(run_dir.spec))

    @property
    def checkpoints(self) -> Path:
        """Where the hosts have them: what is read here may be a copy of the journal alone."""
        here, job = self.run_dir.checkpoints, self.seen.run.job
        return (
            here if job is None or here.exists() else RunDir(Path(job.launch.run_dir)).checkpoints
        )

    @property
    def is_local(self) -> bool:
        """There is no scheduler to ask."""
        job = self.seen.run.job
        return job is None or job.backend == "local"

    @property
    def view(self) -> View:
        return view(
            self.seen,
            self.progress,
            leader_alive=self.leader_alive,
            now=self.now,
            held=self._held_words,
            commands=self.commands,
        )

    @property
    def standing(self) -> Standing:
        run, fix = self.seen.run, self.commands.submit()
        gone = self.scheduler is not None and not self.held and not self.leader_alive
        if gone and run.stage is Stage.SUBMITTED:
            reason = f"no leader ever started: {self.scheduler}"
            return Standing(state="FAILED", reason=reason, since=run.last_at, fix=fix)
        return effective_state(run, self.leader_alive, self.now, fix, self._held_words)

    @property
    def _held_words(self) -> str | None:
        return self.scheduler if self.held else None


def read_snapshot(run_dir: RunDir, now: float, commands: Commands | None = None) -> Snapshot | None:
    """None when the journal has no line yet: nobody has submitted the job.

    Whether a leader lives is asked before the journal is read: one that ends in between has
    written its end by then.
    """
    alive = log.has_writer(run_dir.journal)
    seen = look(run_dir)
    if seen.run.job is None:
        return None
    progress = glance(run_dir.metrics)
    return Snapshot(
        run_dir=run_dir,
        seen=seen,
        progress=progress,
        leader_alive=alive,
        now=now,
        known_by=commands,
    )


def updated_at(snapshot: Snapshot) -> float:
    """The job's last sign of life."""
    last = snapshot.progress.last
    return max(snapshot.seen.run.last_at, (last.time if last else None) or 0.0)
