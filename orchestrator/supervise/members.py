"""Agents come and go: what follows when one registers, is lost, or comes back after all."""

from dataclasses import replace

from orchestrator.contract.actions import Action, ReplaceAgent, StopAttempt
from orchestrator.contract.events import AgentLost, AgentRegistered, HostUnavailable
from orchestrator.contract.findings import why_unfit
from orchestrator.supervise.moves import (
    FAILED_GRACE_S,
    Result,
    end,
    left_out,
    start_if_ready,
    stop_or_conclude,
)
from orchestrator.supervise.state import OUTSIDE, Findings, HostState, Run, Stage


def registered(run: Run, event: AgentRegistered) -> Result:
    if run.stage in OUTSIDE:
        return run, ()
    known = run.hosts.get(event.host)
    if known is not None and known.alive and known.incarnation == event.incarnation:
        return run, ()
    if (
        known is not None
        and known.incarnation == event.incarnation
        and _may_be_busy(run, event.host)
    ):
        return _welcome_back(run, known)
    actions: tuple[Action, ...] = ()
    expected = known is not None and known.back and run.stage is Stage.STOPPING
    if known is not None and (known.alive or expected):
        lost = AgentLost(
            at=event.at, host=event.host, why="another agent took its place", silent_s=0.0
        )
        run, actions = agent_lost(run, lost)
        itself = {a for a in actions if isinstance(a, ReplaceAgent) and a.host == event.host}
        actions = tuple(a for a in actions if a not in itself)
    host = HostState(
        name=event.host,
        address=event.address,
        devices=event.devices,
        pid=event.pid,
        incarnation=event.incarnation,
        unfit=why_unfit(event.findings) or "",
        checked=known is not None and known.checked,
    )
    run = replace(run, hosts={**run.hosts, event.host: host})
    if host.unfit:
        run = left_out(run, event.at, host.name, host.unfit)
    if run.stage is Stage.WAITING:
        run, more = start_if_ready(run, event.at)
        actions += more
    return run, actions


def _may_be_busy(run: Run, host: str) -> bool:
    """Whether ranks of an attempt that has been told to stop may still run there."""
    return run.stage in (Stage.STOPPING, Stage.WAITING) and host in run.placement


def _welcome_back(run: Run, known: HostState) -> Result:
    """An agent that was given up too early counts again once it says that no rank is left."""
    reason = f"the agent of {known.name} is back: what it still runs has to end first"
    hosts = {**run.hosts, known.name: replace(known, back=True)}
    done = {host: finished for host, finished in run.done.items() if host != known.name}
    stop = StopAttempt(attempt=run.attempt, grace_s=FAILED_GRACE_S, reason=reason)
    return replace(run, hosts=hosts, done=done), (stop,)


def agent_lost(run: Run, event: AgentLost) -> Result:
    known = run.hosts.get(event.host)
    if known is None or not (known.alive or known.back):
        return run, ()
    if run.stage in OUTSIDE:
        return run, ()
    gone = replace(known, alive=False, back=False, lost_at=event.at)
    run = replace(run, hosts={**run.hosts, event.host: gone})
    if run.leaving is not None:
        return _lost_while_leaving(run, event)
    if known.going and (event.host not in run.placement or event.host in run.done):
        return run, ()
    again = ReplaceAgent(host=event.host, reason=f"the agent of {event.host} is gone: {event.why}")
    if run.stage in (Stage.WAITING, Stage.CHECKING):
        return (run, ()) if known.going or event.taken else _lost_while_waiting(run, event, again)
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


def _lost_while_leaving(run: Run, event: AgentLost) -> Result:
    """Agents go when their hosts are given back; nobody is to blame."""
    if event.host not in run.placement or event.host in run.done:
        return run, ()
    run = replace(run, done={**run.done, event.host: False})
    return stop_or_conclude(run, event.at, f"the agent of {event.host} has left")


def unavailable(run: Run, event: HostUnavailable) -> Result:
    """No agent can be had there: do not wait for one."""
    known = run.hosts.get(event.host)
    if known is None or known.alive or run.stage in OUTSIDE:
        return run, ()
    run = replace(run, hosts={**run.hosts, event.host: replace(known, unfit=event.why)})
    return start_if_ready(run, event.at) if run.stage is Stage.WAITING else (run, ())


def _lost_while_waiting(run: Run, event: AgentLost, again: ReplaceAgent) -> Result:
    """Agents that die before an attempt begins spend the budget too, or it would never end."""
    assert run.job is not None
    if run.fruitless >= run.job.max_restarts:
        return end(run, event.at, "FAILED", f"{again.reason}; agents keep dying before a start")
    return replace(run, fruitless=run.fruitless + 1), (again,)
