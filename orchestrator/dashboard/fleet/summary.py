"""What a row about a job is made of: a few facts that do not change while its files do not."""

from msgspec import Struct

from orchestrator.dashboard import format
from orchestrator.dashboard.job_view.view import believable, last_step
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.time_spent.account import TimeSpent
from orchestrator.dashboard.time_spent.read import time_spent
from orchestrator.job.hosts.straggler_replacement import why_slow
from orchestrator.job.stage import ENDED, State
from orchestrator.job.state import Run


class HostIncident(Struct, frozen=True, kw_only=True):
    """An incident whose culprit is on a host."""

    at: float
    host: str
    attempt: int
    kind: str
    drill: bool
    """A person caused it on purpose."""


class JobSummary(Struct, frozen=True, kw_only=True):
    name: str
    state: State
    reason: str
    """Why the job is in that state, as recorded."""
    note: str
    """What a person should know: why it is not training, or what slows it down. May be empty."""
    since: float
    as_of: float | None
    """When the state was last known. None: it is current."""
    backend: str
    scheduler: str | None
    attempt: int
    restarts: int
    step: int
    steps: int
    """0: unknown."""
    loss: float | None
    tokens_per_second: float | None
    step_s: float | None
    stepped_at: float | None
    """Unix time of the last step; None: there was no step, or its time is unknown."""
    effective_ratio: float | None
    """Share of its time that went into training that still counts, as `ndctl status` shows it."""
    hosts: int
    gpus: int
    """Devices with a rank."""
    placement: tuple[str, ...]
    """The hosts that it has now."""
    submitted_at: float
    updated_at: float
    leader_alive: bool
    group: str = ""
    """Name of jobs that belong together, such as those of a sweep."""
    incidents: tuple[HostIncident, ...] = ()
    """Oldest first."""

    @property
    def is_over(self) -> bool:
        return self.state in ENDED


def summary_of(snapshot: Snapshot, spent: TimeSpent | None = None) -> JobSummary:
    """`spent`: on what the time of the job went, if that is known. None: the journal is read."""
    run, job, last = snapshot.seen.run, snapshot.seen.run.job, snapshot.progress.last
    assert job is not None
    standing = snapshot.standing
    spent = time_spent(snapshot) if spent is None else spent
    # A queued job has no hosts: its plan has names of hosts, and its last attempt had others. A
    # job whose leader waits for agents is PENDING too, but has its hosts.
    is_queued = standing.state == "SUBMITTED" or (
        standing.state == "PENDING" and not snapshot.leader_alive
    )
    names = snapshot.seen.hosts
    done = last_step(run, snapshot.progress)
    # Ranks of the user's own program were alive, but nothing shows that they trained.
    trained = bool(done) or standing.state != "FAILED"
    return JobSummary(
        name=job.launch.job,
        state=standing.state,
        reason=standing.reason,
        note=_note(snapshot),
        since=standing.since,
        as_of=standing.as_of,
        backend=job.backend,
        scheduler=snapshot.scheduler,
        attempt=snapshot.seen.attempt,
        restarts=run.history.restarts,
        step=done,
        steps=job.steps,
        loss=last.loss if last else None,
        tokens_per_second=snapshot.progress.tokens_per_second,
        step_s=snapshot.progress.step_s,
        stepped_at=last.time if last else None,
        effective_ratio=spent.ratio if spent.effective_s and trained else None,
        hosts=len(names),
        gpus=run.plan.world_size,
        placement=() if is_queued or standing.state in ENDED else tuple(names),
        submitted_at=job.at,
        updated_at=snapshot.heard_at,
        leader_alive=snapshot.leader_alive,
        group=job.group,
        incidents=tuple(
            HostIncident(
                at=one.at,
                host=one.culprit.host,
                attempt=one.attempt,
                kind=one.failure or one.kind,
                drill=one.drill is not None,
            )
            for one in run.history.incidents
            if one.culprit.host is not None
        ),
    )


def _note(snapshot: Snapshot) -> str:
    standing, run = snapshot.standing, snapshot.seen.run
    if standing.as_of is not None or standing.state not in ("RUNNING", "SUCCEEDED"):
        reason = format.split_fix(standing.reason)[0]
        match standing.state:
            case "RECOVERING":
                return f"{_trouble(run)}{reason}"
            case "FAILED":
                return f"{_cause(run, reason)}{reason}"
            case _:
                return reason
    if standing.state == "SUCCEEDED":
        return ""
    failed = snapshot.seen.checkpoint.failed
    if failed is not None:
        return f"saving checkpoints fails since step {failed.step:,}"
    slow = sorted(run.attempt.stragglers.values(), key=lambda found: found.peers_s - found.own_s)
    return f"straggler on {slow[0].host}: {why_slow(slow[0])}" if slow else ""


def _trouble(run: Run) -> str:
    """`hang, culprit rank 3 on host-1; `: the reason of the state says what ndctl does about it."""
    last = run.history.incidents[-1] if run.history.incidents else None
    if last is None or last.resumed_after_s is not None:
        return ""
    return f"{last.kind}, {format.culprit_text(last.culprit)}; "


def _cause(run: Run, reason: str) -> str:
    """`rank 1 raised ImportError: …; `: the reason of a stopped job may have only its class."""
    last = run.history.incidents[-1] if run.history.incidents else None
    ends = last is not None and reason.startswith(last.action)
    return f"{last.cause}; " if last is not None and ends and not last.is_told_by(reason) else ""


def eta_s(job: JobSummary, now: float) -> float | None:
    """Seconds until the last step, if the job trains."""
    if job.state != "RUNNING" or job.as_of is not None or job.step_s is None:
        return None
    if job.step >= job.steps:  # all are done, or their number is not known
        return None
    quiet = 0.0 if job.stepped_at is None else max(0.0, now - job.stepped_at)
    return believable(max(0.0, (job.steps - job.step) * job.step_s - min(quiet, job.step_s)))
