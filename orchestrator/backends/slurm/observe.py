"""What Slurm's commands print of jobs, as values: 22.05 and newer. Pure.

`scontrol show job -o` and `squeue` know a job from the queue until MinJobAge after its end. sacct,
which knows it longer, is not asked: it lags behind, and few clusters say there whose job it was.
"""

import contextlib
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Literal

from orchestrator.contract.launch import Cause
from orchestrator.contract.spec.slurm_spec import seconds
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.slurm.records import fields, records
from orchestrator.seams import RunPhase

Meaning = Literal["queued", "running", "leaving", "held", "ended"]
"""`leaving`: its processes are being ended, and it may be queued again; `held`: in the queue until
a person lets it go."""

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
"""Every state of squeue's and sacct's manuals. PREEMPTED and NODE_FAIL end one run of a job that
is queued again under the same id, which then reads PENDING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    id: str
    state: str
    """In Slurm's word, without flags and `by 0`."""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    excluded: tuple[str, ...] = ()
    ends_at: float | None = None
    """Unix seconds: of the time limit, or when it ended."""
    limit_at: float | None = None
    """When its time limit is, whether or not it ended before; None without one."""
    exit_code: str = ""
    """Of the batch script, as `CODE:SIGNAL`."""
    preempted: bool = False
    """It has been told to make room for another."""
    comment: str = ""
    command: str = ""
    is_batch: bool = True
    """It runs a script; an allocation of salloc does not."""
    may_requeue: bool = True

    @property
    def meaning(self) -> Meaning:
        """A state that is not known counts as running: whoever asks is to wait and see."""
        if self.state == "PENDING" and HELD.search(self.reason):
            return "held"
        return STATES.get(self.state, "running")

    @property
    def is_over(self) -> bool:
        return self.meaning == "ended"


HELD = re.compile(r"^JobHeld(User|Admin)$|^JobHoldMaxRequeue$|[ _]held([ _]|$)")
"""Of a job's reason: `launch failed requeued held`, `job_requeued_in_held_state`."""


def parse_jobs(text: str, zone: tzinfo | None = None) -> tuple[SlurmJob, ...]:
    """Of `scontrol show job -o`: one line a job; times are in the machine's zone unless told."""
    return tuple(_scontrol_job(fields(record), zone) for record in records(text, "JobId"))


def _scontrol_job(said: Mapping[str, str], zone: tzinfo | None) -> SlurmJob:
    return SlurmJob(
        id=_id(said),
        state=_state(said.get("JobState", "")),
        reason="" if said.get("Reason") == "None" else said.get("Reason", ""),
        exit_code=said.get("ExitCode", ""),
        nodes=expand(said.get("NodeList", "")),
        restarts=int(said.get("Restarts", "0")),
        excluded=expand(said.get("ExcNodeList", "")),
        ends_at=_time(said.get("EndTime", ""), zone),
        limit_at=_limit_at(said, zone),
        preempted=_time(said.get("PreemptTime", ""), zone) is not None,
        comment=said.get("Comment", ""),
        command=said.get("Command", ""),
        is_batch=said.get("BatchFlag") != "0",
        may_requeue=said.get("Requeue") != "0",
    )


def _id(said: Mapping[str, str]) -> str:
    """Of an element of an array that has a number of its own, as `12_3`."""
    array, task = said.get("ArrayJobId"), said.get("ArrayTaskId", "")
    return f"{array}_{task}" if array and task.isdigit() else said["JobId"]


def _state(text: str) -> str:
    """`CANCELLED by 0` and `RUNNING+COMPLETING` begin with what counts."""
    return re.split(r"[ +]", text, maxsplit=1)[0]


def _time(text: str, zone: tzinfo | None) -> float | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()
    except ValueError:  # Unknown, N/A, None
        return None


def _limit_at(said: Mapping[str, str], zone: tzinfo | None) -> float | None:
    begun, limit_s = _time(said.get("StartTime", ""), zone), seconds(said.get("TimeLimit", ""))
    return None if begun is None or limit_s is None else begun + limit_s


SQUEUE_FORMAT = "%i|%T|%r|%x|%o|%k"
"""For `squeue -h -o`: the comment last, for it may hold anything."""


def parse_queue(text: str) -> tuple[SlurmJob, ...]:
    """Of squeue with SQUEUE_FORMAT."""
    rows = (line.split("|", 5) for line in text.splitlines())
    return tuple(
        SlurmJob(
            id=row[0],
            state=_state(row[1]),
            reason=row[2].strip("()") if row[2] != "None" else "",
            excluded=expand("" if row[3] in ("(null)", "N/A") else row[3]),
            command=row[4],
            comment="" if row[5] == "(null)" else row[5],
        )
        for row in rows
        if len(row) == 6
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
"""How Slurm's reason begins for a run that is being ended, and that was not cancelled. Of a batch
script that a signal ended it is JobLaunchFailure, or in newer versions `RaisedSignal:9(Killed)`."""
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
    """How the run of `job` stands that began after `restarts` requeues."""
    if job.is_over:
        return "over"
    if job.restarts > restarts or job.meaning in ("queued", "held"):
        return "queued again"
    if job.meaning != "leaving":
        return "running"
    return "broken" if can_be_queued_again(job, restarts) else "ending"


def cause(job: SlurmJob, restarts: int, now: float, notice_s: float) -> Cause:
    """Why the run of `job` that began after `restarts` requeues is being ended."""
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
    """Slurm does not show the state that a COMPLETING job is about to have. One that broke has a
    reason; one that was cancelled has none, and ends before its time limit."""
    for reason, found in BROKE.items():
        if job.reason.startswith(reason):
            return found
    if job.limit_at is not None and job.ends_at is not None and job.ends_at >= job.limit_at - 1:
        return "time-limit"
    return "cancelled" if not job.reason else "unknown"


def can_be_queued_again(job: SlurmJob, restarts: int) -> bool:
    """Whether Slurm takes back a job whose run it is ending, before the last process has gone. It
    does so of any job; one that was cancelled is not to come back."""
    return cause(job, restarts, 0.0, 0.0) in ("failed", "time-limit", "requeued")


def ending_words(job: SlurmJob) -> str:
    """How Slurm puts the end of a run that failed, as `JobLaunchFailure, the batch script was ended
    by signal 9 (SIGKILL)`."""
    return ", ".join(filter(None, (job.reason or job.state, _exit_words(job.exit_code))))


def _exit_words(exit_code: str) -> str:
    """Of Slurm's `CODE:SIGNAL` for the batch script."""
    code, _, number = exit_code.partition(":")
    if number.isdigit() and int(number):
        return f"the batch script was ended by signal {number}{_name(int(number))}"
    return f"the batch script ended with code {code}" if code not in ("", "0") else ""


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f" ({signal.Signals(number).name})"
    return ""
