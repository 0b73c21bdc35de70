"""A launch is submitted, or a leader begins: what of the state before it still holds."""

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.contract.actions import EndJob
from orchestrator.contract.events import JobSubmitted, LeaderStarted
from orchestrator.supervise import shortage
from orchestrator.supervise.cancelling import told
from orchestrator.supervise.incidents import first_cause, incident_of
from orchestrator.supervise.moves import Result, end, recover, wait
from orchestrator.supervise.state import LIVE, OUTSIDE, Findings, Run, Stage

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
        brought=None,
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
    verdict = first_cause(run, findings)
    incident = incident_of(run, findings, verdict, "the job was submitted again")
    return replace(run, incidents=(*run.incidents, incident), restarts=run.restarts + 1)


def _left_behind(run: Run, at: float) -> Findings | None:
    """An attempt without an end means that the leader died under it, whatever had gone wrong."""
    if run.stage not in (*LIVE, Stage.STOPPING):
        return None
    if run.leaving is not None and not run.leaving.by_choice:
        return run.findings  # of before it was asked to leave
    return replace(
        run.findings or Findings(opened_at=at),
        leader_lost=run.last_at,
        leader_host=run.leader if run.allocation is not None else None,
        noticed_at=at,
    )


def _asked_by_followers(run: Run, event: LeaderStarted) -> tuple[str, ...]:
    """Hosts that are left out, with that of a leader that could not ask for it itself."""
    dead = run.stage not in OUTSIDE and run.allocation is not None and event.allocation is not None
    return tuple(sorted({*run.left_out, run.leader})) if dead else run.left_out


def _still_shut(run: Run, event: LeaderStarted) -> Mapping[str, str]:
    """Where pods move about they may come to such a host the moment that it is opened. A run that
    was queued again has the hosts it was given, and does without these as without others."""
    moves = event.allocation is not None and event.allocation.successor_s is not None
    return {host: why for host, why in run.exclude.items() if moves and host in run.shut}


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
    findings = _left_behind(run, event.at)
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
    if findings is None and waiting.shortage is not None:
        return shortage.look(waiting, event.at, waiting.shortage)  # nobody heard the answer
    if findings is None:
        return waiting, ()
    verdict = first_cause(run, findings)  # by the hosts of the leader that was lost
    if event.taken and verdict.kind == "leader-lost":
        return waiting, ()
    return recover(waiting, findings, event.at, verdict)
