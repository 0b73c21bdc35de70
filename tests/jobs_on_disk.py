"""Jobs for tests of the command line: really submitted, to a backend that starts nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.app.planning import plans
from orchestrator.app.submission import payload
from orchestrator.contract.check_results import Finding
from orchestrator.contract.drills import Drill, parse_drill
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import Event, LeaderStarted
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError
from orchestrator.journal.journal import Journal, read
from orchestrator.journal.supervisor import Supervisor
from orchestrator.seams import LaunchStatus
from tests.agent.world import TurnedClock

SPEC = Path(__file__).parent / "e2e" / "job.yaml"
JOB = "e2e"


@dataclass
class NoCluster:
    """A backend that records its calls."""

    submitted: list[LaunchPlan] = field(default_factory=list)
    cleared: list[LaunchPlan] = field(default_factory=list)
    broken: bool = False
    held: str | None = None
    """State of the job in the scheduler; None: the job has ended there."""
    says: LaunchStatus | None = None
    """Answer of `glance` about each job, instead of the default."""
    obstacle: str | None = None
    on_clear: Callable[[], None] = lambda: None
    """Called by `clear`, for example to release a lock that the ended processes held."""
    asked: int = 0
    """Number of calls of `glance`."""

    def check(self, handover: Handover) -> tuple[Finding, ...]:
        if self.obstacle is not None:
            raise BackendError(self.obstacle)
        waits = Finding(what="hosts", verdict="warns", found="2 are there", fix="wait")
        return (Finding(what="it would start", verdict="ok", found="at noon"), waits)

    def standing(self, launch: LaunchPlan) -> str | None:
        return self.held

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[LaunchStatus]:
        self.asked += 1
        if self.says is not None:
            return [self.says] * len(launches)
        return [LaunchStatus(self.held or "Slurm job 12 has ended", self.held is not None)] * len(
            launches
        )

    def name_of(self, launch: LaunchPlan) -> str | None:
        return "Slurm job 12"

    def describe(self, handover: Handover) -> str:
        number, hosts = handover.launch.launch, len(handover.launch.hosts)
        return f"launch {number}: {hosts} agents would be started"

    def submit(self, handover: Handover) -> None:
        if self.broken:
            raise BackendError("no cluster today")
        self.submitted.append(handover.launch)

    def replace(self, launch: LaunchPlan, host: str) -> None:
        raise AssertionError("no leader runs")

    def clear(self, launch: LaunchPlan) -> None:
        self.cleared.append(launch)
        self.on_clear()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> NoCluster:
    """Replace every backend by a `NoCluster`."""
    cluster = NoCluster()
    monkeypatch.setattr("orchestrator.backends.by_name.implementation_named", lambda *_: cluster)
    return cluster


def submission(run_root: Path, *overrides: str, **more: Any) -> payload.Submission:
    planned = plans.plan_spec(SPEC, overrides, {})
    return payload.Submission(planned=planned, run_root=run_root, **more)


def drill(text: str) -> Drill:
    return parse_drill(text, 1)


def events(run_root: Path) -> list[Event]:
    return [entry.event for entry in read(run_root / JOB / "journal.jsonl")]


def on_slurm(run_root: Path) -> None:
    """Change the journal to that of a job on Slurm."""
    journal = run_root / JOB / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"backend":"local"', '"backend":"slurm"'))


def lead(run_root: Path, *happened: Event) -> None:
    """Write the journal lines of a leader for these events."""
    clock = TurnedClock()
    with Journal(run_root / JOB / "journal.jsonl", clock) as journal:
        supervisor = Supervisor(journal)
        supervisor.feed(LeaderStarted(at=clock.now(), host="host-0", pid=1))
        for event in happened:
            supervisor.feed(event)
