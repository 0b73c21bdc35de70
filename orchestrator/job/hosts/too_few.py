"""Too few hosts for the plan: wait, ask for others, shrink, or give the allocation back."""

from msgspec.structs import replace

from orchestrator.contract.messages.actions import Replan
from orchestrator.host_strikes import HOOK
from orchestrator.job.hosts.host_pool import successor_may_come, who_came
from orchestrator.job.hosts.host_replacement import in_the_way, make_room, send_away
from orchestrator.job.leave import Result, end, requeue
from orchestrator.job.state import (
    Run,
    coming,
    has_successors,
    hosts_given,
    is_overdue,
    switches_of,
)
from orchestrator.plan.placement.place import room_for


def too_few(run: Run, at: float, there: list[str]) -> Result:
    """What follows while only the hosts in `there` can be used.

    A result without actions and without exclusions, where there were some, means: look again, as
    excluded hosts may be used now.
    """
    assert run.job is not None
    need = len(run.plan.hosts)
    overdue = is_overdue(run, at)
    # The planner was asked about fewer hosts and has not answered.
    if run.plans.replanning is not None:
        if not overdue:
            return run, ()
        plans = replace(run.plans, replanning=None, refused=run.plans.replanning)
        run = replace(run, plans=plans)  # the planner did not answer in time
    # Hosts that are still expected would suffice.
    if not overdue and room_for(run.plan, (*there, *coming(run, at)), switches_of(run)) >= need:
        return run, ()
    if why := _hook_fails_everywhere(run, there):
        return end(run, at, "FAILED", why)
    reason = f"{_left(run, there)}, and no spare"
    # Each host can be replaced alone, so the job keeps the others and need not queue again.
    if has_successors(run):
        away = in_the_way(run, at)
        if leaders := [host for host in away if host.name == run.scheduler.leader]:
            return requeue(send_away(run, leaders, at), at, reason, whole=False)
        run, orders = make_room(run, away, at, reason)
        if orders or successor_may_come(run, at):
            return run, orders
    # Fewer hosts now are better than all hosts later, if the spec allows it. The planner says
    # whether a mesh for them exists.
    if _may_shrink(run, len(there)):
        return replace(run, plans=replace(run.plans, replanning=len(there))), (
            Replan(hosts=len(there), reason=reason),
        )
    # An allocation has a fixed number of hosts. Only a new one can have enough.
    if run.scheduler.allocation is not None:
        absent, many = _absent(run) if overdue and not has_successors(run) else ({}, "")
        run = replace(run, hosts=replace(run.hosts, exclude={**run.hosts.exclude, **absent}))
        return requeue(_given_back(run), at, f"{reason}{_why_no_shrink(run)}{many}")
    return _without_scheduler(run, at, there, overdue=overdue)


def _hook_fails_everywhere(run: Run, there: list[str]) -> str:
    """Why the job ends, if the spec's hook failed on two or more hosts and no other host is left:
    other hosts would fail alike. Otherwise empty."""
    if there:
        return ""
    failed = {
        incident.culprit.host: incident.evidence.notes[0]
        for incident in run.history.incidents[run.history.forgiven :]
        if incident.failure == HOOK and incident.culprit.host is not None
    }
    others = {*run.hosts.by_name} - {*failed}
    if len(failed) < 2 or others:
        return ""
    host, why = list(failed.items())[-1]
    return (
        f"cluster.slurm.hooks.before failed on all {len(failed)} hosts on which it ran, so it, or"
        f" what it needs, is at fault and no host; on {host}: {why}"
    )


def _given_back(run: Run) -> Run:
    """One more return of all hosts for want of some, in a row."""
    since = run.scheduler.short_since if run.scheduler.given_back else run.stage.since
    given_back = run.scheduler.given_back + 1
    return replace(run, scheduler=replace(run.scheduler, given_back=given_back, short_since=since))


def _without_scheduler(run: Run, at: float, there: list[str], *, overdue: bool) -> Result:
    """No scheduler can give other hosts, so a suspected host is better than none."""
    if run.hosts.exclude:
        return replace(run, hosts=replace(run.hosts, exclude={}, shut=())), ()
    if overdue:
        return end(run, at, "FAILED", who_came(run, there))
    unfit = {host.name: host.unfit for host in run.hosts.by_name.values() if host.unfit}
    # All hosts have come, and a host that failed its check does not check itself again.
    if unfit and {*hosts_given(run)} <= {*there, *unfit}:
        whys = "; ".join(f"{name}: {why}" for name, why in sorted(unfit.items()))
        return end(run, at, "FAILED", f"{_left(run, there)}; {whys}")
    return run, ()


def _left(run: Run, there: list[str]) -> str:
    need = len(run.plan.hosts)
    room = room_for(run.plan, there, switches_of(run))
    whole = "" if room == len(there) else f", in NVLink blocks with room for {room}"
    return f"{len(there)} of {need} hosts are left{whole}"


def _absent(run: Run) -> tuple[dict[str, str], str]:
    """Hosts from which no agent ever came -> why they are excluded from the next allocation.

    If most hosts are absent, the cause is something they share, such as a file server or the
    leader's own network. Then no host is excluded, and the second value says so.
    """
    assert run.job is not None
    given, within = hosts_given(run), f"within {run.job.init_timeout:.0f} s"
    absent = [name for name in given if name not in run.hosts.by_name]
    if 2 * len(absent) > len(given):
        few = f"{len(absent)} of {len(given)} never had an agent {within}"
        return {}, f"; {few}: too many to exclude their hosts"
    return dict.fromkeys(absent, f"no agent came from it {within}"), ""


def _may_shrink(run: Run, there: int) -> bool:
    assert run.job is not None
    tried = run.plans.refused is not None and there >= run.plans.refused
    return run.job.shrink and there >= run.job.min_hosts and not tried


def _why_no_shrink(run: Run) -> str:
    assert run.job is not None
    if not run.job.shrink:
        return "; resilience.shrink does not allow fewer hosts"
    if run.plans.refused is not None:
        return f"; there is no plan for {run.plans.refused} hosts or fewer"
    return f"; resilience.min_hosts is {run.job.min_hosts}"
