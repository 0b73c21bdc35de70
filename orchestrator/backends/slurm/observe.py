"""What Slurm's commands print, as values: 22.05 and newer. Pure.

`scontrol show job -o` is asked first: it knows a job from the queue until MinJobAge after its end.
After that only `sacct` may, where there is accounting.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Literal

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
    name: str = ""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    requeues: bool = False
    """It may be queued again (`--requeue`)."""
    excluded: tuple[str, ...] = ()
    exit_code: str = ""
    """CODE:SIGNAL."""
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
        held = self.reason in HOLDS or self.reason.endswith("held")
        if self.state == "PENDING" and held:
            return "held"
        return STATES.get(self.state, "running")

    @property
    def is_over(self) -> bool:
        return self.meaning == "ended"


HOLDS = frozenset(
    {
        "JobHeldUser",
        "JobHeldAdmin",
        "JobHoldMaxRequeue",
    }
)


def parse_jobs(text: str, zone: tzinfo | None = None) -> tuple[SlurmJob, ...]:
    """Of `scontrol show job -o`: one line a job; times are in the machine's zone unless told."""
    return tuple(
        _scontrol_job(line, zone) for line in text.splitlines() if line.startswith("JobId=")
    )


def _scontrol_job(line: str, zone: tzinfo | None) -> SlurmJob:
    said = fields(line)
    return SlurmJob(
        id=said["JobId"],
        name=said.get("JobName", ""),
        state=_state(said.get("JobState", "")),
        reason=_value(said, "Reason"),
        nodes=expand(_value(said, "NodeList")),
        restarts=int(said.get("Restarts", "0")),
        requeues=said.get("Requeue") == "1",
        excluded=expand(_value(said, "ExcNodeList")),
        exit_code=said.get("ExitCode", ""),
        ends_at=_time(said.get("EndTime", ""), zone),
        limit_at=_limit_at(said, zone),
        preempted=_time(said.get("PreemptTime", ""), zone) is not None,
        comment=_value(said, "Comment"),
        command=_value(said, "Command"),
    )


def fields(line: str) -> dict[str, str]:
    """KEY=VALUE pairs of one line of `scontrol -o`; a value goes on until the next key.

    A comment may hold what looks like a key: of one key, the first value counts.
    """
    found: dict[str, str] = {}
    keys = list(re.finditer(r"(?:^|(?<=\s))([A-Z][A-Za-z:/_]*)=", line))
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        end = following.start() if following else len(line)
        found.setdefault(key[1], line[key.end() : end].strip())
    return found


def _value(said: Mapping[str, str], key: str) -> str:
    value = said.get(key, "")
    return "" if value in ("(null)", "None", "N/A") else value


def _state(text: str) -> str:
    """`CANCELLED by 0` and `RUNNING+COMPLETING` begin with what counts."""
    return re.split(r"[ +]", text, maxsplit=1)[0]


def _time(text: str, zone: tzinfo | None) -> float | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()
    except ValueError:  # Unknown, N/A, None
        return None


def _limit_at(said: Mapping[str, str], zone: tzinfo | None) -> float | None:
    begun, limit = _time(said.get("StartTime", ""), zone), minutes(said.get("TimeLimit", ""))
    return None if begun is None or limit is None else begun + 60 * limit


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


SACCT_FORMAT = "JobIDRaw,State,ExitCode,End,NodeList"
"""For `sacct -X -P -n -D -o`; how often a job was queued again only newer ones can say."""


