"""A launch is submitted, or a leader begins: what of the state before it still holds."""

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.actions import Action, EndJob, ReplaceAgent
from orchestrator.contract.messages.events import JobSubmitted, LeaderStarted
from orchestrator.job.failures import no_progress, oom_replan
from orchestrator.job.failures.cancellation import told
from orchestrator.job.failures.incident_records import first_cause, incident_of
from orchestrator.job.findings import Findings
from orchestrator.job.host_state import Hosts, HostState, SchedulerState
from orchestrator.job.plans import Plans
from orchestrator.job.stage import ATTEMPT, OUTSIDE, Ended, Holding, Queued, Submitted
from orchestrator.job.stage_transitions import Result, end, recover, wait
from orchestrator.job.state import Run, with_incident

SETTLE_S = 5.0
"""For spares to register once enough hosts are there."""


def submitted(run: Run, event: JobSubmitted) -> Result:
    """A resumed job keeps its history; whatever was under way ended with its leader."""
    kept = _interrupted(run, event.at) if event.resume else Run()
    reason = "submitted again" if event.resume else "submitted"
    after = Run(
        job=event,
        stage=Submitted(since=event.at, reason=reason),
        # `--drill` of this submission: ids count from 1 again.
        attempt=replace(kept.attempt, placement=(), done={}, drills=()),
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


def _interrupted(run: Run, at: float) -> Run:
    """With the incident of an attempt that has no end; a person decided what comes of it."""
    findings = _left_behind(run, at)
    if findings is None:
        return run
    run = _with_incident(run, findings, "the job was submitted again")
    return replace(run, history=replace(run.history, restarts=run.history.restarts + 1))


def _with_incident(run: Run, findings: Findings | None, action: str, rule: str = "") -> Run:
    """Of what was found, if anything was. `rule`: by which the job ends; else a person decided."""
    if findings is None:
        return run
    incident = incident_of(run, findings, first_cause(run, findings), action)
    if rule:
        incident = replace(incident, remedy="stop", rule=rule)
    return with_incident(run, incident)


def _as_far_as(run: Run, reached: Reached | None) -> Run:
    """Of an attempt without an end the journal has few steps."""
    if reached is None or reached.attempt != run.attempt.number:
        return run
    return replace(run, attempt=replace(run.attempt, step=max(run.attempt.step, reached.step)))


def _left_behind(
    run: Run,
    at: float,
    reached: Reached | None = None,
    ended: str = "",
    granted: Allocation | None = None,
) -> Findings | None:
    """An attempt without an end means that the leader died under it, whatever had gone wrong.
    `ended`: how."""
    if not isinstance(run.stage, ATTEMPT):
        return None
    if run.interruption.leaving is not None and not run.interruption.leaving.by_choice:
        return run.interruption.findings  # of before it was asked to leave
    ours = reached is not None and reached.attempt == run.attempt.number and reached.at <= at
    lived_until = (
        max(run.history.last_at, reached.at)
        if reached is not None and ours
        else run.history.last_at
    )
    return replace(
        run.interruption.findings or Findings(opened_at=at),
        leader_lost=lived_until,
        leader_host=run.scheduler.leader if run.scheduler.allocation is not None else None,
        leader_ended=ended,
        broke=granted.broke_before if granted else None,
        noticed_at=at,
    )


def takes_over(run: Run, allocation: Allocation | None) -> bool:
    """Whether whoever begins to lead now has the very hosts that the leader before it had: it is
    one of their agents."""
    former = run.scheduler.allocation
    if isinstance(run.stage, OUTSIDE) or former is None or allocation is None:
        return False
    same = (former.id, former.restarts) == (allocation.id, allocation.restarts)
    return same and allocation.successor_s is None


def expected_back(run: Run, host: str) -> tuple[str, ...]:
    """The hosts of a leader that is gone whose agents are to follow the next one, on `host`."""
    return tuple(
        known.name
        for known in run.hosts.by_name.values()
        if (known.alive or known.back) and known.name not in (host, run.scheduler.leader)
    )


def _kept(run: Run, event: LeaderStarted) -> Mapping[str, HostState]:
    """The hosts of an allocation that has a new leader. None counts before its agent has come to
    that, and said that no rank is left there; the agent of the former leader's is gone."""
    kept = {}
    for name in (*expected_back(run, ""), run.scheduler.leader):
        if (known := run.hosts.by_name.get(name)) is not None:
            gone = name == run.scheduler.leader and name != event.host
            lost_at = event.at if gone else known.lost_at
            kept[name] = replace(
                known,
                alive=False,
                back=not gone,
                runs=run.attempt.number,
                lost_at=lost_at,
                going="",
            )
    return kept


def _asked_by_followers(run: Run, event: LeaderStarted) -> tuple[str, ...]:
    """Hosts that are left out, with that of a leader that could not ask for it itself."""
    dead = (
        not isinstance(run.stage, OUTSIDE)
        and run.scheduler.allocation is not None
        and event.allocation is not None
    )
    if takes_over(run, event.allocation):
        return run.scheduler.left_out
    return (
        tuple(sorted({*run.scheduler.left_out, run.scheduler.leader}))
        if dead
        else run.scheduler.left_out
    )


def _still_shut(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """Where pods move about they may come to such a host the moment that it is opened, and in an
    allocation that has a new leader it may be used then. A run that was queued again has the hosts
    it was given, and does without these as without others."""
    moves = event.allocation is not None and event.allocation.successor_s is not None
    stays = moves or takes_over(run, event.allocation)
    return {
        host: why for host, why in run.hosts.exclude.items() if stays and host in run.hosts.shut
    }


def _away_still(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """Hosts that were no good in the run before, but for those that the scheduler gives again.

    It was asked not to, so there may be no others: it has them back, and what is still wrong with
    one is found anew. Where it cannot be asked, as for a pod's next node, it says nothing.
    """
    allocation = event.allocation
    again = allocation.hosts if allocation and allocation.successor_s is None else ()
    return {host: why for host, why in run.hosts.exclude.items() if host not in again}


def _replaced_still(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """But for those that a person has pinned, or has cleared since."""
    return {
        host: found.why
        for host, found in run.hosts.replaced.items()
        if host not in event.always and event.cleared.get(host, 0.0) <= found.at
    }


def leader_started(run: Run, event: LeaderStarted) -> Result:
    assert run.job is not None
    if isinstance(run.stage, Ended) and run.ending is not None:
        return run, (EndJob(state=run.ending, reason=f"the job has ended: {run.stage.reason}"),)
    if run.interruption.cancelled_by is not None:
        return end(
            told(run), event.at, "CANCELLED", f"cancelled by {run.interruption.cancelled_by}"
        )
    if event.unable:
        return end(run, event.at, "FAILED", event.unable)
    same = takes_over(run, event.allocation)
    findings = _left_behind(run, event.at, event.reached, event.former, event.allocation)
    run = _as_far_as(run, event.reached)
    if not same:
        run = no_progress.begun(run, event)
        if why := no_progress.one_too_many(run):
            run = _with_incident(run, findings, "the job was stopped", no_progress.RULE)
            return end(run, event.at, "FAILED", why)
    # The scheduler was asked to leave these out, and may have killed the leader before it heard.
    kept = _replaced_still(run, event)
    before = _away_still(run, event) if isinstance(run.stage, Queued) else _still_shut(run, event)
    known = {**before, **kept}
    # One that was given all the same has not been away for a run.
    given = () if event.allocation is None else event.allocation.hosts
    stands = {*event.exclude, *kept}
    hosts = replace(
        run.hosts,
        by_name={},
        settle_until=event.at + SETTLE_S,
        always=event.always,
        exclude={**known, **event.exclude},
        shut=tuple(host for host in _still_shut(run, event) if host not in stands),
        draining={},
        carried=tuple(sorted({*known} - {*stands, *given})),
        replaced={host: run.hosts.replaced[host] for host in kept},
        cleared=event.cleared,
    )
    waiting = replace(
        wait(run, event.at, "waiting for agents"),
        hosts=hosts,
        scheduler=replace(
            run.scheduler,
            leader=event.host,
            allocation=event.allocation,
            left_out=_asked_by_followers(run, event),
        ),
        plans=replace(run.plans, replanned=None, larger=(), replanning=None, refused=None),
        interruption=replace(run.interruption, findings=None, leaving=None),
    )
    if isinstance(run.stage, Holding):
        waiting = replace(waiting, stage=run.stage)
    after, actions = _after_former(run, waiting, findings, event)
    return _followed(run, after, actions, event) if same else (after, actions)


def _after_former(
    run: Run, waiting: Run, findings: Findings | None, event: LeaderStarted
) -> Result:
    """What follows from what the former leader left behind."""
    if findings is None and waiting.plans.shortage is not None:
        return oom_replan.look(waiting, event.at, waiting.plans.shortage)  # nobody heard the answer
    if findings is None:
        return waiting, ()
    verdict = first_cause(run, findings)  # by the hosts of the leader that was lost
    if event.taken and verdict.kind == "leader-lost":
        return waiting, ()
    return recover(waiting, findings, event.at, verdict)


def _followed(run: Run, after: Run, actions: tuple[Action, ...], event: LeaderStarted) -> Result:
    """With the hosts that the former leader had: on its own, an agent is started again."""
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
    why = f"the agent of {run.scheduler.leader} is gone with the leader that it was"
    return after, (*actions, ReplaceAgent(host=run.scheduler.leader, reason=why))
