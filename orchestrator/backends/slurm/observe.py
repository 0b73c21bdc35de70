"""Parse the output of Slurm's commands about jobs (22.05 and newer). Pure.

`scontrol show job -o` and `squeue` know a job until MinJobAge after its end. sacct knows it longer,
but is not used: it lags behind, and on few clusters it stores the comment that identifies a job.
"""

import contextlib
import re
import signal
from collections.abc import Mapping
from datetime import datetime, tzinfo
from typing import Literal

from msgspec import Struct

from orchestrator.contract.launch import Cause
from orchestrator.contract.spec.slurm_spec import seconds
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.slurm.records import fields, records
from orchestrator.seams import RunPhase

Meaning = Literal["queued", "running", "leaving", "held", "ended"]
"""`leaving`: its processes are being ended, and it may be requeued. `held`: in the queue until a
person releases it."""

STATES: Mapping[str, Meaning] = {
    "PENDING": "queued",
    "CONFIGURING": "queued",
    "REQUEUE_FED": "queued",
    "REVOKED": "ended",
    "REQUEUED": "queued",
    "RUNNING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "leaving",
    "SUSPENDED": "running",
    "STOPPED": "running",
    "COMPLETING": "leaving",
    "REQUEUE_HOLD": "held",
    "SPECIAL_EXIT": "held",
    "RESV_DEL_HOLD": "held",
    "BOOT_FAIL": "ended",
    "CANCELLED": "ended",
    "COMPLETED": "ended",
    "DEADLINE": "ended",
    "FAILED": "ended",
    "LAUNCH_FAILED": "ended",
    "NODE_FAIL": "ended",
    "OUT_OF_MEMORY": "ended",
    "PREEMPTED": "ended",
    "RECONFIG_FAIL": "ended",
    "TIMEOUT": "ended",
}
"""All states in the manuals of squeue and sacct. A job that is requeued after PREEMPTED or
NODE_FAIL keeps its id and becomes PENDING."""


class SlurmJob(Struct, frozen=True, kw_only=True):
    id: str
    state: str
    """Slurm's state without flags and without `by UID`."""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    excluded: tuple[str, ...] = ()
    starts_at: float | None = None
    """Unix seconds of the start, or from when on a waiting job may start; None: unknown."""
    since: float | None = None
    """Unix seconds since when it waits in the queue, or is suspended; None: unknown."""
    ends_at: float | None = None
    """Unix seconds of the end, or of the time limit for a running job."""
    limit_at: float | None = None
    """Unix seconds of the time limit, also for a job that ended earlier; None: no limit."""
    exit_code: str = ""
    """Exit code of the batch script, as `CODE:SIGNAL`."""
    preempted: bool = False
    """Slurm has started to preempt it."""
    comment: str = ""
    command: str = ""
    is_batch: bool = True
    """It runs a batch script, unlike an allocation of salloc."""
    may_requeue: bool = True

    @property
    def meaning(self) -> Meaning:
        """An unknown state counts as running, so that callers wait."""
        if self.state == "PENDING" and HELD.search(self.reason):
            return "held"
        return STATES.get(self.state, "running")

    @property
    def is_over(self) -> bool:
        return self.meaning == "ended"


HELD = re.compile(r"^JobHeld(User|Admin)$|^JobHoldMaxRequeue$|[ _]held([ _]|$)")
"""Matches reasons such as `launch failed requeued held`, `job_requeued_in_held_state`."""


def parse_jobs(text: str, zone: tzinfo | None = None) -> tuple[SlurmJob, ...]:
    """Parse `scontrol show job -o`. `zone`: time zone of the output; None: of this machine."""
    return tuple(_scontrol_job(fields(record), zone) for record in records(text, "JobId"))


SINCE = {"SUSPENDED": "SuspendTime", "STOPPED": "SuspendTime"}
"""State -> field with its begin. Slurm sets SubmitTime again when it requeues a job."""


def _scontrol_job(said: Mapping[str, str], zone: tzinfo | None) -> SlurmJob:
    return SlurmJob(
        id=_id(said),
        state=_state(said.get("JobState", "")),
        reason="" if said.get("Reason") == "None" else said.get("Reason", ""),
        exit_code=said.get("ExitCode", ""),
        nodes=expand(said.get("NodeList", "")),
        restarts=int(said.get("Restarts", "0")),
        excluded=expand(said.get("ExcNodeList", "")),
        starts_at=_time(said.get("StartTime", ""), zone),
        since=_time(said.get(SINCE.get(_state(said.get("JobState", "")), "SubmitTime"), ""), zone),
        ends_at=_time(said.get("EndTime", ""), zone),
        limit_at=_limit_at(said, zone),
        preempted=_time(said.get("PreemptTime", ""), zone) is not None,
        comment=said.get("Comment", ""),
        command=said.get("Command", ""),
        is_batch=said.get("BatchFlag") != "0",
        may_requeue=said.get("Requeue") != "0",
    )


