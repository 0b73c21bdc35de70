"""The state of a Slurm job as text, with a hint for a job that waits."""

from collections.abc import Mapping

from orchestrator.backends.slurm.observe import SlurmJob, ending_words
from orchestrator.contract.times import date_time
from orchestrator.inventory.slurm.hostlist import fold

NONE_EXCLUDED = "BadConstraints, none excluded"
ADVICE: Mapping[str, str] = {
    "JobHeldUser": "the job is held; release it with `scontrol release {id}`",
    "JobHeldAdmin": "an administrator holds it; ask them to run `scontrol release {id}`",
    "JobHoldMaxRequeue": "requeued too often, now held; find the reason in the logs of the agents,"
    " then run `scontrol release {id}`",
    "launch failed requeued held": "Slurm could not start the job and holds it; tell the"
    " administrators, because a node may be broken, and run `scontrol release {id}`",
    "job requeued in held state": "the job was requeued by hand and is held; release it with"
    " `scontrol release {id}`",
    "BadConstraints": "without the excluded nodes ({excluded}) too few nodes match the request, and"
    " Slurm does not retry; `ndctl status` shows why each node is excluded and the command to use"
    " it; or cancel the job with `ndctl cancel` and submit it with another constraint",
    NONE_EXCLUDED: "too few nodes match the request, and Slurm does not retry; cancel the job with"
    " `ndctl cancel` and submit it with another constraint",
    "InvalidAccount": "the account is not valid; set cluster.slurm.account (`sacctmgr show assoc"
    " user=$USER` lists yours), or run `scontrol update JobId={id} Account=...`",
    "InvalidQOS": "the qos is not valid; set cluster.slurm.qos, or run"
    " `scontrol update JobId={id} QOS=...`",
    "ReqNodeNotAvail": "needed nodes are down, drained or reserved; wait, or see `sinfo -R` for the"
    " reasons and `scontrol show reservation` for maintenance",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions":
    "needed nodes are down or drained; see `sinfo -R` for the reasons",
    "PartitionDown": "the partition is down; wait, or ask the administrators",
    "PartitionInactive": "the partition is inactive; wait, or ask the administrators",
    "PartitionNodeLimit": "the job requests more nodes than the partition allows; submit it with"
    " fewer cluster.hosts and spare_hosts",
    "PartitionTimeLimit": "the time limit is longer than the partition allows; submit the job with"
    " a shorter cluster.slurm.time; it continues in further allocations",
    "PartitionConfig": "the partition does not allow the request; see `scontrol show partition`",
    "Licenses": "the job waits for licenses",
    "Reservation": "the job waits for the start of its reservation",
    "ReservationDeleted": "the reservation was deleted; run `scontrol update JobId={id}"
    " ReservationName=` and `scontrol release {id}`",
    "DependencyNeverSatisfied": "it can never be satisfied; cancel the job with `ndctl cancel`",
    "Dependency": "the job waits for another job",
    "BeginTime": "the job starts not before {starts}",
    "Resources": "the job is next when nodes are free",
    "Priority": "other jobs have a higher priority; `squeue --start -j {id}` may show a start time",
    "QOSMaxJobsPerUserLimit": "the job starts when another job of yours ends",
    "AssociationJobLimit": "the job starts when another job of the account ends",
    "AssocGrpGRES": "all GPUs of the account are in use; the job starts when some are free",
    "QOSGrpGRES": "all GPUs of the qos are in use; the job starts when some are free",
    "QOSMaxGRESPerUser": "the job requests more GPUs than the qos allows one user",
    "JobLaunchFailure": "Slurm could not start the job; see `scontrol show job {id}`, and tell the"
    " administrators",
    "NodeDown": "a node of the job is down",
    "MaxSubmitJobLimit": "you have too many jobs in the queue",
}  # fmt: skip
"""Slurm's pending reason -> explanation and what to do."""


RELEASE: Mapping[str, str] = {
    "JobHeldAdmin": "ask an administrator to run `scontrol release {id}`",
    "ReservationDeleted": "to release it: scontrol update JobId={id} ReservationName= && scontrol"
    " release {id}",
}
"""Reason of a held job -> what to do, if a release by its user is not enough."""
NEVER = frozenset(
    {
        *("BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS"),
        *("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "QOSMaxGRESPerUser"),
    }
)
"""Reasons that stay until a person changes the job or the site."""


def needed(job: SlurmJob) -> str:
    """What a person must do before the job can start; empty if it only waits."""
    if job.meaning not in ("queued", "held"):
        return ""
    if job.meaning == "held" or job.reason in RELEASE:
        return _filled(RELEASE.get(job.reason, "to release it: scontrol release {id}"), job)
    never = job.reason in NEVER
    return "waiting does not help, so do what the first line says" if never else ""


def advice(job: SlurmJob) -> str:
    """A hint for a job that does not run, in one line; empty for an unknown reason."""
    reason = job.reason
    if reason == "BadConstraints" and not job.excluded:
        reason = NONE_EXCLUDED
    # Versions differ: `ReqNodeNotAvail, UnavailableNodes:n1`, `job_requeued_in_held_state`.
    for form in (reason, reason.split(",")[0], reason.replace("_", " ")):
        if form in ADVICE:
            return _filled(ADVICE[form], job)
    begins = (text for known, text in ADVICE.items() if reason.startswith(known))
    held = ADVICE["JobHeldUser"] if job.meaning == "held" else ""
    return _filled(next(begins, held), job)


def _filled(text: str, job: SlurmJob) -> str:
    starts = "a time that Slurm does not say"
    if job.starts_at is not None:
        starts = date_time(job.starts_at, None)  # a person reads it beside other local times
    return text.format(id=job.id, excluded=fold(job.excluded) or "none", starts=starts)


def standing_words(job: SlurmJob) -> str:
    """The state of a job, with a hint if it waits."""
    told = advice(job) if job.meaning in ("queued", "held") else ""
    return words(job) + (f": {told}" if told else "")


def words(job: SlurmJob) -> str:
    """For example `Slurm job 12 is PENDING (Resources)`."""
    if job.meaning == "leaving" and job.reason:
        return f"Slurm job {job.id} is {job.state} ({ending_words(job)})"
    why = f" ({job.reason.replace('_', ' ')})" if job.reason else ""
    return f"Slurm job {job.id} is {job.state}{why}"
