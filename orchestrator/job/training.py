"""What ranks report while they train: steps, checkpoints, drills."""

from msgspec.structs import replace

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.messages.events import (
    CheckpointIntervalChanged,
    CheckpointSaved,
    DrillHappened,
    MemoryCheckpointsSet,
    ProgramRuns,
    StepReached,
    TrainingResumed,
)
from orchestrator.job.attempt_end import stop
from orchestrator.job.failures import no_progress
from orchestrator.job.hosts import scale_up
from orchestrator.job.hosts.scheduler import leave_drained
from orchestrator.job.hosts.straggler_replacement import replace_straggler
from orchestrator.job.incident import Incident, with_last_changed
from orchestrator.job.leave import Result
from orchestrator.job.stage import Running, Starting
from orchestrator.job.state import Run

MOST_SAVES = 16
"""Steps of checkpoints that the state keeps; a job keeps fewer checkpoints."""
MOST_RESUMED = 16
"""Points from which attempts resumed in memory that the state keeps."""
MOST_SKIPPED = 8
"""Unusable checkpoints that an incident keeps; the event in the journal has all."""


def training_resumed(run: Run, event: TrainingResumed) -> Result:
    """A checkpoint that was loaded was saved, even if a leader died before it heard of that."""
    run = replace(
        run,
        attempt=replace(run.attempt, step=event.step),
        history=replace(run.history, incidents=_with_resumed_step(run, event)),
    )
    if event.in_memory:
        return _remembered(run, event), ()
    progress = replace(run.progress, lineage=event.attempt, resumed=(), unused=_unused(run, event))
    run = replace(run, progress=progress)
    # The usual case: the leader heard of this checkpoint when it was saved.
    if event.step <= run.progress.saved:
        return run, ()
    saves = (*run.progress.saves, event.step)[-MOST_SAVES:]
    # The checkpoint was saved before the last incident, which ended that attempt.
    advanced = max(run.history.advanced, len(run.history.incidents) - 1)
    run = replace(
        run,
        progress=replace(run.progress, saved=event.step, saved_at=None, saves=saves),
        history=replace(run.history, fruitless=min(run.history.fruitless, 1), advanced=advanced),
    )
    return no_progress.was_saved(run, event.at), ()


def _unused(run: Run, event: TrainingResumed) -> int:
    """The checkpoint that the program could have loaded: trl's sft.py saves and never loads one."""
    if not run.is_own or event.step or event.passed_over:
        return 0
    return max(run.progress.saved, run.progress.unused)


def _remembered(run: Run, event: TrainingResumed) -> Run:
    """The ranks resumed from the memory of their hosts. Further on than any time before, that is
    progress as a checkpoint is, but it is no checkpoint to which the job can roll back."""
    point = Made(step=event.step, attempt=event.attempt)
    # Points of later steps say nothing more: an earlier attempt may not be used beyond this one.
    before = tuple(one for one in run.progress.resumed if one.step < event.step)
    if len(before) >= MOST_RESUMED:
        # One stricter point in place of two: fewer old copies may be used, never more.
        first, second, *rest = before
        before = (Made(step=first.step, attempt=second.attempt), *rest)
    run = replace(run, progress=replace(run.progress, resumed=(*before, point)))
    if event.step <= max(run.progress.saved, run.progress.remembered):
        return run
    advanced = max(run.history.advanced, len(run.history.incidents) - 1)
    return replace(
        run,
        progress=replace(run.progress, remembered=event.step),
        history=replace(run.history, fruitless=min(run.history.fruitless, 1), advanced=advanced),
    )


