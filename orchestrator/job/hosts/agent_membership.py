"""Agents come and go: what follows when one registers, is lost, or comes back after all."""

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.contract.check_results import why_unfit
from orchestrator.contract.messages.actions import Action, ReplaceAgent, StopAttempt
from orchestrator.contract.messages.events import AgentLost, AgentRegistered, HostUnavailable
from orchestrator.job.failures.diagnose import TOGETHER_S
from orchestrator.job.failures.incident_records import left_out
from orchestrator.job.findings import Findings
from orchestrator.job.host_state import HostState
from orchestrator.job.hosts import agents_not_started
from orchestrator.job.hosts.host_pool import no_good
from orchestrator.job.stage import IDLE, OUTSIDE, Checking, Holding, Stopping, Waiting
from orchestrator.job.stage_transitions import (
    FAILED_GRACE_S,
    Result,
    start_if_ready,
    stop_or_conclude,
)
from orchestrator.job.state import Run, with_findings, with_host, with_leaving


def registered(run: Run, event: AgentRegistered) -> Result:
    if isinstance(run.stage, OUTSIDE):
        return run, ()
    known = run.hosts.by_name.get(event.host)
    if known is not None and known.incarnation == event.incarnation:
        if known.alive:
            return run, ()
        run = _without_outage(run, event.host)
    if (known is None or not known.alive) and (attempt := _may_run(run, known, event)):
        return _welcome_back(run, known, event, attempt)
    actions: tuple[Action, ...] = ()
    expected = known is not None and known.back and isinstance(run.stage, Stopping)
    if known is not None and (known.alive or expected):
        lost = AgentLost(
            at=event.at,
            host=event.host,
            why="another agent took its place",
            silent_s=0.0,
            taken=event.taken,
        )
        run, actions = agent_lost(run, lost)
        itself = {a for a in actions if isinstance(a, ReplaceAgent) and a.host == event.host}
        actions = tuple(a for a in actions if a not in itself)
    host = _host(event, checked=known is not None and known.checked)
    run = with_host(run, host)
    if host.unfit:
        run = left_out(run, event.at, host.name, host.unfit)
    if isinstance(run.stage, Waiting):
        run, more = start_if_ready(run, event.at)
        actions += more
    return run, actions


def _host(event: AgentRegistered, checked: bool = False) -> HostState:
    return HostState(
        name=event.host,
        address=event.address,
        devices=event.devices,
        pid=event.pid,
        incarnation=event.incarnation,
        unfit=why_unfit(event.findings) or "",
        checked=checked,
    )


def _may_run(run: Run, known: HostState | None, event: AgentRegistered) -> int:
    """The attempt of which ranks may be left there; 0: none are."""
    if event.running:
        return event.running
    same = known is not None and known.incarnation == event.incarnation
    stopping = isinstance(run.stage, Stopping | Waiting | Holding)
    told_to_stop = stopping and event.host in run.attempt.placement
    return run.attempt.number if same and told_to_stop else 0


def _welcome_back(
    run: Run, known: HostState | None, event: AgentRegistered, attempt: int
) -> Result:
    """An agent that was given up too early counts again once it says that no rank is left.

    However late: its attempt may be over, and the next one under way on other hosts. Nor does a
    new leader count one that waited in place with ranks of its predecessor's attempt.
    """
    name = event.host
    reason = f"the agent of {name} is back: what it still runs has to end first"
    same = known is not None and known.incarnation == event.incarnation
    host = known if known is not None and same else _host(event)
    hosts = {**run.hosts.by_name, name: replace(host, alive=False, back=True, runs=attempt)}
    run = replace(run, hosts=replace(run.hosts, by_name=hosts))
    if host.unfit and not same:
        run = left_out(run, event.at, name, host.unfit)
    if attempt == run.attempt.number:
        done = {host: finished for host, finished in run.attempt.done.items() if host != name}
        run = replace(run, attempt=replace(run.attempt, done=done))
    stop = StopAttempt(attempt=attempt, grace_s=FAILED_GRACE_S, reason=reason, hosts=(name,))
    return run, (stop,)


