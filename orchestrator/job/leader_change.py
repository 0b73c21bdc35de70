"""A launch is submitted, or a leader begins: what of the state before it still holds."""

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.actions import Action, EndJob, ReplaceAgent
from orchestrator.contract.messages.events import JobSubmitted, LeaderStarted
from orchestrator.job.cancellation import told
from orchestrator.job.failures import no_progress, oom_replan
from orchestrator.job.findings import Findings
from orchestrator.job.host_state import HostState
from orchestrator.job.incident_records import first_cause, incident_of
from orchestrator.job.stage import LIVE, OUTSIDE, Stage
from orchestrator.job.stage_transitions import Result, end, recover, wait
from orchestrator.job.state import Run

SETTLE_S = 5.0
"""For spares to register once enough hosts are there."""


def submitted(run: Run, event: JobSubmitted) -> Result:
    """A resumed job keeps its history; whatever was under way ended with its leader."""
    kept = _interrupted(run, event.at) if event.resume else Run()
    after = replace(
        kept,
        job=event,
        stage=Stage.SUBMITTED,
        since=event.at,
        deadline=None,
        reason="submitted again" if event.resume else "submitted",
        ending=None,
        cancelled_by=None,
        hosts={},
        leader="",
        allocation=None,
        exclude={},
        shut=(),
        draining={},
        carried=(),
        left_out=event.launch.exclude,
        away={},
        given_back=0,
        replaced={},
        refitted=None,
        replanned=None,
        larger=(),
        grown_at=None,
        shortage=None,
        device_bytes=None,
        refits=0,
        rollbacks=(),
        replanning=None,
        refused=None,
        leaving=None,
        placement=(),
        done={},
        allocations=0,
        fruitless=0,
        save_every=None,
        forgiven=len(kept.incidents),
        findings=None,
    )
    if event.resume:
        # `--drill` of this submission: ids count from 1 again.
        after = replace(after, fired=(), fired_now=())
    return after, ()


def _interrupted(run: Run, at: float) -> Run:
    """With the incident of an attempt that has no end; a person decided what comes of it."""
    findings = _left_behind(run, at)
    if findings is None:
        return run
    run = _with_incident(run, findings, "the job was submitted again")
    return replace(run, restarts=run.restarts + 1)


def _with_incident(run: Run, findings: Findings | None, action: str, rule: str = "") -> Run:
    """Of what was found, if anything was. `rule`: by which the job ends; else a person decided."""
    if findings is None:
        return run
    incident = incident_of(run, findings, first_cause(run, findings), action)
    if rule:
        incident = replace(incident, remedy="stop", rule=rule)
    return replace(run, incidents=(*run.incidents, incident))


def _as_far_as(run: Run, reached: Reached | None) -> Run:
    """Of an attempt without an end the journal has few steps."""
    if reached is None or reached.attempt != run.attempt:
        return run
    return replace(run, step=max(run.step, reached.step))


def _left_behind(
    run: Run,
    at: float,
    reached: Reached | None = None,
    ended: str = "",
    granted: Allocation | None = None,
) -> Findings | None:
    """An attempt without an end means that the leader died under it, whatever had gone wrong.
    `ended`: how."""
    if run.stage not in (*LIVE, Stage.STOPPING):
        return None
    if run.leaving is not None and not run.leaving.by_choice:
        return run.findings  # of before it was asked to leave
    ours = reached is not None and reached.attempt == run.attempt and reached.at <= at
    lived_until = max(run.last_at, reached.at) if reached is not None and ours else run.last_at
    return replace(
        run.findings or Findings(opened_at=at),
        leader_lost=lived_until,
        leader_host=run.leader if run.allocation is not None else None,
        leader_ended=ended,
        broke=granted.broke_before if granted else None,
        noticed_at=at,
    )


def takes_over(run: Run, allocation: Allocation | None) -> bool:
    """Whether whoever begins to lead now has the very hosts that the leader before it had: it is
    one of their agents."""
    former = run.allocation
    if run.stage in OUTSIDE or former is None or allocation is None:
        return False
    same = (former.id, former.restarts) == (allocation.id, allocation.restarts)
    return same and allocation.successor_s is None


def expected_back(run: Run, host: str) -> tuple[str, ...]:
    """The hosts of a leader that is gone whose agents are to follow the next one, on `host`."""
    return tuple(
        known.name
        for known in run.hosts.values()
        if (known.alive or known.back) and known.name not in (host, run.leader)
    )


