"""Between two attempts: wait for hosts, check them, and start the next attempt."""

from collections.abc import Mapping

from msgspec.structs import replace

from orchestrator.contract.messages.actions import CheckHosts, StartAttempt
from orchestrator.job.failures import oom_replan
from orchestrator.job.failures.incident_records import left_out
from orchestrator.job.hosts import agents_not_started
from orchestrator.job.hosts.host_pool import preferred
from orchestrator.job.hosts.preemption import STOP_SLACK_S
from orchestrator.job.hosts.scale_up import grown
from orchestrator.job.hosts.too_few import too_few
from orchestrator.job.leave import Result, end
from orchestrator.job.progress import Attempt
from orchestrator.job.stage import Checking, Starting, Waiting
from orchestrator.job.state import (
    Run,
    coming,
    has_successors,
    is_overdue,
    switches_of,
    usable,
)
from orchestrator.plan.placement.cost import cost_of
from orchestrator.plan.placement.place import place, room_for

CHECK_S = 60.0
"""Limit for the check of all hosts together, including imports on a cold file system."""


def wait(run: Run, at: float, reason: str) -> Run:
    assert run.job is not None
    return replace(
        run,
        stage=Waiting(since=at, reason=reason, deadline=at + run.job.init_timeout),
        attempt=replace(run.attempt, done={}, killed=(), drills=()),
    )


def start_if_ready(run: Run, at: float) -> Result:
    """Start the next attempt once enough hosts are there.

    A new leader waits a little longer (`settle_until`), because the first hosts to register are not
    the best ones to choose.
    """
    if run.plans.shortage is not None:
        return _wait_for_planner(run, at)
    # A host without an incarnation never had an agent: the scheduler failed to start one there.
    if any(not host.incarnation for host in run.hosts.by_name.values()):
        if why := agents_not_started.everywhere(run):
            return end(run, at, "FAILED", why)
        run = agents_not_started.with_incidents(run, at)
    # A plan for more hosts was made while the job trained: this is the moment to use it.
    if run.plans.larger:
        run = grown(run)
    # The scheduler wants the hosts back, and has not said why yet; or hosts are being lost, and how
    # many is known in a moment.
    if run.interruption.leaving is not None or run.interruption.findings is not None:
        return run, ()
    return _start_on(run, at, usable(run))


def _start_on(run: Run, at: float, there: list[str]) -> Result:
    """Start on the usable hosts `there`, if they are enough."""
    assert run.job is not None
    if room_for(run.plan, there, switches_of(run)) < len(run.plan.hosts):
        after, actions = too_few(run, at, there)
        if run.hosts.exclude and not after.hosts.exclude and not actions:
            return start_if_ready(after, at)  # excluded hosts count as a last resort
        return after, actions
    # Enough hosts are there, but more are registering: with these the ranks of a group may share a
    # switch.
    if at < run.hosts.settle_until and coming(run, at):
        return run, ()
    # Each host is checked once, so a restart of ranks alone does not wait for the check.
    if run.job.preflight and not all(run.hosts.by_name[name].checked for name in there):
        return check(run, at, there)
    return _start(run, at, preferred(run, there) if run.hosts.warned else there)


def _start(run: Run, at: float, there: list[str]) -> Result:
    assert run.job is not None
    plan, switches = run.plan, switches_of(run)
    # With a scheduler the names in the plan are only placeholders, even if a host has that name.
    planned = plan.hosts if run.scheduler.allocation is None else ()
    placement = place(
        plan,
        there,
        run.attempt.placement or planned,
        switches=switches,
        traffic=plan.communication,
    )
    crossing: tuple[int, ...] = ()
    if plan.communication:
        cost = cost_of(plan.mesh, plan.ranks_per_host, placement, switches, plan.communication)
        crossing = cost.crossing
    attempt = run.attempt.number + 1
    origin = f"checkpoint step-{run.progress.saved}" if run.progress.saved else "the beginning"
    if run.copies_in_memory is not None:
        origin = f"the newest step in its hosts' memory, else {origin}"
    hosts = "1 host" if len(placement) == 1 else f"{len(placement)} hosts"
    reason = f"attempt {attempt} on {hosts}"
    # A user's program may resume from a checkpoint that ndctl does not know.
    if run.job.run is None or run.progress.saved:
        reason += f" from {origin}"
    # Where each host is replaced alone, an allocation never ends, so there is nothing to count.
    allocations = 0 if has_successors(run) else run.history.allocations
    after = replace(
        run,
        stage=Starting(since=at, reason=reason),
        attempt=Attempt(number=attempt, placement=placement, step=run.attempt.step),
        interruption=replace(run.interruption, findings=None, leaving=None),
        hosts=replace(run.hosts, away={}),
        scheduler=replace(run.scheduler, given_back=0),
        history=replace(run.history, allocations=allocations),
    )
    drills = tuple(drill for drill in run.job.drills if drill.id not in run.progress.drills)
    start = StartAttempt(
        attempt=attempt,
        hosts=placement,
        plan=run.current.number,
        drills=drills,
        skip=run.progress.skipped,
        lineage=run.progress.lineage if run.job.in_memory else 0,
        resumed=run.progress.resumed,
        reason=reason,
        crossing=crossing,
    )
    return after, (start,)


def _wait_for_planner(run: Run, at: float) -> Result:
    """The planner was asked for a plan that needs less memory: nothing starts before it answers."""
    if not is_overdue(run, at):
        return run, ()
    why = f"the planner did not answer within {oom_replan.ANSWER_S:.0f} s"
    run, words = oom_replan.with_ways_out(run, why)
    return end(run, at, "FAILED", words)


def check(run: Run, at: float, there: list[str]) -> Result:
    number = run.hosts.checks + 1
    reason = f"checking {len(there)} hosts together before ranks start on them"
    hosts, deadline = tuple(there), at + CHECK_S + STOP_SLACK_S
    after = replace(
        run,
        stage=Checking(since=at, reason=reason, deadline=deadline, hosts=hosts),
        hosts=replace(run.hosts, checks=number),
    )
    return after, (CheckHosts(check=number, hosts=hosts, timeout_s=CHECK_S, reason=reason),)


def checked(run: Run, at: float, unfit: Mapping[str, str]) -> Result:
    """Exclude the hosts that failed the check; each is an incident.

    A host whose agent was lost during the check is not among them: the missing result says nothing
    about the host, even if another agent has registered by now.
    """
    assert isinstance(run.stage, Checking)
    hosts, checking = dict(run.hosts.by_name), run.stage.hosts
    for name in checking:
        hosts[name] = replace(hosts[name], checked=True, unfit=unfit.get(name, ""))
    for name, why in sorted(unfit.items()):
        if name in checking:
            run = left_out(run, at, name, why)
    run = wait(run, at, "the hosts were checked")
    return start_if_ready(replace(run, hosts=replace(run.hosts, by_name=hosts)), at)
