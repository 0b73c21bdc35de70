"""What a person is told of a Slurm job: how it stands, and what there is to do about it."""

from collections.abc import Mapping

from orchestrator.backends.slurm.observe import SlurmJob, ending_words
from orchestrator.inventory.slurm.hostlist import fold

ADVICE: Mapping[str, str] = {
    "JobHeldUser": "it is held: `scontrol release {id}` lets it go",
    "JobHeldAdmin": "an administrator holds it: ask them to `scontrol release {id}`",
    "JobHoldMaxRequeue": "it was requeued too often and is held: `scontrol release {id}`, after a"
    " look at why in the agents' logs",
    "launch failed requeued held": "Slurm could not start it and holds it: `scontrol release {id}`;"
    " tell the administrators, for a node may be broken",
    "job requeued in held state": "it was queued again by hand, and is held:"
    " `scontrol release {id}` lets it go",
    "BadConstraints": "too few nodes fit the request without those that it excludes ({excluded}),"
    " and Slurm does not try again by itself: `ndctl status` says why each is excluded and what to"
    " type to use it; or `ndctl cancel` the job and submit it with another constraint",
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
            return _filled(ADVICE[form], job)
    begins = (text for known, text in ADVICE.items() if reason.startswith(known))
    held = ADVICE["JobHeldUser"] if job.meaning == "held" else ""
    return _filled(next(begins, held), job)


def _filled(text: str, job: SlurmJob) -> str:
    return text.format(id=job.id, excluded=fold(job.excluded) or "none")


def standing_words(job: SlurmJob) -> str:
    """How a job that is not over stands, and what to do about one that waits."""
    told = advice(job) if job.meaning in ("queued", "held") else ""
    return words(job) + (f": {told}" if told else "")


def words(job: SlurmJob) -> str:
    """As in `Slurm job 12 is PENDING (Resources)`."""
    if job.meaning == "leaving" and job.reason:
        return f"Slurm job {job.id} is {job.state} ({ending_words(job)})"
    why = f" ({job.reason.replace('_', ' ')})" if job.reason else ""
    return f"Slurm job {job.id} is {job.state}{why}"
