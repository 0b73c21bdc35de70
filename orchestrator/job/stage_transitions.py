"""The moves of a job: from one stage to the next, with the orders that belong to each."""

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.contract.messages.actions import (
    Action,
    CheckHosts,
    Ending,
    EndJob,
    JudgeHang,
    ReplaceAgent,
    Replan,
    Requeue,
    StartAttempt,
    StopAttempt,
)
from orchestrator.host_strikes import HOOK
from orchestrator.job.failures import no_progress, oom_replan, rollback
from orchestrator.job.failures.cancellation import told
from orchestrator.job.failures.collective_mismatch import ask_who_differed, asks_who_differed
from orchestrator.job.failures.exit_classification import Verdict
from orchestrator.job.failures.incident_records import decided, first_cause, incident_of, left_out
from orchestrator.job.findings import Findings
from orchestrator.job.host_state import Replaced
from orchestrator.job.hosts import agents_not_started
from orchestrator.job.hosts.host_pool import (
    coming,
    has_successors,
    hosts_given,
    successor_may_come,
    switches_of,
    usable,
    who_came,
)
from orchestrator.job.hosts.host_replacement import in_the_way, make_room, send_away
from orchestrator.job.hosts.preemption import STOP_SLACK_S, taken_by_scheduler
from orchestrator.job.hosts.scale_up import grown
from orchestrator.job.interruption import Leaving
from orchestrator.job.policy import Decision, decide
from orchestrator.job.progress import Attempt
from orchestrator.job.stage import (
    Checking,
    Diagnosing,
    Ended,
    Holding,
    Queued,
    Starting,
    Stopping,
    Waiting,
)
from orchestrator.job.state import Run, is_overdue, with_deadline, with_findings, with_leaving
from orchestrator.plan.placement.cost import cost_of
from orchestrator.plan.placement.place import place, room_for

FAILED_GRACE_S = 3.0
"""SIGTERM to SIGKILL when a peer is already dead: no checkpoint can come of it any more."""

JUDGE_S = 30.0
"""For the leader to say what the evidence of a hang amounts to, from when the ranks are stopped."""
CHECK_S = 60.0
"""For the check of all hosts together, imports on a cold file system included."""

Result = tuple[Run, tuple[Action, ...]]


def wait(run: Run, at: float, reason: str) -> Run:
    assert run.job is not None
    return replace(
        run,
        stage=Waiting(since=at, reason=reason, deadline=at + run.job.init_timeout),
        attempt=replace(run.attempt, done={}, drills=()),
    )


def start_if_ready(run: Run, at: float) -> Result:
    """Start the next attempt once enough hosts are there; at first, a while later than that.

    The first hosts to come are not the best ones to take.
    """
    job = run.job
    assert job is not None
    if run.plans.shortage is not None:
        return _answer_overdue(run, at)
    if why := agents_not_started.everywhere(run):
        return end(run, at, "FAILED", why)
    run, there = grown(agents_not_started.told(run, at)), usable(run)
    if run.interruption.leaving is not None:
        return run, ()  # why the scheduler wants the hosts back is still to be told
    if run.interruption.findings is not None:
        return run, ()  # hosts are going, and how many is known in a moment
    if room_for(run.plan, there, switches_of(run)) < len(run.plan.hosts):
        return too_few(run, at, there)
    if at < run.hosts.settle_until and coming(run, at):
        return run, ()
    if job.preflight and not all(run.hosts.by_name[name].checked for name in there):
        return check(run, at, there)
    return _start(run, at, there)


def _start(run: Run, at: float, there: list[str]) -> Result:
    assert run.job is not None
    plan, switches = run.plan, switches_of(run)
    # Of a scheduler the plan's names only count hosts: that one of them is real means nothing.
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
    reason = f"attempt {attempt} on {len(placement)} hosts from {origin}"
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
        reason=reason,
        crossing=crossing,
    )
    return after, (start,)


def _answer_overdue(run: Run, at: float) -> Result:
    """The planner is asked for a plan that takes less memory: nothing starts before it answers."""
    if not is_overdue(run, at):
        return run, ()
    why = f"the planner did not answer within {oom_replan.ANSWER_S:.0f} s"
    run, words = oom_replan.with_ways_out(run, why)
    return end(run, at, "FAILED", words)


