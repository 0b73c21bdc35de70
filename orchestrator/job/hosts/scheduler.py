"""What the scheduler and the planner tell a job: to leave, to exclude a host, to use another plan.

None of this has a culprit.
"""

from msgspec.structs import replace

from orchestrator.contract.launch import Breakdown, Cause
from orchestrator.contract.messages.events import (
    HostFlagged,
    HostLeaving,
    HostOpened,
    HostsChecked,
    LeaveAsked,
    Replanned,
    ReplanRefused,
    RequeueRefused,
)
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.job.attempt_end import all_done, conclude, recover, stop
from orchestrator.job.failures.cancellation import cancel
from orchestrator.job.failures.oom_replan import with_ways_out
from orchestrator.job.hosts.preemption import grace_to_leave_s
from orchestrator.job.hosts.scale_up import shrunk
from orchestrator.job.interruption import Leaving
from orchestrator.job.leave import Result, end, requeue
from orchestrator.job.plans import JobPlan
from orchestrator.job.stage import IDLE, LIVE, Waiting
from orchestrator.job.start import checked, start_if_ready
from orchestrator.job.state import (
    Run,
    has_successors,
    switches_of,
    usable,
    with_deadline,
    with_findings,
    with_host,
    with_leaving,
)
from orchestrator.plan.placement.place import room_for

WORDS: dict[Cause | None, str] = {
    None: "the scheduler asks the job to leave",
    "preempted": "preempted by another job",
    "time-limit": "the time limit of the allocation is near",
    "requeued": "requeued by an administrator or the scheduler",
    "drained": "the scheduler wants a host back",
    "unknown": "the scheduler asks the job to leave, and does not say why",
    "cancelled": "cancelled in the scheduler",
    "failed": "the scheduler ends this run of the job because its processes failed",
}


def leave_asked(run: Run, event: LeaveAsked) -> Result:
    """Save a checkpoint and go back to the queue; or end, if the scheduler cancelled the job."""
    if run.interruption.cancelled_by is not None:
        return run, ()
    if event.cause == "cancelled":
        by = f"somebody, in the scheduler ({event.words})"
        return cancel(with_leaving(run, None), event.at, by)
    if _leaves_for_a_known_cause(run, event):
        return run, ()
    words = f"{WORDS[event.cause]} ({event.words})"
    run = with_leaving(run, Leaving(cause=event.cause, words=words))
    if event.cause == "failed" and not _batch_host_is_lost(run):
        return _allocation_broke(run, event, words)
    if isinstance(run.stage, IDLE):
        if event.cause is None:
            return run, ()  # the scheduler is being asked why, and a cancelled job must not requeue
        return requeue(run, event.at, words, whole=not has_successors(run))
    if isinstance(run.stage, LIVE):
        return stop(run, event.at, words, grace_to_leave_s(run, event.at))
    return conclude(run, event.at) if all_done(run) else (run, ())


def _leaves_for_a_known_cause(run: Run, event: LeaveAsked) -> bool:
    """Whether the job is leaving already, and `event` does not tell more about the cause."""
    leaving = run.interruption.leaving
    if leaving is None or leaving.cause is None or not leaving.requeue:
        return False
    # Slurm sends SIGTERM before it shows that it requeues the job, and once more afterwards.
    return leaving.cause != "unknown" or event.cause in (None, "unknown")


def _batch_host_is_lost(run: Run) -> bool:
    """Whether the first host of the allocation, which has the batch script, is known to be lost.
    Slurm ends the run of the job with it. That is a part of the incident that there is already."""
    if run.scheduler.allocation is None:
        return False
    host = run.scheduler.allocation.hosts[0]
    known = run.hosts.by_name.get(host)
    if known is not None and known.alive:
        return False
    return any(
        one.culprit.host == host
        and one.kind in ("host-lost", "leader-lost")
        # Ranks have run since without that host: another fault broke the allocation.
        and one.resumed_after_s is None
        for one in run.history.incidents
    )


