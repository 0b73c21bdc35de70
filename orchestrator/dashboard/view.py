"""Everything that a screen shows about one job, as one frozen value.

The job state is small for a job of any size. Screens need more, for example the health of each
rank; `ReplayedJob` holds that and is built here from the same journal entries. Drawing is
elsewhere.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.events import (
    AgentLost,
    CheckpointFailed,
    CheckpointSaved,
    HealthChanged,
    HostWarned,
    JobSubmitted,
    RankExited,
    StepReached,
    StragglerFound,
    TrainingResumed,
)
from orchestrator.dashboard import format
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.metrics import NO_PROGRESS, Metric, Progress
from orchestrator.dashboard.time_spent.account import TimeSpent
from orchestrator.job.hosts.host_pool import gives_back_at, is_short
from orchestrator.job.incident import Incident
from orchestrator.job.reports.job_report import JobReport
from orchestrator.job.stage import (
    ENDED,
    IDLE,
    Ended,
    Holding,
    Queued,
    Starting,
    State,
    Submitted,
    Waiting,
)
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Entry
from orchestrator.seams import LaunchStatus

Health = Literal[
    "culprit", "dead", "silent", "straggler", "slow", "starting", "stopped", "done", "ok"
]
"""`slow`: late heartbeat. `silent`: no heartbeat. `straggler`: slow own work. `culprit`: the root
cause of the present incident."""
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
UNHEALTHY: tuple[Health, ...] = ("culprit", "dead", "silent", "straggler", "slow")
LEADER_START_S = 30.0
"""A leader that has not opened the journal after so long counts as failed to start."""


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
    checkpoint: CheckpointView = field(default_factory=CheckpointView)
    report: JobReport | None = None
    """The leader's last report to its cluster, if it is newer than the local journal."""

    @property
    def attempt(self) -> int:
        """Number of the newest known attempt."""
        return max(self.run.attempt.number, self.report.attempt if self.report is not None else 0)


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
    seen = ReplayedJob(
        run=run, checkpoint=CheckpointView(step=run.progress.saved, at=run.progress.saved_at)
    )
    for entry in entries:
        seen = _after(seen, entry, health)
    return _after_rollback(replace(seen, health=health))


def _after(seen: ReplayedJob, entry: Entry, health: dict[int, Health]) -> ReplayedJob:
    event = entry.event
    # Late events about an earlier attempt must not change the health of the current one.
    if getattr(event, "attempt", seen.run.attempt.number) == seen.run.attempt.number:
        seen = _apply_event(seen, entry, health)
    run = seen.run
    if any(isinstance(action, StartAttempt) for action in entry.actions):
        health.clear()
        seen = ReplayedJob(
            run=run, checkpoint=CheckpointView(step=run.progress.saved, at=run.progress.saved_at)
        )
    return seen


def _after_rollback(seen: ReplayedJob) -> ReplayedJob:
    """`seen` with an older checkpoint, if a rollback discarded the newest one."""
    run = seen.run
    if seen.checkpoint.step <= run.progress.saved:
        return seen
    return replace(
        seen, checkpoint=CheckpointView(step=run.progress.saved, at=run.progress.saved_at)
    )


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


class Standing(Struct, frozen=True, kw_only=True):
    """The state of a job as users see it."""

    state: State
    reason: str
    since: float
    fix: str = ""
    """Command to type, if ndctl will do nothing by itself."""
    as_of: float | None = None
    """Unix time when the state was last known. None: the state is current."""


def heard_at(run: Run, progress: Progress) -> float:
    """Unix time of the last journal line or step."""
    last = progress.last
    return max(run.last_at, (last.time if last else None) or 0.0)


def awaited_jobs(run: Run) -> str:
    """Names of the jobs that a job in the local queue waits for; empty: it is not there."""
    if run.job is None or not isinstance(run.stage, Submitted):
        return ""
    return " and ".join(Path(run_dir).name for run_dir in run.job.launch.after)