def too_few(run: Run, at: float, there: list[str]) -> Result:
    """Wait for those that may still come; else shrink, or queue for others, or wait to the end."""
    assert run.job is not None
    need = len(run.plan.hosts)
    overdue = is_overdue(run, at)
    if run.plans.replanning is not None:
        if not overdue:
            return run, ()
        run = replace(
            run, plans=replace(run.plans, replanning=None, refused=run.plans.replanning)
        )  # nobody answered
    if not overdue and room_for(run.plan, (*there, *coming(run, at)), switches_of(run)) >= need:
        return run, ()
    if why := _hook_fails_everywhere(run, there):
        return end(run, at, "FAILED", why)
    reason = f"{_left(run, there)}, and no spare"
    if has_successors(run):
        away = in_the_way(run, at)
        if leaders := [host for host in away if host.name == run.scheduler.leader]:
            return requeue(send_away(run, leaders, at), at, reason, whole=False)
        run, orders = make_room(run, away, at, reason)
        if orders or successor_may_come(run, at):
            return run, orders
    if _may_shrink(run, len(there)):
        return replace(run, plans=replace(run.plans, replanning=len(there))), (
            Replan(hosts=len(there), reason=reason),
        )
    if run.scheduler.allocation is not None:
        absent, many = _absent(run) if overdue and not has_successors(run) else ({}, "")
        run = replace(run, hosts=replace(run.hosts, exclude={**run.hosts.exclude, **absent}))
        return requeue(_short(run), at, f"{reason}{_refusal(run)}{many}")
    return _to_the_end(run, at, there, overdue=overdue)


def _hook_fails_everywhere(run: Run, there: list[str]) -> str:
    """In words, where the spec's line of shell failed on two hosts or more, and none is left: other
    hosts would do no better."""
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


def _short(run: Run) -> Run:
    since = run.scheduler.short_since if run.scheduler.given_back else run.stage.since
    return replace(
        run,
        scheduler=replace(
            run.scheduler, given_back=run.scheduler.given_back + 1, short_since=since
        ),
    )


def _to_the_end(run: Run, at: float, there: list[str], *, overdue: bool) -> Result:
    """Without a scheduler; a host that is suspected is better than none."""
    if run.hosts.exclude:
        return start_if_ready(replace(run, hosts=replace(run.hosts, exclude={}, shut=())), at)
    if overdue:
        return end(run, at, "FAILED", who_came(run, there))
    unfit = {host.name: host.unfit for host in run.hosts.by_name.values() if host.unfit}
    if unfit and {*hosts_given(run)} <= {*there, *unfit}:  # they do not look at themselves again
        whys = "; ".join(f"{name}: {why}" for name, why in sorted(unfit.items()))
        return end(run, at, "FAILED", f"{_left(run, there)}; {whys}")
    return run, ()


def _left(run: Run, there: list[str]) -> str:
    need = len(run.plan.hosts)
    room = room_for(run.plan, there, switches_of(run))
    whole = "" if room == len(there) else f", in NVLink blocks with room for {room}"
    return f"{len(there)} of {need} hosts are left{whole}"


def _absent(run: Run) -> tuple[dict[str, str], str]:
    """Hosts that were given, and no agent ever came from them: another run is as vain on them.

    Of most of all that is said of something else, as a file server or the leader's own network;
    then none is named, but that is told.
    """
    assert run.job is not None
    given, within = hosts_given(run), f"within {run.job.init_timeout:.0f} s"
    absent = [name for name in given if name not in run.hosts.by_name]
    if 2 * len(absent) > len(given):
        few = f"{len(absent)} of {len(given)} never had an agent {within}"
        return {}, f"; {few}: too many to blame their hosts"
    return dict.fromkeys(absent, f"no agent came from it {within}"), ""


def _may_shrink(run: Run, there: int) -> bool:
    assert run.job is not None
    tried = run.plans.refused is not None and there >= run.plans.refused
    return run.job.shrink and there >= run.job.min_hosts and not tried


def _refusal(run: Run) -> str:
    assert run.job is not None
    if not run.job.shrink:
        return "; resilience.shrink does not allow to go on with fewer"
    if run.plans.refused is not None:
        return f"; there is no plan for {run.plans.refused} hosts or fewer"
    return f"; resilience.min_hosts is {run.job.min_hosts}"


