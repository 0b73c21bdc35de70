"""Whether what went wrong was rehearsed: only what a drill does is excused by it."""

from collections.abc import Iterator

from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.spec.drills import Drill
from orchestrator.job.findings import Findings
from orchestrator.job.incident import NOBODY, Culprit
from orchestrator.job.state import Run

SOON = 10
"""Steps after a drill in which what it broke is seen: ranks read their data ahead."""


def rehearsed(
    run: Run, findings: Findings, culprit: Culprit, phase: Phase | None = None
) -> str | None:
    """The drill of the present attempt by which such an incident came about."""
    step = _first_sign(run, findings)
    for drill, host in _happened(run):
        own_rank = drill.target == "rank" and culprit.rank == drill.index
        blamed = culprit == NOBODY or culprit.host == host or own_rank
        # Files that cannot be written are noticed at the next checkpoint, whenever that is.
        saving = drill.fault == "write" and phase == "checkpoint"
        if blamed and (saving or step - drill.step <= SOON):
            return str(drill)
    return None


def drilled(run: Run, host: str) -> bool:
    """Whether a drill of the present attempt happened there, however long ago: some last."""
    return any(where == host for _, where in _happened(run))


def _happened(run: Run) -> Iterator[tuple[Drill, str | None]]:
    """Each with its host."""
    assert run.job is not None
    for drill in run.job.drills:
        if drill.id in run.attempt.drills:
            each = run.plan.ranks_per_host if drill.target == "rank" else 1
            number = drill.index // each
            yield (
                drill,
                run.attempt.placement[number] if number < len(run.attempt.placement) else None,
            )


def _first_sign(run: Run, findings: Findings) -> int:
    """The step: of a loss that was not finite for a while, the first such one."""
    since = [x.error.since for x in findings.exits if x.error and x.error.since is not None]
    seen = [exited.step for exited in findings.exits]
    seen += [findings.hang.step] if findings.hang else []
    return min(since) if since else max([run.attempt.step, *seen])
