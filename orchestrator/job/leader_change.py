"""A person submits the job or ends it without a leader, or a new leader starts: what stays of the
state before."""

from collections.abc import Mapping

from msgspec.structs import replace

from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.actions import Action, EndJob, ReplaceAgent
from orchestrator.contract.messages.events import CancelRequested, JobSubmitted, LeaderStarted
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.job.attempt_end import recover
from orchestrator.job.failures import no_progress, oom_replan
from orchestrator.job.failures.incident_records import (
    first_cause,
    incident_of,
    with_incident_before_cancel,
)
from orchestrator.job.host_state import Hosts, HostState, SchedulerState, lost_host
from orchestrator.job.hosts.acquittal import is_same_boot
from orchestrator.job.hosts.warned_hosts import remembered
from orchestrator.job.leave import Result, end
from orchestrator.job.plans import Plans
from orchestrator.job.stage import ATTEMPT, OUTSIDE, Ended, Holding, Queued, Submitted
from orchestrator.job.start import wait
from orchestrator.job.state import Run, with_incident

SETTLE_S = 5.0
"""Seconds for spares to register after enough hosts are there."""


def job_submitted(run: Run, event: JobSubmitted) -> Result:
    """A resumed job keeps its history. An attempt that was under way ended with its leader."""
    kept = _interrupted(run, event) if event.resume else Run()
    reason = "submitted again" if event.resume else "submitted"
    after = Run(
        job=event,
        stage=Submitted(since=event.at, reason=reason),
        # The ids of this submission's `--drill` options count from 1 again.
        attempt=replace(
            kept.attempt,
            placement=(),
            done={},
            killed=(),
            drills=(),
            memory=None,
            memory_lost=True,
        ),
        progress=replace(kept.progress, rollbacks=(), save_every=None, drills=()),
        hosts=Hosts(
            settle_until=kept.hosts.settle_until,
            checks=kept.hosts.checks,
            always=kept.hosts.always,
            cleared=kept.hosts.cleared,
        ),
        scheduler=SchedulerState(
            left_out=event.launch.exclude, short_since=kept.scheduler.short_since
        ),
        plans=Plans(asked_at=kept.plans.asked_at),
        history=replace(
            kept.history, allocations=0, fruitless=0, forgiven=len(kept.history.incidents)
        ),
    )
    return after, ()


def _interrupted(run: Run, event: JobSubmitted) -> Run:
    """Adds the incident of an attempt without an end. What follows was a person's decision."""
    findings = _left_behind(run, event.at, event.reached)
    if findings is None:
        return run
    run = _with_incident(_as_far_as(run, event.reached), findings, "the job was submitted again")
    return replace(run, history=replace(run.history, restarts=run.history.restarts + 1))


def _with_incident(run: Run, findings: Findings | None, action: str, rule: str = "") -> Run:
    """Adds the incident of `findings`, if any. `rule`: ends the job; empty if a person decided."""
    if findings is None:
        return run
    incident = incident_of(run, findings, first_cause(run, findings), action)
    if rule:
        incident = replace(incident, remedy="stop", rule=rule)
    return with_incident(run, incident)


def _as_far_as(run: Run, reached: Reached | None) -> Run:
    """The journal has few steps of an attempt without an end, so use the step of its metrics."""
    if reached is None or reached.attempt != run.attempt.number:
        return run
    step = max(run.attempt.own_step, reached.step)
    return replace(run, attempt=replace(run.attempt, step=step, stepped=True))


def _left_behind(
    run: Run,
    at: float,
    reached: Reached | None = None,
    started: LeaderStarted | None = None,
) -> Findings | None:
    """Findings of an attempt without an end: its leader was lost, whatever else had gone wrong.

    Args:
        started: the new leader; None if the job was submitted again.
    """
    if not isinstance(run.stage, ATTEMPT):
        return None
    if run.interruption.leaving is not None and not run.interruption.leaving.by_choice:
        return run.interruption.findings  # from before the scheduler asked the job to leave
    ours = reached is not None and reached.attempt == run.attempt.number and reached.at <= at
    lived_until = max(run.last_at, reached.at) if reached is not None and ours else run.last_at
    ended = started.former if started else ""
    granted = started.allocation if started else None
    if started and started.heard is not None and started.heard <= at:
        lived_until = max(lived_until, started.heard)
    return replace(
        run.interruption.findings or Findings(opened_at=at),
        leader_lost=lived_until,
        # On one machine a leader that is lost and not replaced is no fault of a host.
        leader_host=run.scheduler.leader if ended or run.scheduler.allocation is not None else None,
        leader_ended=ended,
        leader_host_works=started is not None and _works(run, started),
        broke=granted.broke_before if granted else None,
        noticed_at=at,
    )


