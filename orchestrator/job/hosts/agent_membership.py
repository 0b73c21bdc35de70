"""Agents come and go: what follows when one registers, is lost, or comes back after all."""

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.contract.check_results import why_unfit
from orchestrator.contract.messages.actions import Action, ReplaceAgent, StopAttempt
from orchestrator.contract.messages.events import AgentLost, AgentRegistered, HostUnavailable
from orchestrator.job.failures.diagnose import TOGETHER_S
from orchestrator.job.findings import Findings
from orchestrator.job.host_state import HostState
from orchestrator.job.hosts import agents_not_started
from orchestrator.job.hosts.host_pool import no_good
from orchestrator.job.incident_records import left_out
from orchestrator.job.stage import IDLE, OUTSIDE, Stage
from orchestrator.job.stage_transitions import (
    FAILED_GRACE_S,
    Result,
    start_if_ready,
    stop_or_conclude,
)
from orchestrator.job.state import Run


def registered(run: Run, event: AgentRegistered) -> Result:
    if run.stage in OUTSIDE:
        return run, ()
    known = run.hosts.get(event.host)
    if known is not None and known.incarnation == event.incarnation:
        if known.alive:
            return run, ()
        run = _without_outage(run, event.host)
    if (known is None or not known.alive) and (attempt := _may_run(run, known, event)):
        return _welcome_back(run, known, event, attempt)
    actions: tuple[Action, ...] = ()
    expected = known is not None and known.back and run.stage is Stage.STOPPING
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
    run = replace(run, hosts={**run.hosts, event.host: host})
    if host.unfit:
        run = left_out(run, event.at, host.name, host.unfit)
    if run.stage is Stage.WAITING:
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
    stopping = run.stage in (Stage.STOPPING, Stage.WAITING, Stage.HOLDING)
    told_to_stop = stopping and event.host in run.placement
    return run.attempt if same and told_to_stop else 0


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
    hosts = {**run.hosts, name: replace(host, alive=False, back=True, runs=attempt)}
    run = replace(run, hosts=hosts)
    if host.unfit and not same:
        run = left_out(run, event.at, name, host.unfit)
    if attempt == run.attempt:
        done = {host: finished for host, finished in run.done.items() if host != name}
        run = replace(run, done=done)
    stop = StopAttempt(attempt=attempt, grace_s=FAILED_GRACE_S, reason=reason, hosts=(name,))
    return run, (stop,)


def agent_lost(run: Run, event: AgentLost) -> Result:
    known = run.hosts.get(event.host)
    if known is None or not (known.alive or known.back):
        return run, ()
    if run.stage in OUTSIDE:
        return run, ()
    gone = replace(known, alive=False, back=False, lost_at=event.at)
    checking = tuple(name for name in run.checking if name != event.host)
    run = replace(run, hosts={**run.hosts, event.host: gone}, checking=checking)
    if run.leaving is not None:
        if known.going or event.taken or not run.leaving.by_choice:
            return _lost_while_leaving(run, event, known)
        if event.host in run.placement and event.host not in run.done:
            run = replace(run, leaving=None)
    if known.going and (event.host not in run.placement or event.host in run.done):
        return run, ()
    again = ReplaceAgent(host=event.host, reason=f"the agent of {event.host} is gone: {event.why}")
    if run.stage in IDLE:
        expected = known.going or known.sent_away or event.taken
        return (run, ()) if expected else _lost_while_waiting(run, event, again)
    if event.host not in run.placement or event.host in run.done:
        return run, (again,)
    found = run.findings or Findings(opened_at=event.at)
    run = replace(
        run,
        findings=replace(found, lost=(*found.lost, event)),
        done={**run.done, event.host: False},
    )
    run, actions = stop_or_conclude(run, event.at, again.reason)
    asked = any(isinstance(a, ReplaceAgent) and a.host == event.host for a in actions)
    return run, actions if asked or run.ending is not None else (*actions, again)


def _lost_while_leaving(run: Run, event: AgentLost, known: HostState) -> Result:
    """Agents go when their hosts are given back; nobody is to blame."""
    why = f"the agent of {event.host} has left"
    expected = known.going or event.taken
    again = () if expected else asked_again(run, (event.host,), f"{why}: {event.why}")
    if event.host not in run.placement or event.host in run.done:
        return run, again
    run = replace(run, done={**run.done, event.host: False})
    run, actions = stop_or_conclude(run, event.at, why)
    return run, (*again, *actions)


def asked_again(run: Run, hosts: Sequence[str], reason: str) -> tuple[ReplaceAgent, ...]:
    """For agents that went while ranks leave, where the job stays and can use them."""
    if run.leaving is None or run.leaving.requeue:
        return ()
    fit = [name for name in hosts if not no_good(run, run.hosts[name])]
    return tuple(ReplaceAgent(host=name, reason=reason) for name in fit)


def unavailable(run: Run, event: HostUnavailable) -> Result:
    """No agent can be had there: do not wait for one."""
    known = run.hosts.get(event.host)
    if run.stage in OUTSIDE or (known is not None and known.alive):
        return run, ()
    if known is None:
        return agents_not_started.noted(run, event), ()
    run = replace(run, hosts={**run.hosts, event.host: replace(known, unfit=event.why)})
    return start_if_ready(run, event.at) if run.stage is Stage.WAITING else (run, ())


def _lost_while_waiting(run: Run, event: AgentLost, again: ReplaceAgent) -> Result:
    """Nothing is to be stopped; what it means is seen when the others that go with it have gone."""
    found = run.findings or Findings(opened_at=event.at, within=run.stage)
    known = any(lost.host == event.host for lost in found.lost)
    found = replace(
        found,
        lost=found.lost if known else (*found.lost, event),
        returned=tuple(host for host in found.returned if host != event.host),
    )
    return replace(run, findings=found), (again,)


def _without_outage(run: Run, host: str) -> Run:
    """The agent that was lost while no rank ran is heard again: once all are, nothing happened."""
    found = run.findings
    if found is None or run.stage not in IDLE:
        return run
    found = replace(found, returned=(*found.returned, host))
    over = {lost.host for lost in found.lost} <= {*found.returned}
    return replace(run, findings=None if over else found)


def outage_is_over(run: Run, at: float) -> bool:
    """Whether all that went together while no rank ran has gone by now."""
    found = run.findings
    if found is None or run.stage is not Stage.WAITING:
        return False
    asked = run.shortage is not None or run.leaving is not None  # what comes of that is first
    return not asked and at >= found.opened_at + TOGETHER_S