def _allocation_broke(run: Run, event: LeaveAsked, words: str) -> Result:
    """Processes of the allocation failed, so this is an incident, and the allocation ends."""
    found = run.interruption.findings or Findings(opened_at=event.at)
    broke = found.broke or Breakdown(what=words, at=event.at)
    found = replace(found, broke=broke, noticed_at=event.at)
    run = with_findings(run, found)
    if isinstance(run.stage, IDLE):
        return recover(run, replace(found, idle=True), event.at)
    if isinstance(run.stage, LIVE):
        return stop(run, event.at, words, grace_to_leave_s(run, event.at))
    return conclude(run, event.at) if all_done(run) else (run, ())


def requeue_refused(run: Run, event: RequeueRefused) -> Result:
    """End the job: its hosts would stay idle, and only a person can help."""
    if event.cancelled:
        by = f"somebody, in the scheduler ({event.why})"
        return end(
            replace(run, interruption=replace(run.interruption, cancelled_by=by)),
            event.at,
            "CANCELLED",
            f"cancelled by {by}",
        )
    words = f"{run.stage.reason}; it could not be queued again: {event.why}"
    return end(run, event.at, "FAILED", f"{words}; resume with `ndctl submit SPEC --resume`")


def host_flagged(run: Run, event: HostFlagged) -> Result:
    """The scheduler drained a host, or it is down: save a checkpoint and continue without it."""
    if event.host in run.hosts.exclude and event.host not in run.hosts.shut:
        return run, ()  # excluded for another reason
    patience = _on_drain(run, event.host) if event.lets_finish else "checkpoint_and_requeue"
    words = f"{event.host} is {event.state}" + (f": {event.reason}" if event.reason else "")
    if patience == "finish" and _is_needed(run, event.host):
        return replace(
            run, hosts=replace(run.hosts, draining={**run.hosts.draining, event.host: words})
        ), ()
    run = _not_draining(run, event.host)
    if event.host not in run.hosts.exclude:
        shut = (*run.hosts.shut, event.host)
        run = replace(
            run,
            hosts=replace(run.hosts, exclude={**run.hosts.exclude, event.host: words}, shut=shut),
        )
    if isinstance(run.stage, Waiting):
        return start_if_ready(run, event.at)
    if patience == "at_next_checkpoint":
        return run, ()
    return _leave_host(run, event.at, event.host, words, down=event.down)


def leave_drained(run: Run, at: float) -> Result:
    """A checkpoint is complete: leave a drained host that was kept until then."""
    if not run.hosts.shut:  # as nearly always: do not look at thousands of hosts
        return run, ()
    host = next((name for name in run.attempt.placement if name in run.hosts.shut), None)
    if host is None:
        return run, ()
    return _leave_host(run, at, host, run.hosts.exclude.get(host, host))


def _leave_host(run: Run, at: float, host: str, words: str, *, down: bool = False) -> Result:
    """Stop the attempt if it has ranks on the excluded host."""
    job = run.job
    assert job is not None
    if (
        not isinstance(run.stage, LIVE)
        or host not in run.attempt.placement
        or run.interruption.leaving is not None
    ):
        return run, ()
    enough = len(usable(run)) >= len(run.plan.hosts) or has_successors(run)
    stays = host != run.scheduler.leader and (enough or job.shrink)
    leaving = Leaving(
        cause="drained",
        words=words,
        requeue=not stays,
        by_drain=True,
        down=host if down else "",
    )
    return stop(with_leaving(run, leaving), at, words, grace_to_leave_s(run, at))


def _on_drain(run: Run, host: str) -> str:
    slurm = run.job.launch.slurm if run.job else None
    if slurm is None:
        return "checkpoint_and_requeue"
    if slurm.on_drain != "auto":
        return slurm.on_drain
    # The leader does not move, so leaving its host would end the allocation.
    leads = host == run.scheduler.leader
    return "finish" if leads or not _is_replaceable(run, host) else "checkpoint_and_requeue"


def _is_needed(run: Run, host: str) -> bool:
    """Ranks run on the host, or the next attempt needs it. A spare is not needed."""
    if not isinstance(run.stage, IDLE):
        return host in run.attempt.placement
    return not _is_replaceable(run, host)


