"""All that a screen shows of one job, as one frozen value folded from journal and metrics.

`Run` is small whatever the job's size; what the screens need beyond it (the health of each rank,
when the checkpoint was written) is `Seen`, folded here from the same entries. Nothing here
knows how it is drawn.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from orchestrator.contract.files.checkpoint_names import PassedOver
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.events import (
    AgentLost,
    CheckpointFailed,
    CheckpointSaved,
    HealthChanged,
    JobSubmitted,
    RankExited,
    StepReached,
    StragglerFound,
    TrainingResumed,
)
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.metrics import NOTHING, Progress
from orchestrator.job.hosts.host_pool import gives_back_at, is_short
from orchestrator.job.incident import Incident
from orchestrator.job.reports.job_report import JobReport
from orchestrator.job.stage import ENDED, IDLE, Ended, Holding, Queued, State, Submitted, Waiting
from orchestrator.job.state import Run
from orchestrator.job.step import step
from orchestrator.journal.journal import Entry
from orchestrator.seams import Sighting

Health = Literal[
    "culprit", "dead", "silent", "straggler", "slow", "starting", "stopped", "done", "ok"
]
"""`slow` is a late heartbeat; a `straggler` does its own work slowly; the `culprit` is what the
verdict blames for the present trouble."""
WORST_FIRST: tuple[Health, ...] = (
    "culprit",
    "dead",
    "silent",
    "straggler",
    "slow",
    "starting",
    "stopped",
    "done",
    "ok",
)
TROUBLE: tuple[Health, ...] = ("culprit", "dead", "silent", "straggler", "slow")
LEADER_START_S = 30.0
"""What a leader may take to open the journal before it counts as gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSave:
    """The last one, and how many failed in a row."""

    step: int
    at: float
    why: str
    since: float
    """When the first of them failed."""
    times: int = 1
    advice: str = ""
    """Of the class of `why`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """The newest complete checkpoint, by the journal."""

    step: int = 0
    """0 for none yet."""
    at: float | None = None
    """When it was complete; None where the journal does not say."""
    passed_over: tuple[PassedOver, ...] = ()
    """Newer ones that the last resume could not use."""
    failed: FailedSave | None = None
    """The last save, when it failed and none was complete since."""

    @property
    def name(self) -> str:
        return f"step-{self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the views keep of the journal beyond `Run`."""

    run: Run = field(default_factory=Run)
    started: bool = False
    """The present attempt has done its first step."""
    resumed_from: int | None = None
    """Step that the present attempt went on from; None while it is loading."""
    health: Mapping[int, Health] = field(default_factory=dict)
    """Ranks of the present attempt whose health was told."""
    lost: frozenset[str] = frozenset()
    """Hosts that the present attempt lost."""
    checkpoint: CheckpointView = field(default_factory=CheckpointView)
    report: JobReport | None = None
    """What its leader last told its cluster, where that is newer than the journal that is here."""

    @property
    def attempt(self) -> int:
        """The newest that is known of."""
        return max(self.run.attempt.number, self.report.attempt if self.report is not None else 0)


def fold_seen(seen: Seen, entries: Iterable[Entry]) -> Seen:
    """`seen` after `entries`; give many at once, for each call copies the ranks' health once."""
    health = dict(seen.health)
    for entry in entries:
        run, _ = step(seen.run, entry.event)
        seen = _gone_back(_after(replace(seen, run=run), entry, health))
    return replace(seen, health=health)


def seen_at(run: Run, entries: Iterable[Entry]) -> Seen:
    """What the views keep at a place of the journal, of the state there and the lines up to it that
    came after the order to start the present attempt."""
    health: dict[int, Health] = {}
    seen = Seen(
        run=run, checkpoint=CheckpointView(step=run.progress.saved, at=run.progress.saved_at)
    )
    for entry in entries:
        seen = _after(seen, entry, health)
    return _gone_back(replace(seen, health=health))