def effective_state(
    run: Run,
    leader_alive: bool,
    now: float,
    fix: str = "",
    launch_status: LaunchStatus | None = None,
    report: JobReport | None = None,
) -> Standing:
    """The state of a job, from its journal, its leader process and its scheduler.

    The journal alone is not enough: a job without a leader is not running, even if its journal
    ends with RUNNING, and a scheduler may have suspended its processes.

    Args:
        fix: the command that resubmits the job.
        launch_status: the scheduler's answer; None if there is no scheduler or it was not asked.
        report: as in `ReplayedJob`.
    """
    if launch_status is not None and launch_status.resume and run.state not in ENDED:
        return Standing(
            state="SUSPENDED",
            reason=launch_status.words or "",
            since=max(run.last_at, launch_status.at or 0.0),
            fix=launch_status.resume,
        )
    if leader_alive and (awaited := awaited_jobs(run)):
        reason = f"starts when {awaited} has succeeded"
        return Standing(state="PENDING", reason=reason, since=run.stage.since)
    if run.state in ENDED or leader_alive:
        return Standing(state=run.state, reason=run.stage.reason, since=run.stage.since)
    if report is not None and report.state in ENDED:
        return Standing(state=report.state, reason=report.message, since=report.updated)
    seen = None if launch_status is None else _scheduler_state(run, launch_status, report, now)
    if seen is not None:
        return replace(seen, fix=fix) if seen.state == "FAILED" else seen
    # The job has no leader, and its scheduler does not know it.
    if isinstance(run.stage, Submitted) and now - run.stage.since < LEADER_START_S:
        return Standing(state=run.state, reason=run.stage.reason, since=run.stage.since)
    if isinstance(run.stage, Submitted):
        reason = "no leader started: the backend did not start the agent of the first host"
    else:
        where = f" on {run.scheduler.leader}" if run.scheduler.leader else ""
        reason = f"the leader{where} died without recording a reason, in stage: {run.stage.title}"
    return Standing(state="FAILED", reason=reason, since=run.last_at, fix=fix)


def _scheduler_state(
    run: Run, launch_status: LaunchStatus, report: JobReport | None, now: float
) -> Standing | None:
    """The state of a job without a known leader according to its scheduler, if that tells it."""
    words = launch_status.words or ""
    if launch_status.unknown:
        # The scheduler is unreachable and the job may still train: show the last known state.
        why, as_of = launch_status.unknown, max(run.last_at, launch_status.at or 0.0)
        if report is not None and report.updated > as_of:
            return Standing(state=report.state, reason=why, since=as_of, as_of=report.updated)
        return Standing(state=run.state, reason=why, since=run.stage.since, as_of=as_of)
    if launch_status.over is not None:
        return Standing(state=launch_status.over, reason=words, since=launch_status.at or now)
    if launch_status.held:
        return Standing(state="PENDING", reason=words, since=run.last_at)
    if words and isinstance(run.stage, Submitted):
        reason = f"no leader started: {words}"
        return Standing(state="FAILED", reason=reason, since=run.last_at)
    return None


class HostRow(Struct, frozen=True, kw_only=True):
    name: str
    first_rank: int
    ranks: tuple[Health, ...]
    """In order of local ranks."""

    @property
    def worst(self) -> Health:
        return _worst(self.ranks)


@lru_cache(maxsize=1 << 10)
def _worst(ranks: tuple[Health, ...]) -> Health:
    """Nearly all of thousands of hosts have the same health."""
    return min(ranks, key=WORST_FIRST.index)