def _id(said: Mapping[str, str]) -> str:
    """The job id; `12_3` for an array task."""
    array, task = said.get("ArrayJobId"), said.get("ArrayTaskId", "")
    return f"{array}_{task}" if array and task.isdigit() else said["JobId"]


def _state(text: str) -> str:
    """The first word of `CANCELLED by 0` and `RUNNING+COMPLETING`."""
    return re.split(r"[ +]", text, maxsplit=1)[0]


def _time(text: str, zone: tzinfo | None) -> float | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()
    except ValueError:  # Unknown, N/A, None
        return None


def _limit_at(said: Mapping[str, str], zone: tzinfo | None) -> float | None:
    begun, limit_s = _time(said.get("StartTime", ""), zone), seconds(said.get("TimeLimit", ""))
    return None if begun is None or limit_s is None else begun + limit_s


SQUEUE_FORMAT = "%i|%T|%r|%x|%S|%V|%o|%k"
"""Format for `squeue -h -o`. The comment is last, because it may contain separators."""


def parse_queue(text: str, zone: tzinfo | None = None) -> tuple[SlurmJob, ...]:
    """Parse the output of squeue with SQUEUE_FORMAT. `zone`: as for `parse_jobs`."""
    rows = (line.split("|", 7) for line in text.splitlines())
    return tuple(
        SlurmJob(
            id=row[0],
            state=_state(row[1]),
            reason=row[2].strip("()") if row[2] != "None" else "",
            excluded=expand("" if row[3] in ("(null)", "N/A") else row[3]),
            starts_at=_time(row[4], zone),
            since=None if _state(row[1]) in SINCE else _time(row[5], zone),
            command=row[6],
            comment="" if row[7] == "(null)" else row[7],
        )
        for row in rows
        if len(row) == 8
    )


BROKE: Mapping[str, Cause] = {
    "TimeLimit": "time-limit",
    "JobLaunchFailure": "failed",
    "RaisedSignal": "failed",
    "NonZeroExitCode": "failed",
    "OutOfMemory": "failed",
    "NodeDown": "failed",
    "NodeFail": "failed",
}
"""Start of Slurm's reason for a run that is being ended and was not cancelled. If a signal ended
the batch script, it is JobLaunchFailure or, in newer versions, `RaisedSignal:9(Killed)`."""
OUTCOMES: Mapping[str, Cause] = {
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "FAILED": "failed",
    "LAUNCH_FAILED": "failed",
    "BOOT_FAIL": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
}


def phase(job: SlurmJob, restarts: int) -> RunPhase:
    """The phase of the run of `job` that started after `restarts` requeues."""
    if job.is_over:
        return "over"
    if job.restarts > restarts or job.meaning in ("queued", "held"):
        return "queued again"
    if job.meaning != "leaving":
        return "running"
    return "broken" if can_be_queued_again(job, restarts) else "ending"


def cause(job: SlurmJob, restarts: int, now: float, notice_s: float) -> Cause:
    """Why the run of `job` that started after `restarts` requeues is being ended."""
    if job.preempted or job.state == "PREEMPTED":
        return "preempted"
    if job.restarts > restarts or job.meaning in ("queued", "held"):
        return "requeued"
    if job.meaning == "running":
        near = job.ends_at is not None and job.ends_at - now <= notice_s
        return "time-limit" if near else "unknown"
    if job.state == "COMPLETING":
        return _why_completing(job)
    return OUTCOMES.get(job.state, "unknown")


def _why_completing(job: SlurmJob) -> Cause:
    """Slurm does not show the final state of a COMPLETING job. A failed job has a reason; a
    cancelled job has none and ends before its time limit."""
    for reason, found in BROKE.items():
        if job.reason.startswith(reason):
            return found
    if job.limit_at is not None and job.ends_at is not None and job.ends_at >= job.limit_at - 1:
        return "time-limit"
    return "cancelled" if not job.reason else "unknown"


def can_be_queued_again(job: SlurmJob, restarts: int) -> bool:
    """Whether to requeue a job whose run is ending. Slurm accepts a requeue for any job, but a
    cancelled job must not come back."""
    return cause(job, restarts, 0.0, 0.0) in ("failed", "time-limit", "requeued")


def ending_words(job: SlurmJob) -> str:
    """The end of a failed run as text, for example `JobLaunchFailure, the batch script was ended by
    signal 9 (SIGKILL)`."""
    return ", ".join(filter(None, (job.reason or job.state, _exit_words(job.exit_code))))


def _exit_words(exit_code: str) -> str:
    """Slurm's `CODE:SIGNAL` of the batch script as text."""
    code, _, number = exit_code.partition(":")
    if number.isdigit() and int(number):
        return f"the batch script was ended by signal {number}{_name(int(number))}"
    return f"the batch script ended with code {code}" if code not in ("", "0") else ""


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f" ({signal.Signals(number).name})"
    return ""