def _after(seen: Seen, entry: Entry, health: dict[int, Health]) -> Seen:
    event = entry.event
    if getattr(event, "attempt", seen.run.attempt.number) == seen.run.attempt.number:
        seen = _noted(seen, entry, health)
    run = seen.run
    if any(isinstance(action, StartAttempt) for action in entry.actions):
        health.clear()
        seen = Seen(
            run=run, checkpoint=CheckpointView(step=run.progress.saved, at=run.progress.saved_at)
        )
    return seen


def _gone_back(seen: Seen) -> Seen:
    """With the older checkpoint to which the job goes back, where it went astray since."""
    run = seen.run
    if seen.checkpoint.step <= run.progress.saved:
        return seen
    return replace(
        seen, checkpoint=CheckpointView(step=run.progress.saved, at=run.progress.saved_at)
    )


def _noted(seen: Seen, entry: Entry, health: dict[int, Health]) -> Seen:
    match entry.event:
        case JobSubmitted(resume=resume):
            health.clear()
            kept = seen.checkpoint if resume else CheckpointView()
            return Seen(run=seen.run, checkpoint=kept)
        case HealthChanged(ranks=spans, health=word):
            for first, last in spans:
                _now(health, range(first, last + 1), word)
        case RankExited(rank=rank, stopped=stopped):
            _now(health, (rank,), "stopped" if stopped else "dead")
        case AgentLost(host=host):
            return replace(seen, lost=seen.lost | {host})
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


def _now(health: dict[int, Health], ranks: Iterable[int], word: Health) -> None:
    """Whoever is dead stays it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of a job as a person must hear it."""

    state: State
    reason: str
    since: float
    fix: str = ""
    """What to type, where nothing will happen by itself."""
    as_of: float | None = None
    """When the state was last known to hold, where it cannot be asked for now; None: it is live."""


def heard_at(run: Run, progress: Progress) -> float:
    """When the job gave its last sign of life: a line of its journal, or a step."""
    last = progress.last
    return max(run.history.last_at, (last.time if last else None) or 0.0)


def effective_state(
    run: Run,
    leader_alive: bool,
    now: float,
    fix: str = "",
    sighting: Sighting | None = None,
    report: JobReport | None = None,
) -> Standing:
    """A job that has not ended and has no leader is not running, whatever its journal says last;
    nor is one whose processes its scheduler has stopped.

    Args:
        fix: what submits it again.
        sighting: what a scheduler says of it; None where there is none, or it was not asked.
        report: as in `Seen`.
    """
    if sighting is not None and sighting.resume and run.state not in ENDED:
        return Standing(
            state="SUSPENDED",
            reason=sighting.words or "",
            since=max(run.history.last_at, sighting.at or 0.0),
            fix=sighting.resume,
        )
    if run.state in ENDED or leader_alive:
        return Standing(state=run.state, reason=run.stage.reason, since=run.stage.since)
    if report is not None and report.state in ENDED:
        return Standing(state=report.state, reason=report.message, since=report.updated)
    seen = None if sighting is None else _seen_from_outside(run, sighting, report, now)
    if seen is not None:
        return replace(seen, fix=fix) if seen.state == "FAILED" else seen
    if isinstance(run.stage, Submitted) and now - run.stage.since < LEADER_START_S:
        return Standing(state=run.state, reason=run.stage.reason, since=run.stage.since)
    if isinstance(run.stage, Submitted):
        reason = "no leader ever started: the backend did not bring up the first host's agent"
    else:
        reason = f"the leader went away without a word while {run.stage.title}"
        reason += f"; it was the agent of {run.scheduler.leader}" if run.scheduler.leader else ""
    return Standing(state="FAILED", reason=reason, since=run.history.last_at, fix=fix)