class View(Struct, frozen=True, kw_only=True):
    name: str
    state: State
    reason: str
    fix: str
    as_of: float | None
    """See `Standing.as_of`."""
    stage: str
    """What the job does at present, as text."""
    backend: str
    """Backend name and, if there is one, the scheduler's job number."""
    attempt: int
    restarts: int
    step: int
    steps: int
    loss: float | None
    tokens_per_second: float | None
    peak_memory_bytes: float | None
    """Of rank 0."""
    gpu_utilization: float | None
    """0 to 1, of rank 0."""
    step_s: float | None
    quiet_s: float | None
    """Seconds since the last step."""
    eta_s: float | None
    """Seconds of training until the last step. While the job does not train, counted from the step
    from which it will resume, without the time until then."""
    elapsed_s: float
    """Seconds from submission to the end, or until now."""
    mesh: Mesh
    is_own: bool
    """The ranks run the user's own program, so `mesh` says only how many there are."""
    unused: int
    """Step of a checkpoint that the user's program did not load; 0: none."""
    split: str
    """How the ranks split the work, as text."""
    hosts: tuple[HostRow, ...]
    """In node-rank order."""
    spares: tuple[str, ...]
    """Registered hosts that the current attempt does not use."""
    gives_back_at: float | None
    """Unix time when ndctl releases all hosts, if missing hosts do not arrive. None: none miss."""
    stragglers: tuple[StragglerFound, ...]
    """Ranks that delay their peers at present, the most expensive first."""
    warnings: tuple[HostWarned, ...]
    """What hosts warn of at present, oldest first."""
    incidents: tuple[Incident, ...]
    verdict: str
    """The cause of a hang, between its verdict and the incident, which follows once all ranks have
    stopped; else empty."""
    samples: tuple[Metric, ...]
    """Lines of the metrics in ascending steps, at most a few hundred."""
    checkpoint: CheckpointView
    drills: tuple[tuple[str, bool], ...]
    """Each drill, and whether it has fired."""
    commands: Commands
    now: float
    time: TimeSpent | None = None
    """What the time of the job went to; None: not counted."""
    saved_steps: tuple[int, ...] = ()
    """Steps of complete checkpoints, ascending, at most about a thousand."""

    @property
    def last(self) -> Metric | None:
        """The newest line of the metrics."""
        return self.samples[-1] if self.samples else None

    @property
    def losses(self) -> tuple[tuple[int, float], ...]:
        return self.series("loss")

    def series(self, name: str) -> tuple[tuple[int, float], ...]:
        """(step, value) of one field of the metrics, where it has a value."""
        found = ((one.step, getattr(one, name)) for one in self.samples)
        return tuple((step, value) for step, value in found if value is not None)

    @property
    def resumed_steps(self) -> tuple[int, ...]:
        """First step of each later attempt that is among the samples."""
        pairs = zip(self.samples, self.samples[1:], strict=False)
        return tuple(after.step for before, after in pairs if before.attempt != after.attempt)


def view(
    seen: ReplayedJob,
    progress: Progress = NO_PROGRESS,
    *,
    leader_alive: bool,
    now: float,
    launch_status: LaunchStatus | None = None,
    commands: Commands | None = None,
) -> View:
    """The view of a job at the Unix time `now`; `launch_status` as in `effective_state`."""
    run, last = seen.run, progress.last
    assert run.job is not None, "a journal begins with JobSubmitted"
    commands = commands or Commands(job=run.job.launch.job)
    standing = effective_state(
        run, leader_alive, now, commands.submit(), launch_status, seen.report
    )
    over = standing.state in ENDED
    done = last_step(run, progress)
    eta_s = None if standing.as_of else _eta(seen, standing.state, progress, now)
    return View(
        name=run.job.launch.job,
        state=standing.state,
        reason=standing.reason,
        fix=standing.fix,
        as_of=standing.as_of,
        stage=_stage_text(run),
        backend=_backend(run, run.job.backend),
        attempt=seen.attempt,
        restarts=run.history.restarts,
        step=done,
        steps=run.job.steps,
        loss=last.loss if last else None,
        tokens_per_second=last.tokens_per_second if last else None,
        peak_memory_bytes=last.peak_memory_bytes if last else None,
        gpu_utilization=last.gpu_utilization if last else None,
        step_s=progress.step_s,
        quiet_s=None if last is None or last.time is None else max(0.0, now - last.time),
        eta_s=eta_s,
        elapsed_s=max(0.0, (_ended_at(run, progress) if over else now) - run.job.at),
        mesh=run.plan.mesh,
        is_own=run.plan.is_own,
        unused=run.progress.unused,
        split=run.plan.split,
        hosts=tuple(_host_rows(seen, standing.state)),
        spares=_spares(run),
        gives_back_at=gives_back_at(run) if leader_alive and is_short(run) else None,
        stragglers=_stragglers(seen, standing.state),
        warnings=() if over else run.hosts.warned,
        incidents=run.history.incidents,
        verdict=_verdict(run),
        samples=progress.samples,
        checkpoint=seen.checkpoint,
        drills=tuple((str(drill), drill.id in run.progress.drills) for drill in run.job.drills),
        commands=commands,
        now=now,
    )


def _verdict(run: Run) -> str:
    findings = run.interruption.findings
    if findings is None or findings.judged is None:
        return ""
    judged = findings.judged
    return f"{format.one_line(judged.cause)} (confidence {judged.confidence:.0%})"


def _stragglers(seen: ReplayedJob, state: State) -> tuple[StragglerFound, ...]:
    """Without those whose ranks have stopped."""
    found = seen.run.attempt.stragglers.values()
    present = (one for one in found if _rest(seen, state, one.host) == "ok")
    return tuple(sorted(present, key=lambda one: one.peers_s - one.own_s))


def _backend(run: Run, name: str) -> str:
    return f"{name} job {run.scheduler.allocation.id}" if run.scheduler.allocation else name