def requeue(run: Run, at: float, reason: str, *, whole: bool = True) -> Result:
    """Give the allocation back and queue for another one, without the hosts that are no good.

    Agents that went while the job was leaving were ended with it, and say nothing against a host;
    nor do those that went where a scheduler moves them about.
    """
    if not has_successors(run) and (why := no_progress.last_one(run, reason)):
        return end(run, at, "FAILED", why)
    silence_tells = run.interruption.leaving is None and not has_successors(run)
    bad = {
        host.name: host.unfit or "its agent was gone when the job was queued again"
        for host in run.hosts.by_name.values()
        if host.unfit or (silence_tells and not (host.alive or host.back))
    }
    # Of other hosts than these a scheduler knows itself whether they are fit.
    carried = () if has_successors(run) else run.hosts.carried
    known = {host: why for host, why in run.hosts.exclude.items() if host not in carried}
    exclude = {**bad, **known}
    # Hosts that are shut no pod comes to; and it may once they are not.
    opens = run.hosts.shut if has_successors(run) else ()
    names = tuple(sorted({*exclude} - ({*opens} - {*bad})))
    again = () if has_successors(run) else tuple(sorted({*run.scheduler.left_out} - {*exclude}))
    after = replace(
        run,
        stage=Queued(since=at, reason=reason),
        interruption=replace(run.interruption, findings=None, leaving=None),
        hosts=replace(run.hosts, exclude=exclude),
        scheduler=replace(run.scheduler, left_out=names),
        plans=replace(run.plans, replanning=None),
    )
    return after, (Requeue(exclude=names, reason=reason, whole=whole, again=again),)


# Hosts are tried together


def check(run: Run, at: float, there: list[str]) -> Result:
    number = run.hosts.checks + 1
    reason = f"trying {len(there)} hosts together before ranks start on them"
    hosts, deadline = tuple(there), at + CHECK_S + STOP_SLACK_S
    after = replace(
        run,
        stage=Checking(since=at, reason=reason, deadline=deadline, hosts=hosts),
        hosts=replace(run.hosts, checks=number),
    )
    return after, (CheckHosts(check=number, hosts=hosts, timeout_s=CHECK_S, reason=reason),)


def checked(run: Run, at: float, unfit: Mapping[str, str]) -> Result:
    """Leave out the hosts that were found wanting; each is an incident of its own.

    One whose agent went meanwhile is none of them: that it did not report says nothing of the host,
    though another agent may be there by now.
    """
    assert isinstance(run.stage, Checking)
    hosts, checking = dict(run.hosts.by_name), run.stage.hosts
    for name in checking:
        hosts[name] = replace(hosts[name], checked=True, unfit=unfit.get(name, ""))
    for name, why in sorted(unfit.items()):
        if name in checking:
            run = left_out(run, at, name, why)
    run = wait(run, at, "the hosts were tried")
    return start_if_ready(replace(run, hosts=replace(run.hosts, by_name=hosts)), at)


# An attempt ends


def stop(run: Run, at: float, reason: str, grace_s: float) -> Result:
    deadline = at + grace_s + STOP_SLACK_S
    after = replace(run, stage=Stopping(since=at, reason=reason, deadline=deadline))
    order = StopAttempt(attempt=run.attempt.number, grace_s=grace_s, reason=reason)
    if not isinstance(run.stage, Diagnosing) or run.interruption.findings is None:
        return after, (order,)
    findings = replace(run.interruption.findings, judge_by=at + JUDGE_S)
    return with_findings(after, findings), (
        order,
        JudgeHang(attempt=run.attempt.number, reason=reason),
    )


def stop_or_conclude(run: Run, at: float, reason: str) -> Result:
    if all_done(run):
        return conclude(run, at)
    if isinstance(run.stage, Stopping):
        return run, ()
    return stop(run, at, reason, FAILED_GRACE_S)


def all_done(run: Run) -> bool:
    # The lengths first: of thousands of hosts each asks, one after the other.
    return len(run.attempt.done) >= len(run.attempt.placement) and set(
        run.attempt.placement
    ) <= set(run.attempt.done)


def conclude(run: Run, at: float) -> Result:
    """No process of the attempt is left anywhere: say what it came to."""
    if all(run.attempt.done.values()):  # whatever was feared: a hang may have been a slow last step
        return end(run, at, "SUCCEEDED", f"all ranks finished in attempt {run.attempt.number}")
    if run.interruption.cancelled_by is not None:
        return end(told(run), at, "CANCELLED", f"cancelled by {run.interruption.cancelled_by}")
    if run.interruption.leaving is not None and run.interruption.leaving.cause is None:
        return run, ()  # why is still to be told: a cancelled job must not be queued again
    if run.interruption.findings is not None:
        if asks_who_differed(run.interruption.findings):
            return ask_who_differed(run, run.interruption.findings, at)
        judge_by = None if run.interruption.findings.judged else run.interruption.findings.judge_by
        if judge_by is not None and at < judge_by:
            return with_deadline(run, judge_by), ()  # the verdict is on its way
        return recover(run, run.interruption.findings, at)
    assert run.interruption.leaving is not None
    return _leave(run, run.interruption.leaving, at)


