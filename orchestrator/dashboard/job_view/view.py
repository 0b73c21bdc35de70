"""Everything that a screen shows about one job, as one frozen value. Drawing is elsewhere."""

from msgspec import Struct

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.events import HostWarned, StragglerFound
from orchestrator.dashboard import format
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.job_view.health import HostRow
from orchestrator.dashboard.job_view.host_rows import host_rows, spares, stragglers
from orchestrator.dashboard.job_view.replayed_job import CheckpointView, ReplayedJob
from orchestrator.dashboard.job_view.standing import Standing, effective_state, heard_at
from orchestrator.dashboard.metrics import NO_PROGRESS, Metric, Progress
from orchestrator.dashboard.time_spent.account import TimeSpent
from orchestrator.job.hosts.host_pool import gives_back_at, is_short
from orchestrator.job.incident import Incident
from orchestrator.job.stage import ENDED, Ended, Holding, Starting, State, Waiting
from orchestrator.job.state import Run
from orchestrator.seams import LaunchStatus


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
    late_s: float | None
    """`quiet_s` of a job that trains, if its next step is late; else None."""
    eta_s: float | None
    """Seconds of training until the last step; None once it is done. While the job does not train,
    counted from the step from which it will resume, without the time until then."""
    elapsed_s: float
    """Seconds from the newest submission to the end, or until now."""
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
    standing = effective_state(seen, leader_alive, now, commands.submit(), launch_status, progress)
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
        tokens_per_second=progress.tokens_per_second,
        peak_memory_bytes=last.peak_memory_bytes if last else None,
        gpu_utilization=last.gpu_utilization if last else None,
        step_s=progress.step_s,
        quiet_s=_quiet_s(progress, now),
        late_s=_late_s(standing, progress, now),
        eta_s=eta_s,
        elapsed_s=max(0.0, (_ended_at(run, progress) if over else now) - run.job.at),
        mesh=run.plan.mesh,
        is_own=run.plan.is_own,
        unused=run.progress.unused,
        split=run.plan.split,
        hosts=tuple(host_rows(seen, standing.state)),
        spares=spares(seen),
        gives_back_at=gives_back_at(run) if leader_alive and is_short(run) else None,
        stragglers=stragglers(seen, standing.state),
        warnings=() if over else run.hosts.warned,
        incidents=run.history.incidents,
        verdict=_verdict(run),
        samples=progress.samples,
        checkpoint=seen.checkpoint,
        drills=tuple((str(drill), drill.id in run.progress.drills) for drill in run.job.drills),
        commands=commands,
        now=now,
    )


LATE_S = 5.0
"""A step is not late before so much time, because short steps vary the most."""
LATE_TIMES = 3.0
"""A step is late after so many times the longest pause between the last steps."""


def _quiet_s(progress: Progress, now: float) -> float | None:
    last = progress.last
    return None if last is None or last.time is None else max(0.0, now - last.time)


def _late_s(standing: Standing, progress: Progress, now: float) -> float | None:
    quiet_s = _quiet_s(progress, now)
    # Of a state that is not current, the steps since then are unknown.
    if standing.state != "RUNNING" or standing.as_of is not None or quiet_s is None:
        return None
    usual_s = progress.longest_pause_s or 0.0
    return quiet_s if quiet_s > max(LATE_S, LATE_TIMES * usual_s) else None


def _verdict(run: Run) -> str:
    findings = run.interruption.findings
    if findings is None or findings.judged is None:
        return ""
    judged = findings.judged
    return f"{format.one_line(judged.cause)} (confidence {judged.confidence:.0%})"


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
    """The last finished step. The metrics have it earlier than the journal, unless rank 0 was
    killed before it wrote them: agents hear of a step first."""
    last, attempt = progress.last, run.attempt
    if last is None:
        return attempt.step
    if attempt.stepped and last.attempt < attempt.number:
        return attempt.step  # the metrics have only steps of earlier attempts, which may be later
    if last.attempt >= attempt.number and not attempt.stepped:
        return last.step  # the journal has only steps of earlier attempts
    return max(last.step, attempt.step)


def _ended_at(run: Run, progress: Progress) -> float:
    # A leader that died did not record an end.
    return run.stage.since if isinstance(run.stage, Ended) else heard_at(run, progress)


LONGEST_ETA_S = 100 * 365 * 86_400.0
RESUMES: tuple[State, ...] = ("STARTING", "RECOVERING", "PENDING", "SUSPENDED")
"""States of a job that will train again."""


def _eta(seen: ReplayedJob, state: State, progress: Progress, now: float) -> float | None:
    run, step_s, last = seen.run, progress.step_s, progress.last
    if run.job is None or not run.job.steps or step_s is None or last is None:
        return None
    if state in RESUMES and (last.attempt < run.attempt.number or run.state != "RUNNING"):
        is_new = last.attempt < run.attempt.number and seen.resumed_from is not None
        from_step = seen.resumed_from if is_new else seen.checkpoint.step
        return believable((run.job.steps - min(from_step or 0, last.step)) * step_s)
    # After the last step the ranks still write a checkpoint, and no step tells how long that takes.
    if state not in (*RESUMES, "RUNNING") or last.step >= run.job.steps:
        return None
    left_s = (run.job.steps - last.step) * step_s
    since = now - last.time if last.time is not None and state == "RUNNING" else 0.0
    return believable(max(0.0, left_s - min(max(0.0, since), step_s)))


def believable(eta_s: float) -> float | None:
    """The time that is left; None: so long that it says nothing, and would fill the screen."""
    return eta_s if eta_s <= LONGEST_ETA_S else None
