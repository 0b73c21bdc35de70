"""Agents register, are lost, and come back: what follows from each."""

from msgspec.structs import replace

from orchestrator.contract.check_results import why_unfit
from orchestrator.contract.messages.actions import Action, ReplaceAgent, StopAttempt
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    HostStopped,
    HostUnavailable,
)
from orchestrator.diagnosis.cause.diagnose import TOGETHER_S
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.job.attempt_end import (
    FAILED_GRACE_S,
    asked_again,
    counts_again,
    stop_or_conclude,
)
from orchestrator.job.failures.incident_records import left_out
from orchestrator.job.host_state import HostState, lost_host
from orchestrator.job.hosts import agents_not_started
from orchestrator.job.hosts.acquittal import acquitted, why_it_works
from orchestrator.job.leave import Result
from orchestrator.job.stage import IDLE, Checking, Holding, Stopping, Waiting
from orchestrator.job.start import start_if_ready
from orchestrator.job.state import (
    Run,
    hosts_given,
    is_overdue,
    with_ended,
    with_findings,
    with_host,
    with_leaving,
)


def agent_registered(run: Run, event: AgentRegistered) -> Result:
    known = run.hosts.by_name.get(event.host)
    if known is not None and known.incarnation == event.incarnation:
        # The agent repeats its registration after a reconnection.
        if known.alive:
            return run, ()
        run = _without_outage(run, event.host)
    if (known is None or not known.alive) and (attempt := _attempt_left(run, known, event)):
        return _with_old_ranks(run, known, event, attempt)
    actions: tuple[Action, ...] = ()
    # A new process cannot have the old ranks: the kernel ends them with their agent.
    expected = known is not None and known.back and isinstance(run.stage, Stopping)
    if known is not None and (known.alive or expected):
        # Another agent process of the host registers, so the one before is gone.
        lost = AgentLost(
            at=event.at,
            host=event.host,
            why="another agent took its place",
            silent_s=0.0,
            taken=event.taken,
            closed=True,
        )
        run, actions = agent_lost(run, lost)
        # The loss asks for a new agent on this host, but that agent is the one that registers now.
        itself = {a for a in actions if isinstance(a, ReplaceAgent) and a.host == event.host}
        actions = tuple(a for a in actions if a not in itself)
    host = _host(event, run.hosts.by_name.get(event.host))
    run = with_host(run, host)
    if host.works:
        run = acquitted(run, host)
    if host.unfit:
        run = left_out(run, event.at, host.name, host.unfit)
    if isinstance(run.stage, Waiting) and (host.unfit or not _more_must_come(run, event.at)):
        run, more = start_if_ready(run, event.at)
        actions += more
    return run, actions


def _more_must_come(run: Run, at: float) -> bool:
    """So few agents have registered that nothing can start yet, and enough may still come. A host
    that is fit changes nothing then. Thousands register one after the other, and a decision looks
    at all of them."""
    need = len(run.plan.hosts)
    may_come = len(hosts_given(run)) - len(run.hosts.exclude)
    return len(run.hosts.by_name) < need <= may_come and not is_overdue(run, at)


def _host(event: AgentRegistered, known: HostState | None = None) -> HostState:
    """The host with its new agent. `known`: what the job knew of it until now."""
    return HostState(
        name=event.host,
        address=event.address,
        devices=event.devices,
        pid=event.pid,
        incarnation=event.incarnation,
        unfit=why_unfit(event.findings) or "",
        checked=known is not None and known.checked,
        boot=event.boot,
        lost_at=known.lost_at if known is not None else 0.0,
        works=why_it_works(known, event) if known is not None else "",
    )


def _attempt_left(run: Run, known: HostState | None, event: AgentRegistered) -> int:
    """The attempt of which the agent may still have ranks; 0 if it has none."""
    if event.running:
        return event.running
    same = known is not None and known.incarnation == event.incarnation
    stopping = isinstance(run.stage, Stopping | Waiting | Holding)
    told_to_stop = stopping and event.host in run.attempt.placement
    return run.attempt.number if same and told_to_stop else 0


def _with_old_ranks(
    run: Run, known: HostState | None, event: AgentRegistered, attempt: int
) -> Result:
    """An agent with ranks of `attempt` came back: stop these ranks first. The agent counts as alive
    when it reports that no rank is left.

    That attempt may be over, and the next one may run on other hosts. After a change of leader, an
    agent comes back with the ranks of the former leader's attempt.
    """
    name = event.host
    reason = f"the agent of {name} is back: stop its old ranks first"
    same = known is not None and known.incarnation == event.incarnation
    host = known if known is not None and same else _host(event)
    run = with_host(run, replace(host, alive=False, back=True, runs=attempt))
    if host.unfit and not same:
        run = left_out(run, event.at, name, host.unfit)
    if attempt == run.attempt.number:
        done = {host: finished for host, finished in run.attempt.done.items() if host != name}
        run = replace(run, attempt=replace(run.attempt, done=done))
    stop = StopAttempt(attempt=attempt, grace_s=FAILED_GRACE_S, reason=reason, hosts=(name,))
    return run, (stop,)