def _leave(run: Run, leaving: Leaving, at: float) -> Result:
    """The ranks wrote a checkpoint and left; go on elsewhere."""
    if leaving.requeue:
        return requeue(run, at, leaving.words, whole=not has_successors(run))
    return start_if_ready(with_leaving(wait(run, at, leaving.words), None), at)


def recover(run: Run, findings: Findings, at: float, verdict: Verdict | None = None) -> Result:
    """Record the incident, of `verdict` where there is one; start again or give up."""
    verdict = verdict or first_cause(run, findings)
    if taken := taken_by_scheduler(findings, verdict):
        run = with_findings(run, None)
        return _leave(
            run,
            run.interruption.leaving or Leaving(cause="drained", words=taken, requeue=False),
            at,
        )
    decision = decide(run, verdict)
    if decision.action == "replan" and not oom_replan.is_of_the_plan(run, verdict):
        decision = replace(decision, action="stop", reason=oom_replan.no_help(verdict))
    if decision.action == "rollback":
        run, decision = rollback.perform(run, findings.exits, decision)
    incident = decided(run, incident_of(run, findings, verdict, decision.reason), decision)
    if decision.without is not None:
        why = f"{verdict.cause} (rule {decision.rule})"
        run = without(run, decision.without, why, at)
    run = replace(
        run,
        history=replace(run.history, incidents=(*run.history.incidents, incident)),
        interruption=replace(run.interruption, findings=None),
    )
    if decision.action == "stop":
        return _give_up(run, at, verdict, decision)
    spent = replace(
        run.history,
        restarts=run.history.restarts + 1,
        fruitless=run.history.fruitless + decision.counts,
    )
    run = replace(wait(run, at, decision.words), history=spent)
    if decision.action == "replan":
        short = oom_replan.shortage_of(run, verdict, decision.words, adopt=True)
        run, orders = oom_replan.look(run, at, short)
        if run.interruption.leaving is None or not run.interruption.leaving.requeue:
            return with_leaving(run, None), orders
    if run.interruption.leaving is not None:
        return _leave(run, run.interruption.leaving, at)
    if decision.action == "requeue":
        return requeue(run, at, decision.words, whole=not has_successors(run))
    ordered = {lost.host for lost in findings.lost}
    missing = tuple(
        ReplaceAgent(host=host.name, reason=decision.words)
        for host in run.hosts.by_name.values()
        if not (host.alive or host.unfit or host.name in ordered or host.name in run.hosts.exclude)
    )
    run, actions = hold(run, at, decision) if decision.wait_s else start_if_ready(run, at)
    return run, (*missing, *actions)


def without(run: Run, host: str, why: str, at: float) -> Run:
    """The host is used no more in this job, whoever leads it."""
    run = leave_out(run, {host: why})
    replaced = {**run.hosts.replaced, host: Replaced(at=at, why=why)}
    return replace(run, hosts=replace(run.hosts, replaced=replaced))


def leave_out(run: Run, bad: Mapping[str, str]) -> Run:
    """For what they did: whether the scheduler opens them again does not matter any more."""
    why = {
        host: words
        for host, words in bad.items()
        if host not in {*run.hosts.exclude} - {*run.hosts.shut}
    }
    shut = tuple(host for host in run.hosts.shut if host not in bad)
    return replace(run, hosts=replace(run.hosts, exclude={**run.hosts.exclude, **why}, shut=shut))


def _give_up(run: Run, at: float, verdict: Verdict, decision: Decision) -> Result:
    """End the job; where memory was short, the planner is asked first what would help."""
    if run.interruption.leaving is not None or not oom_replan.is_of_the_plan(run, verdict):
        return end(run, at, "FAILED", decision.words)
    short = oom_replan.shortage_of(run, verdict, decision.words, adopt=False)
    return oom_replan.look(wait(run, at, decision.words), at, short)


def hold(run: Run, at: float, decision: Decision) -> Result:
    """Give what broke time to heal; agents that are missing come meanwhile."""
    reason = (
        f"waits {decision.wait_s:.0f} s before attempt {run.attempt.number + 1},"
        f" rule {decision.rule}: {decision.reason}"
    )
    until = at + decision.wait_s
    return replace(run, stage=Holding(since=at, reason=reason, deadline=until)), ()


def end(run: Run, at: float, ending: Ending, reason: str) -> Result:
    stage = Ended(since=at, reason=reason, ending=ending)
    return with_findings(replace(run, stage=stage), None), (EndJob(state=ending, reason=reason),)
