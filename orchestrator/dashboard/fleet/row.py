"""One job in the list of all jobs, in the order in which a person wants to see them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct

from orchestrator.dashboard.fleet.summary import JobSummary, eta_s
from orchestrator.job.stage import ENDED, State

RowState = State | Literal["GONE", "UNKNOWN"]
"""`GONE`: registered, but its run directory does not exist here. `UNKNOWN`: it cannot be read."""
ROW_STATES: tuple[str, ...] = (*get_args(State), "GONE", "UNKNOWN")
RECENT_S = 24 * 3600.0
"""A job that failed within this time counts as trouble."""
OLD_S = 7 * 24 * 3600.0
"""A job that ended before that is shown only on request."""
ACTIVE: tuple[RowState, ...] = ("RUNNING", "STARTING", "PENDING", "SUBMITTED")
"""In this order, after trouble and before jobs that ended."""


class JobRow(Struct, frozen=True, kw_only=True):
    name: str
    run_dir: str
    user: str = ""
    backend: str = ""
    hosts: int = 0
    gpus: int = 0
    submitted_at: float = 0.0
    """0: unknown."""
    job: JobSummary | None = None
    """None: the run directory cannot be read; `problem` says why."""
    problem: str = ""
    gone: bool = False
    archived: bool = False
    """`submit --new` moved it away."""

    @property
    def state(self) -> RowState:
        if self.job is not None:
            return self.job.state
        return "GONE" if self.gone else "UNKNOWN"

    @property
    def group(self) -> str:
        """Name of jobs that belong together; empty: none, or not known."""
        return "" if self.job is None else self.job.group

    @property
    def note(self) -> str:
        return self.problem if self.job is None else self.job.note

    @property
    def at(self) -> float:
        """When the job ended, or last changed its state, or was submitted."""
        return self.submitted_at if self.job is None else self.job.since


def row_of(path: Path, user: str, summary: JobSummary, *, archived: bool = False) -> JobRow:
    """The row of the job in `path`, which was read."""
    return JobRow(
        name=path.name,
        user=user,
        run_dir=str(path),
        backend=summary.backend,
        hosts=summary.hosts,
        gpus=summary.gpus,
        submitted_at=summary.submitted_at,
        job=summary,
        archived=archived,
    )


def in_order(rows: Iterable[JobRow], now: float) -> list[JobRow]:
    """Trouble first, then jobs that run, then jobs that wait, then the rest; newest first."""
    return sorted(rows, key=lambda row: (_rank(row, now), -row.at, row.name, row.run_dir))


def is_trouble(row: JobRow, now: float) -> bool:
    """Whether a person on call should look: it recovers, is suspended, has failed within a day, or
    is out of reach."""
    if row.job is not None and row.job.as_of is not None:
        return True
    recent = row.state == "FAILED" and now - row.at < RECENT_S and not row.archived
    return row.state in ("RECOVERING", "SUSPENDED") or recent


def _rank(row: JobRow, now: float) -> int:
    if is_trouble(row, now):
        return 1 if row.state == "FAILED" else 0
    return 2 + ACTIVE.index(row.state) if row.state in ACTIVE else 2 + len(ACTIVE)


def is_old(row: JobRow, now: float) -> bool:
    # Of a job that cannot be read and has no entry in the index it is not known since when.
    return row.state in (*ENDED, "GONE", "UNKNOWN") and row.at > 0 and now - row.at > OLD_S


def row_json(row: JobRow, now: float) -> dict[str, Any]:
    job = row.job
    known = {
        "name": row.name,
        "user": row.user,
        "state": row.state,
        "backend": row.backend,
        "hosts": row.hosts,
        "gpus": row.gpus,
        "submitted_at": row.submitted_at,
        "run_dir": row.run_dir,
        "archived": row.archived,
        "group": row.group or None,
    }
    if job is None:
        return {**known, "reason": row.problem, **dict.fromkeys(_OF_JOB), "as_of": None}
    return {
        **known,
        "reason": job.reason,
        **{key: tell(job, now) for key, tell in _OF_JOB.items()},
        "as_of": job.as_of,
    }


_OF_JOB: dict[str, Callable[[JobSummary, float], Any]] = {
    "since": lambda job, now: job.since,
    "step": lambda job, now: job.step,
    "steps": lambda job, now: job.steps,
    "eta_s": eta_s,
    "effective_ratio": lambda job, now: job.effective_ratio,
    "attempt": lambda job, now: job.attempt,
    "restarts": lambda job, now: job.restarts,
    "loss": lambda job, now: job.loss,
    "tokens_per_second": lambda job, now: job.tokens_per_second,
    "scheduler": lambda job, now: job.scheduler,
    "updated_at": lambda job, now: job.updated_at,
}