def agent_lost(run: Run, event: AgentLost) -> Result:
    known = run.hosts.by_name.get(event.host)
    if known is None or not (known.alive or known.back):
        return run, ()
    if isinstance(run.stage, OUTSIDE):
        return run, ()
    gone = replace(known, alive=False, back=False, lost_at=event.at)
    run = with_host(run, gone)
    if isinstance(run.stage, Checking):
        checking = tuple(name for name in run.stage.hosts if name != event.host)
        run = replace(run, stage=replace(run.stage, hosts=checking))
    if run.interruption.leaving is not None:
        if known.going or event.taken or not run.interruption.leaving.by_choice:
            return _lost_while_leaving(run, event, known)
        if event.host in run.attempt.placement and event.host not in run.attempt.done:
            run = with_leaving(run, None)
    if known.going and (event.host not in run.attempt.placement or event.host in run.attempt.done):
        return run, ()
    again = ReplaceAgent(host=event.host, reason=f"the agent of {event.host} is gone: {event.why}")
    if isinstance(run.stage, IDLE):
        expected = known.going or known.sent_away or event.taken
        return (run, ()) if expected else _lost_while_waiting(run, event, again)
    if event.host not in run.attempt.placement or event.host in run.attempt.done:
        return run, (again,)
    found = run.interruption.findings or Findings(opened_at=event.at)
    run = replace(
        run,
        interruption=replace(run.interruption, findings=replace(found, lost=(*found.lost, event))),
        attempt=replace(run.attempt, done={**run.attempt.done, event.host: False}),
    )
    run, actions = stop_or_conclude(run, event.at, again.reason)
    asked = any(isinstance(a, ReplaceAgent) and a.host == event.host for a in actions)
    return run, actions if asked or run.ending is not None else (*actions, again)


def _lost_while_leaving(run: Run, event: AgentLost, known: HostState) -> Result:
    """Agents go when their hosts are given back; nobody is to blame."""
    why = f"the agent of {event.host} has left"
    expected = known.going or event.taken
    again = () if expected else asked_again(run, (event.host,), f"{why}: {event.why}")
    if event.host not in run.attempt.placement or event.host in run.attempt.done:
        return run, again
    run = replace(run, attempt=replace(run.attempt, done={**run.attempt.done, event.host: False}))
    run, actions = stop_or_conclude(run, event.at, why)
    return run, (*again, *actions)


def asked_again(run: Run, hosts: Sequence[str], reason: str) -> tuple[ReplaceAgent, ...]:
    """For agents that went while ranks leave, where the job stays and can use them."""
    if run.interruption.leaving is None or run.interruption.leaving.requeue:
        return ()
    fit = [name for name in hosts if not no_good(run, run.hosts.by_name[name])]
    return tuple(ReplaceAgent(host=name, reason=reason) for name in fit)


def unavailable(run: Run, event: HostUnavailable) -> Result:
    """No agent can be had there: do not wait for one."""
    known = run.hosts.by_name.get(event.host)
    if isinstance(run.stage, OUTSIDE) or (known is not None and known.alive):
        return run, ()
    if known is None:
        return agents_not_started.noted(run, event), ()
    run = with_host(run, replace(known, unfit=event.why))
    return start_if_ready(run, event.at) if isinstance(run.stage, Waiting) else (run, ())


def _lost_while_waiting(run: Run, event: AgentLost, again: ReplaceAgent) -> Result:
    """Nothing is to be stopped; what it means is seen when the others that go with it have gone."""
    found = run.interruption.findings or Findings(opened_at=event.at, idle=True)
    known = any(lost.host == event.host for lost in found.lost)
    found = replace(
        found,
        lost=found.lost if known else (*found.lost, event),
        returned=tuple(host for host in found.returned if host != event.host),
    )
    return with_findings(run, found), (again,)


def _without_outage(run: Run, host: str) -> Run:
    """The agent that was lost while no rank ran is heard again: once all are, nothing happened."""
    found = run.interruption.findings
    if found is None or not isinstance(run.stage, IDLE):
        return run
    found = replace(found, returned=(*found.returned, host))
    over = {lost.host for lost in found.lost} <= {*found.returned}
    return with_findings(run, None if over else found)


def outage_is_over(run: Run, at: float) -> bool:
    """Whether all that went together while no rank ran has gone by now."""
    found = run.interruption.findings
    if found is None or not isinstance(run.stage, Waiting):
        return False
    asked = (
        run.plans.shortage is not None or run.interruption.leaving is not None
    )  # what comes of that is first
    return not asked and at >= found.opened_at + TOGETHER_S