def old_ranks_gone(run: Run, event: HostStopped) -> Result:
    """No attempt is under way, and the host's last old ranks are gone: it can be used."""
    after = counts_again(run, event)
    if after is run or not isinstance(run.stage, Waiting):
        return after, ()
    return start_if_ready(after, event.at)


def agent_lost(run: Run, event: AgentLost) -> Result:
    known = run.hosts.by_name.get(event.host)
    if known is None or not (known.alive or known.back):
        return run, ()
    run = with_host(run, lost_host(known, event.at, closed=event.closed))
    # The check goes on with the other hosts. What this one would have said is not known.
    if isinstance(run.stage, Checking):
        checking = tuple(name for name in run.stage.hosts if name != event.host)
        run = replace(run, stage=replace(run.stage, hosts=checking))
    has_ranks = event.host in run.attempt.placement and event.host not in run.attempt.done
    leaving = run.interruption.leaving
    # The scheduler says that the host has failed, and its ranks had no time to save a checkpoint.
    is_down = leaving is not None and has_ranks and event.host == leaving.down
    if leaving is not None:
        # Hosts that the scheduler wants back lose their agents; that is expected.
        if known.going or event.taken or not (leaving.by_choice or is_down):
            return _lost_while_leaving(run, event, known)
        if has_ranks:
            # The job stops by its own choice, or the host has failed: this loss is a failure and
            # has an incident.
            run = with_leaving(run, None)
    # The scheduler announced that it takes the host, and no rank is left on it.
    if known.going and not has_ranks:
        return run, ()
    again = ReplaceAgent(host=event.host, reason=f"the agent of {event.host} is gone: {event.why}")
    if isinstance(run.stage, IDLE):
        expected = known.going or known.sent_away or event.taken
        return (run, ()) if expected else _lost_while_idle(run, event, again)
    if not has_ranks:
        return run, (again,)
    found = run.interruption.findings or Findings(opened_at=event.at)
    run = replace(
        run,
        interruption=replace(run.interruption, findings=replace(found, lost=(*found.lost, event))),
        attempt=replace(run.attempt, done=with_ended(run.attempt.done, event.host, finished=False)),
    )
    run, actions = stop_or_conclude(run, event.at, again.reason)
    # `stop_or_conclude` may have asked for this agent already. Two orders would start two agents.
    # On a host that is down none can start.
    asked = any(isinstance(a, ReplaceAgent) and a.host == event.host for a in actions)
    return run, actions if asked or is_down or run.ending is not None else (*actions, again)


def _lost_while_leaving(run: Run, event: AgentLost, known: HostState) -> Result:
    """The scheduler takes hosts back, and their agents with them: that has no culprit."""
    why = f"the agent of {event.host} has left"
    expected = known.going or event.taken
    again = () if expected else asked_again(run, [event.host], f"{why}: {event.why}")
    if event.host not in run.attempt.placement or event.host in run.attempt.done:
        return run, again
    found = run.interruption.findings
    if found is not None and not event.taken:
        run = with_findings(run, replace(found, left=(*found.left, event)))
    run = replace(
        run,
        attempt=replace(run.attempt, done=with_ended(run.attempt.done, event.host, finished=False)),
    )
    run, actions = stop_or_conclude(run, event.at, why)
    return run, (*again, *actions)


def host_unavailable(run: Run, event: HostUnavailable) -> Result:
    """No agent can be started on the host, so do not wait for one."""
    known = run.hosts.by_name.get(event.host)
    if known is not None and known.alive:
        return run, ()
    # An agent never came from this host, so there is nothing to exclude yet. It is noted, because
    # where no agent can start on any host, the cause is not a host.
    if known is None:
        run = agents_not_started.noted(run, event)
        if not isinstance(run.stage, Waiting):
            # Agents of enough other hosts have come, so the host alone is concerned.
            run = agents_not_started.with_incidents(run, event.at)
        return run, ()
    run = with_host(run, replace(known, unfit=event.why))
    return start_if_ready(run, event.at) if isinstance(run.stage, Waiting) else (run, ())


# An outage: agents are lost while no rank runs


def _lost_while_idle(run: Run, event: AgentLost, again: ReplaceAgent) -> Result:
    """There is nothing to stop. The verdict waits until all agents that go together are gone."""
    found = run.interruption.findings or Findings(opened_at=event.at, idle=True)
    known = any(lost.host == event.host for lost in found.lost)
    found = replace(
        found,
        lost=found.lost if known else (*found.lost, event),
        returned=tuple(host for host in found.returned if host != event.host),
    )
    return with_findings(run, found), (again,)


def _without_outage(run: Run, host: str) -> Run:
    """The same agent is heard again. When all lost agents are, there was no outage."""
    found = run.interruption.findings
    if found is None or not isinstance(run.stage, IDLE):
        return run
    found = replace(found, returned=(*found.returned, host))
    over = {lost.host for lost in found.lost} <= {*found.returned}
    return with_findings(run, None if over else found)


def outage_is_over(run: Run, at: float) -> bool:
    """All agents that go together are gone by now."""
    found = run.interruption.findings
    if found is None or not isinstance(run.stage, Waiting):
        return False
    # An answer of the planner or the scheduler is expected, and comes first.
    expects = run.plans.shortage is not None or run.interruption.leaving is not None
    return not expects and at >= found.opened_at + TOGETHER_S