def _seen_from_outside(
    run: Run, sighting: Sighting, report: JobReport | None, now: float
) -> Standing | None:
    """What a scheduler knows better than the journal of a job that no process is known to lead."""
    words = sighting.words or ""
    if sighting.unknown:
        # The job may well train on: what was known stays, with its age.
        why, as_of = sighting.unknown, max(run.history.last_at, sighting.at or 0.0)
        if report is not None and report.updated > as_of:
            return Standing(state=report.state, reason=why, since=as_of, as_of=report.updated)
        return Standing(state=run.state, reason=why, since=run.stage.since, as_of=as_of)
    if sighting.over is not None:
        return Standing(state=sighting.over, reason=words, since=sighting.at or now)
    if sighting.held:
        return Standing(state="PENDING", reason=words, since=run.history.last_at)
    if words and isinstance(run.stage, Submitted):
        reason = f"no leader ever started: {words}"
        return Standing(state="FAILED", reason=reason, since=run.history.last_at)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    name: str
    first_rank: int
    ranks: tuple[Health, ...]
    """In the order of local ranks."""

    @property
    def worst(self) -> Health:
        return min(self.ranks, key=WORST_FIRST.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    name: str
    state: State
    reason: str
    fix: str
    as_of: float | None
    """As in `Standing`."""
    stage: str
    """What is being done, in words."""
    backend: str
    """With the number of a scheduler's job."""
    attempt: int
    restarts: int
    step: int
    steps: int
    loss: float | None
    tokens_per_second: float | None
    step_s: float | None
    quiet_s: float | None
    """Since the last step was done."""
    eta_s: float | None
    elapsed_s: float
    """Since it was submitted, until it ended."""
    mesh: Mesh
    hosts: tuple[HostRow, ...]
    """In node-rank order."""
    spares: tuple[str, ...]
    """Hosts that are there and wait."""
    gives_back_at: float | None
    """When all hosts are given back, if those that are short do not come; None while none is."""
    stragglers: tuple[StragglerFound, ...]
    """Ranks that keep their peers waiting now, the dearest first."""
    incidents: tuple[Incident, ...]
    losses: tuple[tuple[int, float], ...]
    """(step, loss), a few hundred at most."""
    checkpoint: CheckpointView
    drills: tuple[tuple[str, bool], ...]
    """Each drill, and whether it has happened."""
    commands: Commands
    now: float


def view(
    seen: Seen,
    progress: Progress = NOTHING,
    *,
    leader_alive: bool,
    now: float,
    sighting: Sighting | None = None,
    commands: Commands | None = None,
) -> View:
    """What to show at `now`; `sighting` as in `effective_state`."""
    run, last = seen.run, progress.last
    assert run.job is not None, "a journal begins with JobSubmitted"
    commands = commands or Commands(job=run.job.launch.job)
    standing = effective_state(run, leader_alive, now, commands.submit(), sighting, seen.report)
    over = standing.state in ENDED
    done = last_step(run, progress)
    return View(
        name=run.job.launch.job,
        state=standing.state,
        reason=standing.reason,
        fix=standing.fix,
        as_of=standing.as_of,
        stage=_doing(run),
        backend=_backend(run, run.job.backend),
        attempt=seen.attempt,
        restarts=run.history.restarts,
        step=done,
        steps=run.job.steps,
        loss=last.loss if last else None,
        tokens_per_second=last.tokens_per_second if last else None,
        step_s=progress.step_s,
        quiet_s=None if last is None or last.time is None else max(0.0, now - last.time),
        eta_s=None if standing.as_of else _eta(standing.state, run.job.steps - done, progress, now),
        elapsed_s=max(0.0, (_ended_at(run, progress) if over else now) - run.job.at),
        mesh=run.plan.mesh,
        hosts=tuple(_rows(seen, standing.state)),
        spares=_spares(run),
        gives_back_at=gives_back_at(run) if leader_alive and is_short(run) else None,
        stragglers=() if over else _stragglers(run),
        incidents=run.history.incidents,
        losses=progress.points,
        checkpoint=seen.checkpoint,
        drills=tuple((str(drill), drill.id in run.progress.drills) for drill in run.job.drills),
        commands=commands,
        now=now,
    )


def _stragglers(run: Run) -> tuple[StragglerFound, ...]:
    return tuple(
        sorted(run.attempt.stragglers.values(), key=lambda found: found.peers_s - found.own_s)
    )


def _backend(run: Run, name: str) -> str:
    """With what a scheduler calls the job."""
    return f"{name} job {run.scheduler.allocation.id}" if run.scheduler.allocation else name


def _doing(run: Run) -> str:
    if isinstance(run.stage, Holding):
        wait_s = run.stage.deadline - run.stage.since
        return f"waits {wait_s:.0f} s before attempt {run.attempt.number + 1}"
    if not isinstance(run.stage, Waiting) or run.job is None:
        return run.stage.title
    here = sum(host.alive for host in run.hosts.by_name.values())
    return f"{run.stage.title}, {here} of {len(run.job.launch.hosts)} here"


def last_step(run: Run, progress: Progress) -> int:
    """The last step that was done; the metrics know it sooner than the journal."""
    return run.attempt.step if progress.last is None else progress.last.step


def _ended_at(run: Run, progress: Progress) -> float:
    """For a job whose leader is gone, its last sign of life."""
    if isinstance(run.stage, Ended):
        return run.stage.since
    written = progress.last.time if progress.last else None
    return max(run.history.last_at, written or 0.0)


def _eta(state: State, left: int, progress: Progress, now: float) -> float | None:
    step_s, last = progress.step_s, progress.last
    if state != "RUNNING" or step_s is None or last is None:
        return None
    since = now - last.time if last.time is not None else 0.0
    return max(0.0, left * step_s - min(max(0.0, since), step_s))


def _rows(seen: Seen, state: State) -> Iterable[HostRow]:
    run, each = seen.run, seen.run.plan.ranks_per_host
    slow = set() if state in ENDED else {found.rank for found in run.attempt.stragglers.values()}
    blamed = set() if state == "SUCCEEDED" else set(_blamed(run))
    for node, host in enumerate(run.attempt.placement or run.plan.hosts):
        rest = _rest(seen, state, host)
        told: Mapping[int, Health] = seen.health
        if state == "SUCCEEDED" or host in seen.lost:
            told = {}
        numbers = range(node * each, (node + 1) * each)
        ranks = [_health(told.get(rank, rest), rest) for rank in numbers]
        # Of a host that is lost all ranks are dead, and nothing else has to be told of them.
        if (slow or blamed) and host not in seen.lost:
            marked = zip(numbers, ranks, strict=True)
            ranks = [_marked(health, rank in slow, rank in blamed) for rank, health in marked]
        yield HostRow(name=host, first_rank=node * each, ranks=tuple(ranks))


def _blamed(run: Run) -> Iterable[int]:
    """Ranks of the present attempt that the verdict on it names; of a host, all that it has."""
    if run.interruption.findings is not None and run.interruption.findings.judged is not None:
        return run.interruption.findings.judged.ranks
    last = run.history.incidents[-1] if run.history.incidents else None
    if last is None or last.attempt != run.attempt.number or last.recovered_after_s is not None:
        return ()
    if last.culprit.rank is not None:
        return (last.culprit.rank,)
    if last.culprit.host not in run.attempt.placement:
        return ()
    first = run.attempt.placement.index(last.culprit.host) * run.plan.ranks_per_host
    return range(first, first + run.plan.ranks_per_host)


def _marked(health: Health, slow: bool, blamed: bool) -> Health:
    """A straggler is heard in time; what is worse than that is shown instead."""
    if blamed:
        return "culprit"
    return "straggler" if slow and health in ("ok", "slow") else health


def _health(told: Health, rest: Health) -> Health:
    """A rank that is stopped or not yet training is neither ok, slow nor silent."""
    return rest if rest in ("stopped", "done", "starting") and told != "dead" else told


def _rest(seen: Seen, state: State, host: str) -> Health:
    """The health of those ranks of `host` of which nothing was told."""
    run = seen.run
    if state == "SUCCEEDED":
        return "done"
    if host in seen.lost:
        return "dead"
    if state in ENDED:
        return "stopped"
    if isinstance(run.stage, (Submitted, *IDLE, Queued)):
        queued = state == "PENDING" and isinstance(run.stage, Submitted)
        return "stopped" if run.attempt.number or queued else "starting"
    if host in run.attempt.done:
        return "done" if run.attempt.done[host] else "stopped"
    return "ok" if seen.started else "starting"


def _spares(run: Run) -> tuple[str, ...]:
    """Before the first attempt nobody is spare: all are waited for."""
    if not run.attempt.placement or run.state in ENDED:
        return ()
    return tuple(
        host.name
        for host in run.hosts.by_name.values()
        if host.alive and host.name not in run.attempt.placement
    )
