"""What the views read from the journal of one job.

The job state is small for a job of any size. Screens need more, for example the health of each
rank; `ReplayedJob` holds that and is built here from the same journal entries.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.events import (
    AgentLost,
    CheckpointFailed,
    CheckpointSaved,
    HealthChanged,
    JobSubmitted,
    LeaderStarted,
    RankExited,
    StepReached,
    TrainingResumed,
)
from orchestrator.dashboard.job_view.health import Health
from orchestrator.job.reports.job_report import JobReport
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Entry


class FailedSave(Struct, frozen=True, kw_only=True):
    """The last failed save, and the number of failed saves in a row."""

    step: int
    at: float
    why: str
    since: float
    """Unix time of the first failed save in the row."""
    times: int = 1
    advice: str = ""
    """Advice of the failure class of `why`."""


class CheckpointView(Struct, frozen=True, kw_only=True):
    """The newest complete checkpoint, according to the journal."""

    step: int = 0
    """0: none yet."""
    at: float | None = None
    """Unix time of its completion; None if the journal does not have it."""
    passed_over: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints that the last resume could not use."""
    failed: FailedSave | None = None
    """The last save, if it failed and no later one succeeded."""

    @property
    def name(self) -> str:
        return f"step-{self.step}"


class ReplayedJob(Struct, frozen=True, kw_only=True):
    """What the views read from the journal: the job state and what it does not contain."""

    run: Run = field(default_factory=Run)
    started: bool = False
    """The current attempt has finished its first step."""
    resumed_from: int | None = None
    """Step from which the current attempt resumed; None while it loads the checkpoint."""
    health: Mapping[int, Health] = field(default_factory=dict)
    """Last reported health of ranks of the current attempt."""
    lost: frozenset[str] = frozenset()
    """Hosts that the current attempt lost."""
    granted: tuple[str, ...] = ()
    """Hosts of an allocation in which no attempt has started yet; empty: the attempt's hosts are
    the present ones."""
    checkpoint: CheckpointView = field(default_factory=CheckpointView)
    report: JobReport | None = None
    """The leader's last report to its cluster, if it is newer than the local journal."""

    @property
    def attempt(self) -> int:
        """Number of the newest known attempt."""
        return max(self.run.attempt.number, self.report.attempt if self.report is not None else 0)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the ranks, in node-rank order; before a start, those that they will likely be on
        or, without an allocation, the planned names."""
        run = self.run
        if not self.granted:
            return run.attempt.placement or run.plan.hosts
        fit_first = sorted(self.granted, key=lambda host: host in run.hosts.exclude)
        return tuple(fit_first[: len(run.plan.hosts)])


def fold_seen(seen: ReplayedJob, entries: Iterable[Entry]) -> ReplayedJob:
    """`seen` after `entries`. Pass many at once, because each call copies the ranks' health."""
    health = dict(seen.health)
    for entry in entries:
        run, _ = step(seen.run, entry.event)
        seen = _after_rollback(_after(replace(seen, run=run), entry, health))
    return replace(seen, health=health)


def seen_at(run: Run, entries: Iterable[Entry]) -> ReplayedJob:
    """`ReplayedJob` at some place of the journal.

    Args:
        run: the job state at that place.
        entries: the entries from the start of the current attempt up to that place.
    """
    health: dict[int, Health] = {}
    seen = _as_of(run)
    for entry in entries:
        seen = _after(seen, entry, health)
    return _after_rollback(replace(seen, health=health))


def _as_of(run: Run) -> ReplayedJob:
    """Before the first entry of an attempt."""
    saved = run.progress
    return ReplayedJob(run=run, checkpoint=CheckpointView(step=saved.saved, at=saved.saved_at))


def _after(seen: ReplayedJob, entry: Entry, health: dict[int, Health]) -> ReplayedJob:
    event = entry.event
    # Late events about an earlier attempt must not change the health of the current one.
    if getattr(event, "attempt", seen.run.attempt.number) == seen.run.attempt.number:
        seen = _apply_event(seen, entry, health)
    run = seen.run
    if any(isinstance(action, StartAttempt) for action in entry.actions):
        health.clear()
        seen = _as_of(run)
    return seen


def _after_rollback(seen: ReplayedJob) -> ReplayedJob:
    """`seen` with an older checkpoint, if a rollback discarded the newest one."""
    run = seen.run
    if seen.checkpoint.step <= run.progress.saved:
        return seen
    return replace(seen, checkpoint=_as_of(run).checkpoint)


def _apply_event(seen: ReplayedJob, entry: Entry, health: dict[int, Health]) -> ReplayedJob:
    match entry.event:
        case JobSubmitted(resume=resume):
            health.clear()
            kept = seen.checkpoint if resume else CheckpointView()
            return ReplayedJob(run=seen.run, checkpoint=kept)
        case HealthChanged(ranks=spans, health=word):
            for first, last in spans:
                _set_health(health, range(first, last + 1), word)
        case RankExited(rank=rank, stopped=stopped):
            _set_health(health, (rank,), "stopped" if stopped else "dead")
        case AgentLost(host=host):
            return replace(seen, lost=seen.lost | {host})
        case LeaderStarted(former="", allocation=given):
            # The ranks of the attempt ended with their allocation, and hosts of this one may have
            # been their neighbours. After a takeover the hosts are the same.
            health.clear()
            hosts = given.hosts if given is not None and given.successor_s is None else ()
            return replace(seen, lost=frozenset(), granted=hosts)
        case StepReached():
            return replace(seen, started=True)
        case CheckpointSaved() | CheckpointFailed():
            return replace(seen, checkpoint=_checkpoint(seen.checkpoint, entry.event))
        case TrainingResumed(step=resumed):
            found = _checkpoint(seen.checkpoint, entry.event)
            return replace(seen, resumed_from=resumed, checkpoint=found)
        case _:
            pass
    return seen


def _set_health(health: dict[int, Health], ranks: Iterable[int], word: Health) -> None:
    """Sets the health of `ranks`, except of dead ones: a late heartbeat does not revive a rank."""
    health.update({rank: word for rank in ranks if health.get(rank) != "dead"})


def _checkpoint(
    known: CheckpointView, event: CheckpointSaved | CheckpointFailed | TrainingResumed
) -> CheckpointView:
    match event:
        case CheckpointSaved(step=step, at=at):
            return CheckpointView(step=step, at=at)
        case CheckpointFailed(step=step, at=at, why=why, reading=reading):
            since, times = (known.failed.since, known.failed.times) if known.failed else (at, 0)
            failed = FailedSave(
                step=step,
                at=at,
                why=why,
                since=since,
                times=times + 1,
                advice=reading.advice if reading else "",
            )
            return replace(known, failed=failed)
        case TrainingResumed(step=step, passed_over=passed):
            complete_at = known.at if known.step == step else None
            return CheckpointView(step=step, at=complete_at, passed_over=passed)