def _works(run: Run, started: LeaderStarted) -> bool:
    """The host of the former leader has shown that only the leader's process ended there."""
    known = run.hosts.by_name.get(run.scheduler.leader)
    # Where the cluster replaces a lost leader, the next one may start on the same host at once.
    # Elsewhere a later allocation may have the host too, long after it was unreachable.
    replaced = started.allocation is not None and started.allocation.successor_s is not None
    again = known is not None and known.name == started.host and is_same_boot(known, started.boot)
    return started.host_works or (replaced and again)


def takes_over(run: Run, allocation: Allocation | None, ended: str) -> bool:
    """The new leader was an agent of the former one, on the same hosts.

    Args:
        ended: how the former leader ended; empty if that is not known.
    """
    former = run.scheduler.allocation
    if isinstance(run.stage, OUTSIDE):
        return False
    if former is None or allocation is None:
        # On one machine only an agent of the former leader knows how that ended.
        return former is allocation and bool(ended)
    same = (former.id, former.restarts) == (allocation.id, allocation.restarts)
    return same and allocation.successor_s is None


def expected_back(run: Run, host: str) -> tuple[str, ...]:
    """Hosts of a lost leader whose agents follow the next leader, which runs on `host`."""
    return tuple(
        known.name
        for known in run.hosts.by_name.values()
        if (known.alive or known.back) and known.name not in (host, run.scheduler.leader)
    )


def _kept(run: Run, event: LeaderStarted) -> Mapping[str, HostState]:
    """The hosts of an allocation after a takeover. A host counts as alive when its agent has
    registered with the new leader and has no rank left. The agent of the former leader is gone."""
    kept = {}
    for name in (*expected_back(run, ""), run.scheduler.leader):
        if (known := run.hosts.by_name.get(name)) is not None:
            gone = name == run.scheduler.leader and name != event.host
            left = lost_host(known, event.at, closed=False) if gone else known
            kept[name] = replace(
                left, alive=False, back=not gone, runs=run.attempt.number, going=""
            )
    return kept


def _asked_by_followers(run: Run, event: LeaderStarted) -> tuple[str, ...]:
    """Hosts that the scheduler was asked to exclude. Followers asked to exclude the host of a lost
    leader."""
    dead = (
        not isinstance(run.stage, OUTSIDE)
        and run.scheduler.allocation is not None
        and event.allocation is not None
    )
    if takes_over(run, event.allocation, event.former):
        return run.scheduler.left_out
    return (
        tuple(sorted({*run.scheduler.left_out, run.scheduler.leader}))
        if dead
        else run.scheduler.left_out
    )