def _kept(run: Run, event: LeaderStarted) -> Mapping[str, HostState]:
    """The hosts of an allocation that has a new leader. None counts before its agent has come to
    that, and said that no rank is left there; the agent of the former leader's is gone."""
    kept = {}
    for name in (*expected_back(run, ""), run.leader):
        if (known := run.hosts.get(name)) is not None:
            gone = name == run.leader and name != event.host
            lost_at = event.at if gone else known.lost_at
            kept[name] = replace(
                known, alive=False, back=not gone, runs=run.attempt, lost_at=lost_at, going=""
            )
    return kept


def _asked_by_followers(run: Run, event: LeaderStarted) -> tuple[str, ...]:
    """Hosts that are left out, with that of a leader that could not ask for it itself."""
    dead = run.stage not in OUTSIDE and run.allocation is not None and event.allocation is not None
    if takes_over(run, event.allocation):
        return run.left_out
    return tuple(sorted({*run.left_out, run.leader})) if dead else run.left_out


def _still_shut(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """Where pods move about they may come to such a host the moment that it is opened, and in an
    allocation that has a new leader it may be used then. A run that was queued again has the hosts
    it was given, and does without these as without others."""
    moves = event.allocation is not None and event.allocation.successor_s is not None
    stays = moves or takes_over(run, event.allocation)
    return {host: why for host, why in run.exclude.items() if stays and host in run.shut}


def _away_still(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """Hosts that were no good in the run before, but for those that the scheduler gives again.

    It was asked not to, so there may be no others: it has them back, and what is still wrong with
    one is found anew. Where it cannot be asked, as for a pod's next node, it says nothing.
    """
    allocation = event.allocation
    again = allocation.hosts if allocation and allocation.successor_s is None else ()
    return {host: why for host, why in run.exclude.items() if host not in again}


def _replaced_still(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """But for those that a person has pinned, or has cleared since."""
    return {
        host: found.why
        for host, found in run.replaced.items()
        if host not in event.always and event.cleared.get(host, 0.0) <= found.at
    }


def leader_started(run: Run, event: LeaderStarted) -> Result:
    assert run.job is not None
    if run.stage is Stage.ENDED and run.ending is not None:
        return run, (EndJob(state=run.ending, reason=f"the job has ended: {run.reason}"),)
    if run.cancelled_by is not None:
        return end(told(run), event.at, "CANCELLED", f"cancelled by {run.cancelled_by}")
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
    before = _away_still(run, event) if run.stage is Stage.QUEUED else _still_shut(run, event)
    known = {**before, **kept}
    waiting = replace(
        wait(run, event.at, "waiting for agents"),
        hosts={},
        findings=None,
        settle_until=event.at + SETTLE_S,
        leader=event.host,
        allocation=event.allocation,
        exclude=event.exclude,
        always=event.always,
        cleared=event.cleared,
        replaced={host: run.replaced[host] for host in kept},
        replanned=None,
        larger=(),
        replanning=None,
        refused=None,
        leaving=None,
        draining={},
    )
    # One that was given all the same has not been away for a run.
    given = () if event.allocation is None else event.allocation.hosts
    stands = {*event.exclude, *kept}
    waiting = replace(
        waiting,
        exclude={**known, **event.exclude},
        shut=tuple(host for host in _still_shut(run, event) if host not in stands),
        carried=tuple(sorted({*known} - {*stands, *given})),
        left_out=_asked_by_followers(run, event),
    )
    if run.stage is Stage.HOLDING:
        waiting = replace(
            waiting,
            stage=Stage.HOLDING,
            since=run.since,
            deadline=run.deadline,
            reason=run.reason,
        )
    after, actions = _after_former(run, waiting, findings, event)
    return _followed(run, after, actions, event) if same else (after, actions)


def _after_former(
    run: Run, waiting: Run, findings: Findings | None, event: LeaderStarted
) -> Result:
    """What follows from what the former leader left behind."""
    if findings is None and waiting.shortage is not None:
        return oom_replan.look(waiting, event.at, waiting.shortage)  # nobody heard the answer
    if findings is None:
        return waiting, ()
    verdict = first_cause(run, findings)  # by the hosts of the leader that was lost
    if event.taken and verdict.kind == "leader-lost":
        return waiting, ()
    return recover(waiting, findings, event.at, verdict)


def _followed(run: Run, after: Run, actions: tuple[Action, ...], event: LeaderStarted) -> Result:
    """With the hosts that the former leader had: on its own, an agent is started again."""
    kept = _kept(run, event)
    after = replace(after, hosts={**kept, **after.hosts})
    lost = kept.get(run.leader)
    if after.stage in OUTSIDE or lost is None or lost.back or run.leader in after.exclude:
        return after, actions
    why = f"the agent of {run.leader} is gone with the leader that it was"
    return after, (*actions, ReplaceAgent(host=run.leader, reason=why))