def _is_replaceable(run: Run, host: str) -> bool:
    return len([name for name in usable(run) if name != host]) >= len(run.plan.hosts)


def host_opened(run: Run, event: HostOpened) -> Result:
    """The scheduler opened the host again. It was excluded for nothing else, so it can be used."""
    run = _not_draining(run, event.host)
    if event.host not in run.hosts.shut:
        return run, ()
    exclude = {host: why for host, why in run.hosts.exclude.items() if host != event.host}
    shut = tuple(host for host in run.hosts.shut if host != event.host)
    run = replace(run, hosts=replace(run.hosts, exclude=exclude, shut=shut))
    return start_if_ready(run, event.at) if isinstance(run.stage, Waiting) else (run, ())


def _not_draining(run: Run, host: str) -> Run:
    if host not in run.hosts.draining:
        return run
    return replace(
        run,
        hosts=replace(
            run.hosts,
            draining={name: why for name, why in run.hosts.draining.items() if name != host},
        ),
    )


def host_leaving(run: Run, event: HostLeaving) -> Result:
    """Save a checkpoint while its ranks still run, and continue with the host that replaces it."""
    job, known = run.job, run.hosts.by_name.get(event.host)
    assert job is not None
    if known is None or not known.alive or known.going:
        return run, ()
    run = with_host(run, replace(known, going=event.why))
    if isinstance(run.stage, Waiting):
        return start_if_ready(run, event.at)
    if (
        not isinstance(run.stage, LIVE)
        or event.host not in run.attempt.placement
        or run.interruption.leaving is not None
    ):
        return run, ()
    words = f"the scheduler takes {event.host} back ({event.why})"
    leaving = Leaving(cause="drained", words=words, requeue=False)
    return stop(with_leaving(run, leaving), event.at, words, grace_to_leave_s(run, event.at))


def hosts_checked(run: Run, event: HostsChecked) -> Result:
    if event.check != run.hosts.checks:
        return run, ()  # late result of an earlier check
    return checked(run, event.at, event.unfit)


def replanned(run: Run, event: Replanned) -> Result:
    found = JobPlan(plan=event.plan, number=event.plan_number)
    if event.device_bytes is not None:
        return _refitted(run, event.at, found, event.device_bytes)
    if run.plans.replanning is None:
        return run, ()
    run = replace(run, plans=replace(run.plans, replanning=None))
    room = room_for(run.plan, usable(run), switches_of(run))
    if room < len(run.plan.hosts):  # otherwise the lost host has come back
        run = shrunk(run, event.at, found)
    return start_if_ready(run, event.at) if isinstance(run.stage, Waiting) else (run, ())


def _refitted(run: Run, at: float, found: JobPlan, device_bytes: int) -> Result:
    """The planner found a plan that needs less memory than the one that did not fit."""
    if not _awaited(run, device_bytes):
        return run, ()
    run = replace(
        run,
        plans=replace(
            run.plans, shortage=None, device_bytes=device_bytes, refits=run.plans.refits + 1
        ),
    )
    # If the job has shrunk, only the plan for fewer hosts did not fit.
    shrank = run.plans.replanned is not None
    run = (
        replace(run, plans=replace(run.plans, replanned=found))
        if shrank
        else replace(run, plans=replace(run.plans, refitted=found))
    )
    assert run.job is not None
    return start_if_ready(with_deadline(run, at + run.job.init_timeout), at)


def _awaited(run: Run, device_bytes: int) -> bool:
    asked = run.plans.shortage.device_bytes if run.plans.shortage is not None else None
    return asked == device_bytes and isinstance(run.stage, Waiting)


def replan_refused(run: Run, event: ReplanRefused) -> Result:
    if event.device_bytes is not None:
        if not _awaited(run, event.device_bytes):
            return run, ()
        run, words = with_ways_out(run, event.why, event.ways, event.edits)
        return end(run, event.at, "FAILED", words)
    if run.plans.replanning is None:
        return run, ()
    run = replace(run, plans=replace(run.plans, replanning=None, refused=event.hosts))
    return start_if_ready(run, event.at) if isinstance(run.stage, Waiting) else (run, ())
