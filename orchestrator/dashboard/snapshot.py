"""One job at one moment: what every view but the live one reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.metrics import Progress, glance
from orchestrator.dashboard.replay import look
from orchestrator.dashboard.reported import with_report
from orchestrator.dashboard.view import Seen, Standing, View, effective_state, heard_at, view
from orchestrator.job.reports.job_report import read_report
from orchestrator.journal import journal
from orchestrator.seams import Sighting


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What `status`, `describe` and `list` say of a job is all in here."""

    run_dir: RunDir
    seen: Seen
    progress: Progress
    leader_alive: bool
    now: float
    sighting: Sighting | None = None
    """What a scheduler calls the job and, while it has no leader, says of it."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Of a job that waits: hosts that it does without, with why and what to type to use each."""
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
            sighting=self.sighting,
            commands=self.commands,
        )

    @property
    def standing(self) -> Standing:
        run, fix = self.seen.run, self.commands.submit()
        return effective_state(
            run, self.leader_alive, self.now, fix, self.sighting, self.seen.report
        )

    @property
    def scheduler(self) -> str | None:
        """What the scheduler calls it or says of it."""
        return self.sighting.words if self.sighting is not None else None

    @property
    def heard_at(self) -> float:
        return heard_at(self.seen.run, self.progress)

    @property
    def held(self) -> bool:
        """The scheduler still has it, or cannot be asked: it waits for a leader."""
        return self.sighting is not None and self.sighting.held


def read_snapshot(run_dir: RunDir, now: float, commands: Commands | None = None) -> Snapshot | None:
    """None when the journal has no line yet: nobody has submitted the job.

    Whether a leader lives is asked before the journal is read: one that ends in between has
    written its end by then.
    """
    alive = journal.has_writer(run_dir.journal)
    seen = look(run_dir)
    if seen.run.job is None:
        return None
    seen, progress = with_report(seen, glance(run_dir.metrics), read_report(run_dir))
    return Snapshot(
        run_dir=run_dir,
        seen=seen,
        progress=progress,
        leader_alive=alive,
        now=now,
        known_by=commands,
    )