def _stage_text(run: Run) -> str:
    if isinstance(run.stage, Holding):
        wait_s = run.stage.deadline - run.stage.since
        return f"waiting {wait_s:.0f} s before attempt {run.attempt.number + 1}"
    if isinstance(run.stage, Starting) and run.attempt.runs:
        return "running"
    if not isinstance(run.stage, Waiting) or run.job is None:
        return run.stage.title
    here = sum(host.alive for host in run.hosts.by_name.values())
    return f"{run.stage.title}, {here} of {len(run.job.launch.hosts)} registered"


def last_step(run: Run, progress: Progress) -> int:
    """The last finished step. The metrics have it earlier than the journal."""
    return run.attempt.step if progress.last is None else progress.last.step


def _ended_at(run: Run, progress: Progress) -> float:
    if isinstance(run.stage, Ended):
        return run.stage.since
    # The leader died before it could record an end: take the last journal line or step.
    written = progress.last.time if progress.last else None
    return max(run.last_at, written or 0.0)


RESUMES: tuple[State, ...] = ("STARTING", "RECOVERING", "PENDING", "SUSPENDED")
"""States of a job that will train again."""


def _eta(seen: ReplayedJob, state: State, progress: Progress, now: float) -> float | None:
    run, step_s, last = seen.run, progress.step_s, progress.last
    if run.job is None or not run.job.steps or step_s is None or last is None:
        return None
    if state in RESUMES and (last.attempt < run.attempt.number or run.state != "RUNNING"):
        is_new = last.attempt < run.attempt.number and seen.resumed_from is not None
        from_step = seen.resumed_from if is_new else seen.checkpoint.step
        return (run.job.steps - min(from_step or 0, last.step)) * step_s
    if state not in (*RESUMES, "RUNNING"):
        return None
    left_s = (run.job.steps - last.step) * step_s
    since = now - last.time if last.time is not None and state == "RUNNING" else 0.0
    return max(0.0, left_s - min(max(0.0, since), step_s))


def _host_rows(seen: ReplayedJob, state: State) -> Iterable[HostRow]:
    run, each = seen.run, seen.run.plan.ranks_per_host
    slow = set() if state in ENDED else {found.rank for found in run.attempt.stragglers.values()}
    blamed = set() if state == "SUCCEEDED" else set(_culprit_ranks(run))
    names = run.attempt.placement or run.plan.hosts
    lost = {node for node, host in enumerate(names) if host in seen.lost}
    exited = any(word == "dead" and rank // each not in lost for rank, word in seen.health.items())
    for node, host in enumerate(names):
        rest = _rest(seen, state, host)
        told: Mapping[int, Health] = seen.health
        if state == "SUCCEEDED" or host in seen.lost:
            told = {}
        numbers = range(node * each, (node + 1) * each)
        ranks = [_health(told.get(rank, rest), rest) for rank in numbers]
        # All ranks of a lost host are dead. They need a mark only if ranks of other hosts, which
        # lost their peers, exited too.
        if (slow or blamed) and (exited or node not in lost):
            marked = zip(numbers, ranks, strict=True)
            ranks = [_mark(health, rank in slow, rank in blamed) for rank, health in marked]
        yield HostRow(name=host, first_rank=node * each, ranks=tuple(ranks))


def _culprit_ranks(run: Run) -> Iterable[int]:
    """Ranks of the current attempt that the present incident names; all ranks of a named host."""
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


def _mark(health: Health, slow: bool, blamed: bool) -> Health:
    """A straggler still sends heartbeats, so a worse health hides the mark."""
    if blamed:
        return "culprit"
    return "straggler" if slow and health in ("ok", "slow") else health


def _health(told: Health, rest: Health) -> Health:
    """The health to show: a stopped or starting rank has no heartbeat health."""
    return rest if rest in ("stopped", "done", "starting") and told != "dead" else told


def _rest(seen: ReplayedJob, state: State, host: str) -> Health:
    """The health of the ranks of `host` that have no reported health."""
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
    return "ok" if seen.started or run.attempt.runs else "starting"


def _spares(run: Run) -> tuple[str, ...]:
    """Registered hosts without ranks. Before the first attempt there are none."""
    if not run.attempt.placement or run.state in ENDED:
        return ()
    placed = frozenset(run.attempt.placement)
    return tuple(
        host.name for host in run.hosts.by_name.values() if host.alive and host.name not in placed
    )