def _still_shut(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """Drained or cordoned hosts -> why, if they can be used once the scheduler opens them again.

    That is so where pods move between hosts, and after a takeover. A requeued job has a new
    allocation without them.
    """
    moves = event.allocation is not None and event.allocation.successor_s is not None
    stays = moves or takes_over(run, event.allocation, event.former)
    return {
        host: why for host, why in run.hosts.exclude.items() if stays and host in run.hosts.shut
    }


def _away_still(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """Hosts that were excluded before, without those that the scheduler granted again.

    It was asked to exclude them, so there may be no others. The checks find what is still wrong.
    Kubernetes cannot be asked to exclude nodes in this way, so a grant there means nothing.
    """
    allocation = event.allocation
    again = allocation.hosts if allocation and allocation.successor_s is None else ()
    return {host: why for host, why in run.hosts.exclude.items() if host not in again}


def _replaced_still(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """Replaced hosts -> why, without those that a person has pinned, or has cleared since."""
    return {
        host: found.why
        for host, found in run.hosts.replaced.items()
        if host not in event.always and event.cleared.get(host, 0.0) <= found.at
    }


def cancelled_without_leader(run: Run, event: CancelRequested) -> Result:
    """No leader is there to stop the attempt. Its loss is an incident, but there is no restart. If
    the cancellation itself ended the leader, only a failure before it is an incident."""
    if run.interruption.cancelled_by is not None:  # the leader died with the first order
        by = f"cancelled by {run.interruption.cancelled_by}"
        return end(with_incident_before_cancel(run), event.at, "CANCELLED", by)
    by = f"cancelled by {event.by}"
    findings = _left_behind(run, event.at, event.reached)
    if event.asked_at is not None:
        # This leader was not lost. What failed since it was asked may have been ended with it.
        found = run.interruption.findings
        findings = found if found is not None and found.opened_at < event.asked_at else None
    run = _with_incident(_as_far_as(run, event.reached), findings, by)
    run = replace(run, interruption=replace(run.interruption, cancelled_by=event.by))
    return end(run, event.at, "CANCELLED", by)


def leader_after_end(run: Run, event: LeaderStarted) -> Result:
    """A leader that starts after the end of the job has nothing to do."""
    assert isinstance(run.stage, Ended)
    why = f"the job has ended: {run.stage.reason}"
    return run, (EndJob(state=run.stage.ending, reason=why),)


def leader_started(run: Run, event: LeaderStarted) -> Result:
    assert run.job is not None
    if run.interruption.cancelled_by is not None:
        by = f"cancelled by {run.interruption.cancelled_by}"
        return end(with_incident_before_cancel(run), event.at, "CANCELLED", by)
    # Its host cannot ask the scheduler what was granted, so it cannot lead, and no retry helps.
    if event.unable:
        return end(run, event.at, "FAILED", event.unable)
    # After a takeover the hosts are the same ones, so their agents are expected to come back.
    same = takes_over(run, event.allocation, event.former)
    findings = _left_behind(run, event.at, event.reached, event)
    run = _as_far_as(run, event.reached)
    # Each new allocation counts: a job that makes no progress must not be queued for ever.
    if not same:
        run = no_progress.begun(run, event)
        if why := no_progress.one_too_many(run):
            run = _with_incident(run, findings, "the job was stopped", no_progress.RULE)
            return end(run, event.at, "FAILED", why)
    # The former leader may have died before it asked the scheduler to exclude these.
    kept = _replaced_still(run, event)
    before = _away_still(run, event) if isinstance(run.stage, Queued) else _still_shut(run, event)
    known = {**before, **kept}
    # A host that was granted all the same was not excluded for one allocation.
    given = () if event.allocation is None else event.allocation.hosts
    stands = {*event.exclude, *kept}
    hosts = replace(
        run.hosts,
        by_name={},
        # The agents of a new allocation report afresh.
        warned=run.hosts.warned if same else (),
        warned_before=run.hosts.warned_before if same else remembered(run.hosts),
        settle_until=event.at + SETTLE_S,
        always=event.always,
        exclude={**known, **event.exclude},
        shut=tuple(host for host in _still_shut(run, event) if host not in stands),
        draining={},
        carried=tuple(sorted({*known} - {*stands, *given})),
        replaced={host: run.hosts.replaced[host] for host in kept},
        cleared=event.cleared,
    )
    # Where each host is replaced alone, the agents of the others stay.
    stays = same or (event.allocation is not None and event.allocation.successor_s is not None)
    waiting = replace(
        wait(run, event.at, "waiting for agents"),
        hosts=hosts,
        attempt=replace(run.attempt, memory_lost=run.attempt.memory_lost or not stays),
        scheduler=replace(
            run.scheduler,
            leader=event.host,
            allocation=event.allocation,
            left_out=_asked_by_followers(run, event),
        ),
        plans=replace(run.plans, replanned=None, larger=(), replanning=None, refused=None),
        interruption=replace(run.interruption, findings=None, leaving=None),
    )
    # The wait for a transient failure was the former leader's decision, and still holds.
    if isinstance(run.stage, Holding):
        waiting = replace(waiting, stage=run.stage)
    after, actions = _after_former(run, waiting, findings, event)
    return _followed(run, after, actions, event) if same else (after, actions)


def _after_former(
    run: Run, waiting: Run, findings: Findings | None, event: LeaderStarted
) -> Result:
    """What follows from the attempt or the question that the former leader left open."""
    if findings is None and waiting.plans.shortage is not None:
        return oom_replan.look(waiting, event.at, waiting.plans.shortage)  # the answer was lost
    if findings is None:
        return waiting, ()
    verdict = first_cause(run, findings)  # `run` still has the hosts of the former leader
    # The scheduler took the leader's host. That has no culprit, so it is no incident.
    if event.taken and verdict.kind == "leader-lost":
        return waiting, ()
    return recover(waiting, findings, event.at, verdict)


def _followed(run: Run, after: Run, actions: tuple[Action, ...], event: LeaderStarted) -> Result:
    """After a takeover: keep the hosts, and start an agent on the host of the former leader."""
    kept = _kept(run, event)
    after = replace(after, hosts=replace(after.hosts, by_name={**kept, **after.hosts.by_name}))
    lost = kept.get(run.scheduler.leader)
    if (
        isinstance(after.stage, OUTSIDE)
        or lost is None
        or lost.back
        or run.scheduler.leader in after.hosts.exclude
    ):
        return after, actions
    why = f"the agent of {run.scheduler.leader} was the leader, which is gone"
    return after, (*actions, ReplaceAgent(host=run.scheduler.leader, reason=why))
