"""What Slurm's commands print of jobs, as values: 22.05 and newer. Pure.

`scontrol show job -o` and `squeue` know a job from the queue until MinJobAge after its end. sacct,
which knows it longer, is not asked: it lags behind, and few clusters say there whose job it was.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Literal

from orchestrator.cluster.slurm.hostlist import expand
from orchestrator.cluster.slurm.partitions import seconds
from orchestrator.cluster.slurm.records import fields, records
from orchestrator.contract.launch import Cause

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
    preempted: bool = False
    """It has been told to make room for another."""
    comment: str = ""
    command: str = ""

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
        id=said["JobId"],
        state=_state(said.get("JobState", "")),
        reason=said.get("Reason", ""),
        nodes=expand(said.get("NodeList", "")),
        restarts=int(said.get("Restarts", "0")),
        excluded=expand(said.get("ExcNodeList", "")),
        ends_at=_time(said.get("EndTime", ""), zone),
        limit_at=_limit_at(said, zone),
        preempted=_time(said.get("PreemptTime", ""), zone) is not None,
        comment=said.get("Comment", ""),
        command=said.get("Command", ""),
    )


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


SQUEUE_FORMAT = "%A|%T|%r|%o|%k"
"""For `squeue -h -o`: the comment last, for it may hold anything."""


def parse_queue(text: str) -> tuple[SlurmJob, ...]:
    """Of squeue with SQUEUE_FORMAT."""
    rows = (line.split("|", 4) for line in text.splitlines())
    return tuple(
        SlurmJob(
            id=row[0],
            state=_state(row[1]),
            reason=row[2].strip("()") if row[2] != "None" else "",
            command=row[3],
            comment="" if row[4] == "(null)" else row[4],
        )
        for row in rows
        if len(row) == 5
    )


def cause(job: SlurmJob, restarts: int, now: float, notice_s: float) -> Cause:
    """Why the run of `job` that began after `restarts` requeues is being ended.

    A COMPLETING job does not say of what: one that is queued again has counted that already, and
    one that was cancelled ends before its time limit.
    """
    if job.preempted or job.state == "PREEMPTED":
        return "preempted"
    if job.restarts > restarts or job.meaning in ("queued", "held"):
        return "requeued"
    if job.state in ("TIMEOUT", "DEADLINE"):
        return "time-limit"
    if job.meaning == "running":
        near = job.ends_at is not None and job.ends_at - now <= notice_s
        return "time-limit" if near else "unknown"
    if job.state == "CANCELLED":
        return "cancelled"
    if job.state == "COMPLETING" and job.limit_at is not None and job.ends_at is not None:
        return "time-limit" if job.ends_at >= job.limit_at - 1 else "cancelled"
    return "cancelled" if job.state == "COMPLETING" else "unknown"