def _with_resumed_step(run: Run, event: TrainingResumed) -> tuple[Incident, ...]:
    """The incidents from which the job recovers now get the step of the checkpoint that was loaded.

    The leader may have died before it heard of the newest checkpoint, or that was unreadable.
    """

    def change(incident: Incident) -> Incident:
        # Ranks of a user's program ran if they did steps, even if no checkpoint of it was known.
        ran = incident.saved is not None or (run.is_own and incident.step > 0)
        if not ran or incident.attempt >= event.attempt:
            return incident
        return replace(
            incident,
            saved=event.step,
            in_memory=event.in_memory,
            skipped=event.passed_over[:MOST_SKIPPED],
        )

    return with_last_changed(run.history.incidents, _is_open, change)


def _is_open(incident: Incident) -> bool:
    return incident.recovered_after_s is None


def program_runs(run: Run, event: ProgramRuns) -> Result:
    """Only the state that the user sees changes. Limits of a hang and rules count a program without
    steps as one that starts, because nothing shows that it gets anywhere."""
    # A program that has reported steps will report the next one: until then, it starts.
    if run.progress.stepped_at or run.attempt.runs:
        return run, ()
    stage = Starting(since=event.at, reason=f"attempt {run.attempt.number} runs, without steps")
    incidents = with_last_changed(
        run.history.incidents,
        lambda one: one.runs_after_s is None,
        lambda one: replace(one, runs_after_s=max(0.0, event.at - one.at)),
    )
    return replace(
        run,
        stage=stage,
        attempt=replace(run.attempt, runs=True),
        history=replace(run.history, incidents=incidents),
    ), ()


def step_reached(run: Run, event: StepReached) -> Result:
    since = run.progress.stepped_at if isinstance(run.stage, Running) else event.at
    trained_s = run.progress.trained_s + max(0.0, event.at - since)
    run = replace(
        run,
        attempt=replace(run.attempt, step=event.step, stepped=True),
        progress=replace(run.progress, stepped_at=event.at, trained_s=trained_s),
    )
    if not isinstance(run.stage, Starting):
        return run, ()
    # The first step of an attempt: the job has recovered from its incidents.
    incidents = with_last_changed(
        run.history.incidents,
        _is_open,
        lambda one: replace(one, recovered_after_s=max(0.0, event.at - one.at)),
    )
    stage = Running(since=event.at, reason=f"attempt {run.attempt.number} trains")
    return replace(run, stage=stage, history=replace(run.history, incidents=incidents)), ()


def checkpoint_saved(run: Run, event: CheckpointSaved) -> Result:
    """After a checkpoint little work is lost, so now is the time to change hosts: to leave a
    drained one, to use more, or to replace a straggler."""
    if event.step > run.progress.saved:
        saves = (*run.progress.saves, event.step)[-MOST_SAVES:]
        advanced = len(run.history.incidents)
        run = replace(
            run,
            progress=replace(run.progress, saved=event.step, saved_at=event.at, saves=saves),
            history=replace(run.history, fruitless=0, allocations=0, advanced=advanced),
        )
    # In order of urgency. Each of them stops the ranks, so at most one is done.
    left, actions = leave_drained(run, event.at)
    if actions:
        return left, actions
    wish = scale_up.wish(run, event.at)
    if wish is None:
        return replace_straggler(run, event.at)
    job = run.job
    assert job is not None
    run = replace(
        run,
        interruption=replace(run.interruption, leaving=wish),
        plans=replace(run.plans, grown_at=event.at),
    )
    return stop(run, event.at, wish.words, job.stop_grace)


def interval_changed(run: Run, event: CheckpointIntervalChanged) -> Result:
    return replace(run, progress=replace(run.progress, save_every=event.new)), ()


def memory_set(run: Run, event: MemoryCheckpointsSet) -> Result:
    return replace(run, attempt=replace(run.attempt, memory=event)), ()


def drill_happened(run: Run, event: DrillHappened) -> Result:
    fired, now = (*run.progress.drills, event.drill), (*run.attempt.drills, event.drill)
    progress, attempt = replace(run.progress, drills=fired), replace(run.attempt, drills=now)
    return replace(run, progress=progress, attempt=attempt), ()