def parse_accounting(text: str, zone: tzinfo | None = None) -> tuple[SlurmJob, ...]:
    """Of sacct with SACCT_FORMAT; with -D each run of a job that was queued again is a line."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(
        SlurmJob(
            id=row[0],
            state=_state(row[1]),
            exit_code=row[2],
            ends_at=_time(row[3], zone),
            nodes=() if row[4] == "None assigned" else expand(row[4]),
        )
        for row in rows
        if len(row) >= 5 and row[0].isdigit()
    )


def expand(names: str) -> tuple[str, ...]:
    """`a[1-2,07]-ib,b` as a1-ib a2-ib a07-ib b."""
    return tuple(name for part in _split(names) for name in _expand_one(part))


def _split(names: str) -> Iterator[str]:
    """At the commas outside of brackets."""
    return (part for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names) if part)


def _expand_one(name: str) -> Iterator[str]:
    found = re.search(r"\[([^\]]*)\]", name)
    if found is None:
        yield name
        return
    head, tail = name[: found.start()], name[found.end() :]
    for piece in found[1].split(","):
        first, _, last = piece.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        for number in numbers:
            for rest in _expand_one(tail):
                yield f"{head}{number:0{len(first)}d}{rest}"


def parse_switches(text: str, hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Host -> its switches, outermost first, of `scontrol show topology`; or its block."""
    level: dict[str, int] = {}
    above: dict[str, list[str]] = {host: [] for host in hosts}
    for line in text.splitlines():
        said = fields(line)
        name = said.get("SwitchName") or said.get("BlockName")
        if name is None:
            continue
        level[name] = int(said.get("Level", "0"))
        for host in expand(_value(said, "Nodes")):
            if host in above:
                above[host].append(name)
    return {
        host: tuple(sorted(names, key=lambda name: -level[name]))
        for host, names in above.items()
        if names
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    name: str
    states: tuple[str, ...]
    """Base state and flags, as DOWN, DRAIN, NOT_RESPONDING."""
    reason: str
    address: str
    gpus: int
    partitions: tuple[str, ...]


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Of `scontrol show node -o`."""
    return tuple(_node(fields(line)) for line in text.splitlines() if line.startswith("NodeName="))


def _node(said: Mapping[str, str]) -> SlurmNode:
    state = said.get("State", "")
    states = [re.sub(r"[^A-Z_]", "", part) for part in state.split("+")]
    if "*" in state:  # the short form of the flag
        states.append("NOT_RESPONDING")
    reason = re.sub(r" \[[^\]]*@[^\]]*\]$", "", _value(said, "Reason"))
    return SlurmNode(
        name=said["NodeName"],
        states=tuple(dict.fromkeys(states)),
        reason=reason,
        address=said.get("NodeAddr", ""),
        gpus=gpus_in(_value(said, "Gres")),
        partitions=tuple(_value(said, "Partitions").split(",")),
    )


def gpus_in(gres: str) -> int:
    """Of `gpu:a100:4(S:0-1),nvme:2`: 4."""
    bare = re.sub(r"\([^)]*\)", "", gres)
    counts = (re.fullmatch(r"gpu(?::[^:]+)?:(\d+)", part) for part in bare.split(","))
    return sum(int(count[1]) for count in counts if count)


UNFIT = frozenset(
    {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "NOT_RESPONDING", "MAINT",
     "POWERING_DOWN", "POWERED_DOWN", "REBOOT_REQUESTED", "REBOOT_ISSUED", "INVALID_REG"}
)  # fmt: skip
"""States and flags of a node that the scheduler wants back, or has given up."""
DEAD = frozenset({"DOWN", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN"})
"""Nothing can be started there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPartition:
    name: str
    is_default: bool
    state: str
    max_time_min: float | None
    """None: unlimited."""
    max_nodes: int | None
    nodes: int


def parse_partitions(text: str) -> tuple[SlurmPartition, ...]:
    """Of `scontrol show partition -o`."""
    return tuple(
        _partition(fields(line)) for line in text.splitlines() if line.startswith("PartitionName=")
    )


def _partition(said: Mapping[str, str]) -> SlurmPartition:
    most = said.get("MaxNodes", "")
    return SlurmPartition(
        name=said["PartitionName"],
        is_default=said.get("Default") == "YES",
        state=said.get("State", ""),
        max_time_min=minutes(said.get("MaxTime", "")),
        max_nodes=int(most) if most.isdigit() else None,
        nodes=int(said.get("TotalNodes", "0")),
    )


def minutes(time: str) -> float | None:
    """Of a time as sbatch takes it; None when there is no limit."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")):
        return None  # UNLIMITED, INFINITE
    numbers = [int(part) for part in parts] + [0, 0]
    if dash or len(parts) == 3:
        hours, mins, secs = numbers[:3]
    else:
        hours, mins, secs = 0, numbers[0], numbers[1]
    return int(days or 0) * 1440 + hours * 60 + mins + secs / 60


ADVICE: Mapping[str, str] = {
    "JobHeldUser": "it is held: `scontrol release {id}` lets it go",
    "JobHeldAdmin": "an administrator holds it: ask them to `scontrol release {id}`",
    "JobHoldMaxRequeue": "it was requeued too often and is held: `scontrol release {id}`, after a"
    " look at why in the agents' logs",
    "launch failed requeued held": "Slurm could not start it and holds it: `scontrol release {id}`;"
    " tell the administrators, for a node may be broken",
    "BadConstraints": "no node fits the request any more: `ndctl cancel` it, then submit it with"
    " another constraint, exclude list or number of hosts",
    "InvalidAccount": "the account is not valid: set cluster.slurm.account (`sacctmgr show assoc"
    " user=$USER` lists yours), or `scontrol update JobId={id} Account=...`",
    "InvalidQOS": "the qos is not valid: set cluster.slurm.qos, or"
    " `scontrol update JobId={id} QOS=...`",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved: wait, or look with"
    " `sinfo -R`; a maintenance reservation shows in `scontrol show reservation`",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions":
    "nodes that it needs are down or drained: `sinfo -R` says why",
    "PartitionDown": "the partition is down: wait, or ask the administrators",
    "PartitionInactive": "the partition is inactive: wait, or ask the administrators",
    "PartitionNodeLimit": "more nodes than the partition gives to one job: submit it with fewer"
    " cluster.hosts and spare_hosts",
    "PartitionTimeLimit": "longer than the partition allows: submit it with a shorter"
    " cluster.slurm.time; the job goes on in further allocations by itself",
    "PartitionConfig": "the partition does not allow the request: `scontrol show partition` shows"
    " what it does allow",
    "Licenses": "it waits for licences",
    "Reservation": "it waits for its reservation to begin",
    "ReservationDeleted": "its reservation is gone: `scontrol update JobId={id}"
    " ReservationName=` and `scontrol release {id}`",
    "DependencyNeverSatisfied": "its dependency can never be met: `ndctl cancel` it",
    "Dependency": "it waits for another job",
    "BeginTime": "it starts again in a moment: Slurm waits after a requeue",
    "Resources": "nothing: it is next, once nodes are free",
    "Priority": "nothing: other jobs are before it; `squeue --start -j {id}` may say until when",
    "QOSMaxJobsPerUserLimit": "nothing: it starts when another job of yours ends",
    "AssociationJobLimit": "nothing: it starts when another job of the account ends",
    "AssocGrpGRES": "the account's GPUs are all in use: it starts when some are free",
    "QOSGrpGRES": "the qos's GPUs are all in use: it starts when some are free",
    "QOSMaxGRESPerUser": "more GPUs than the qos gives to one user",
    "JobLaunchFailure": "Slurm could not start it: see `scontrol show job {id}`, and tell the"
    " administrators",
    "NodeDown": "a node of it is down",
    "MaxSubmitJobLimit": "too many jobs of yours are in the queue",
}  # fmt: skip
"""Slurm's reason for what a job waits for -> what there is to do about it."""


def advice(job: SlurmJob) -> str:
    """What to do about a job that does not run, in one line; empty when nothing is known."""
    reason = job.reason
    for form in (reason, reason.split(",")[0], reason.replace("_", " ")):
        if form in ADVICE:
            return ADVICE[form].format(id=job.id)
    begins = (text for known, text in ADVICE.items() if reason.startswith(known))
    held = ADVICE["JobHeldUser"] if job.meaning == "held" else ""
    return next(begins, held).format(id=job.id)


def words(job: SlurmJob) -> str:
    """As in `Slurm job 12 is PENDING (Resources)`."""
    why = f" ({job.reason.replace('_', ' ')})" if job.reason else ""
    return f"Slurm job {job.id} is {job.state}{why}"


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
