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
from orchestrator.job.cancellation import told
from orchestrator.job.failures import no_progress, oom_replan, rollback
from orchestrator.job.failures.collective_mismatch import ask_who_differed, asks_who_differed
from orchestrator.job.failures.exit_classification import Verdict
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
from orchestrator.job.incident_records import decided, first_cause, incident_of, left_out
from orchestrator.job.policy import Decision, decide
from orchestrator.job.stage import Stage
from orchestrator.job.state import Leaving, Run
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
        stage=Stage.WAITING,
        since=at,
        deadline=at + run.job.init_timeout,
        reason=reason,
        done={},
        fired_now=(),
    )


def start_if_ready(run: Run, at: float) -> Result:
    """Start the next attempt once enough hosts are there; at first, a while later than that.

    The first hosts to come are not the best ones to take.
    """
    job = run.job
    assert job is not None
    if run.shortage is not None:
        return _answer_overdue(run, at)
    if why := agents_not_started.everywhere(run):
        return end(run, at, "FAILED", why)
    run, there = grown(agents_not_started.told(run, at)), usable(run)
    if run.leaving is not None:
        return run, ()  # why the scheduler wants the hosts back is still to be told
    if run.findings is not None:
        return run, ()  # hosts are going, and how many is known in a moment
    if room_for(run.plan, there, switches_of(run)) < len(run.plan.hosts):
        return too_few(run, at, there)
    if at < run.settle_until and coming(run, at):
        return run, ()
    if job.preflight and not all(run.hosts[name].checked for name in there):
        return check(run, at, there)
    return _start(run, at, there)


def _start(run: Run, at: float, there: list[str]) -> Result:
    assert run.job is not None
    plan, switches = run.plan, switches_of(run)
    # Of a scheduler the plan's names only count hosts: that one of them is real means nothing.
    planned = plan.hosts if run.allocation is None else ()
    placement = place(
        plan,
        there,
        run.placement or planned,
        switches=switches,
        traffic=plan.communication,
    )
    crossing: tuple[int, ...] = ()
    if plan.communication:
        cost = cost_of(plan.mesh, plan.ranks_per_host, placement, switches, plan.communication)
        crossing = cost.crossing
    attempt = run.attempt + 1
    origin = f"checkpoint step-{run.saved}" if run.saved else "the beginning"
    reason = f"attempt {attempt} on {len(placement)} hosts from {origin}"
    after = replace(
        run,
        stage=Stage.STARTING,
        since=at,
        deadline=None,
        reason=reason,
        attempt=attempt,
        placement=placement,
        done={},
        fired_now=(),
        stragglers={},
        findings=None,
        leaving=None,
        away={},
        given_back=0,
        allocations=0 if has_successors(run) else run.allocations,
    )
    drills = tuple(drill for drill in run.job.drills if drill.id not in run.fired)
    start = StartAttempt(
        attempt=attempt,
        hosts=placement,
        plan=run.current.number,
        drills=drills,
        skip=run.skipped,
        reason=reason,
        crossing=crossing,
    )
    return after, (start,)


def _answer_overdue(run: Run, at: float) -> Result:
    """The planner is asked for a plan that takes less memory: nothing starts before it answers."""
    if run.deadline is None or at < run.deadline:
        return run, ()
    why = f"the planner did not answer within {oom_replan.ANSWER_S:.0f} s"
    run, words = oom_replan.with_ways_out(run, why)
    return end(run, at, "FAILED", words)


def too_few(run: Run, at: float, there: list[str]) -> Result:
    """Wait for those that may still come; else shrink, or queue for others, or wait to the end."""
    assert run.job is not None
    need = len(run.plan.hosts)
    overdue = run.deadline is not None and at >= run.deadline
    if run.replanning is not None:
        if not overdue:
            return run, ()
        run = replace(run, replanning=None, refused=run.replanning)  # nobody answered
    if not overdue and room_for(run.plan, (*there, *coming(run, at)), switches_of(run)) >= need:
        return run, ()
    if why := _hook_fails_everywhere(run, there):
        return end(run, at, "FAILED", why)
    reason = f"{_left(run, there)}, and no spare"
    if has_successors(run):
        away = in_the_way(run, at)
        if leaders := [host for host in away if host.name == run.leader]:
            return requeue(send_away(run, leaders, at), at, reason, whole=False)
        run, orders = make_room(run, away, at, reason)
        if orders or successor_may_come(run, at):
            return run, orders
    if _may_shrink(run, len(there)):
        return replace(run, replanning=len(there)), (Replan(hosts=len(there), reason=reason),)
    if run.allocation is not None:
        absent, many = _absent(run) if overdue and not has_successors(run) else ({}, "")
        run = replace(run, exclude={**run.exclude, **absent})
        return requeue(_short(run), at, f"{reason}{_refusal(run)}{many}")
    return _to_the_end(run, at, there, overdue=overdue)


def _hook_fails_everywhere(run: Run, there: list[str]) -> str:
    """In words, where the spec's line of shell failed on two hosts or more, and none is left: other
    hosts would do no better."""
    if there:
        return ""
    failed = {
        incident.culprit.host: incident.evidence.notes[0]
        for incident in run.incidents[run.forgiven :]
        if incident.failure == HOOK and incident.culprit.host is not None
    }
    others = {*run.hosts} - {*failed}
    if len(failed) < 2 or others:
        return ""
    host, why = list(failed.items())[-1]
    return (
        f"cluster.slurm.hooks.before failed on all {len(failed)} hosts on which it ran, so it, or"
        f" what it needs, is at fault and no host; on {host}: {why}"
    )


def _short(run: Run) -> Run:
    since = run.short_since if run.given_back else run.since
    return replace(run, given_back=run.given_back + 1, short_since=since)


def _to_the_end(run: Run, at: float, there: list[str], *, overdue: bool) -> Result:
    """Without a scheduler; a host that is suspected is better than none."""
    if run.exclude:
        return start_if_ready(replace(run, exclude={}, shut=()), at)
    if overdue:
        return end(run, at, "FAILED", who_came(run, there))
    unfit = {host.name: host.unfit for host in run.hosts.values() if host.unfit}
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
    absent = [name for name in given if name not in run.hosts]
    if 2 * len(absent) > len(given):
        few = f"{len(absent)} of {len(given)} never had an agent {within}"
        return {}, f"; {few}: too many to blame their hosts"
    return dict.fromkeys(absent, f"no agent came from it {within}"), ""


def _may_shrink(run: Run, there: int) -> bool:
    assert run.job is not None
    tried = run.refused is not None and there >= run.refused
    return run.job.shrink and there >= run.job.min_hosts and not tried


def _refusal(run: Run) -> str:
    assert run.job is not None
    if not run.job.shrink:
        return "; resilience.shrink does not allow to go on with fewer"
    if run.refused is not None:
        return f"; there is no plan for {run.refused} hosts or fewer"
    return f"; resilience.min_hosts is {run.job.min_hosts}"


def requeue(run: Run, at: float, reason: str, *, whole: bool = True) -> Result:
    """Give the allocation back and queue for another one, without the hosts that are no good.

    Agents that went while the job was leaving were ended with it, and say nothing against a host;
    nor do those that went where a scheduler moves them about.
    """
    if not has_successors(run) and (why := no_progress.last_one(run, reason)):
        return end(run, at, "FAILED", why)
    silence_tells = run.leaving is None and not has_successors(run)
    bad = {
        host.name: host.unfit or "its agent was gone when the job was queued again"
        for host in run.hosts.values()
        if host.unfit or (silence_tells and not (host.alive or host.back))
    }
    # Of other hosts than these a scheduler knows itself whether they are fit.
    carried = () if has_successors(run) else run.carried
    known = {host: why for host, why in run.exclude.items() if host not in carried}
    exclude = {**bad, **known}
    # Hosts that are shut no pod comes to; and it may once they are not.
    opens = run.shut if has_successors(run) else ()
    names = tuple(sorted({*exclude} - ({*opens} - {*bad})))
    again = () if has_successors(run) else tuple(sorted({*run.left_out} - {*exclude}))
    after = replace(
        run,
        stage=Stage.QUEUED,
        left_out=names,
        since=at,
        deadline=None,
        reason=reason,
        leaving=None,
        replanning=None,
        findings=None,
        exclude=exclude,
    )
    return after, (Requeue(exclude=names, reason=reason, whole=whole, again=again),)


# Hosts are tried together


def check(run: Run, at: float, there: list[str]) -> Result:
    number = run.checks + 1
    reason = f"trying {len(there)} hosts together before ranks start on them"
    after = replace(
        run,
        stage=Stage.CHECKING,
        since=at,
        deadline=at + CHECK_S + STOP_SLACK_S,
        reason=reason,
        checks=number,
        checking=tuple(there),
    )
    return after, (CheckHosts(check=number, hosts=tuple(there), timeout_s=CHECK_S, reason=reason),)


def checked(run: Run, at: float, unfit: Mapping[str, str]) -> Result:
    """Leave out the hosts that were found wanting; each is an incident of its own.

    One whose agent went meanwhile is none of them: that it did not report says nothing of the host,
    though another agent may be there by now.
    """
    hosts = dict(run.hosts)
    for name in run.checking:
        hosts[name] = replace(hosts[name], checked=True, unfit=unfit.get(name, ""))
    for name, why in sorted(unfit.items()):
        if name in run.checking:
            run = left_out(run, at, name, why)
    run = replace(wait(run, at, "the hosts were tried"), hosts=hosts, checking=())
    return start_if_ready(run, at)


# An attempt ends


def stop(run: Run, at: float, reason: str, grace_s: float) -> Result:
    after = replace(
        run,
        stage=Stage.STOPPING,
        since=at,
        deadline=at + grace_s + STOP_SLACK_S,
        reason=reason,
    )
    order = StopAttempt(attempt=run.attempt, grace_s=grace_s, reason=reason)
    if run.stage is not Stage.DIAGNOSING or run.findings is None:
        return after, (order,)
    findings = replace(run.findings, judge_by=at + JUDGE_S)
    return replace(after, findings=findings), (order, JudgeHang(attempt=run.attempt, reason=reason))


def stop_or_conclude(run: Run, at: float, reason: str) -> Result:
    if all_done(run):
        return conclude(run, at)
    if run.stage is Stage.STOPPING:
        return run, ()
    return stop(run, at, reason, FAILED_GRACE_S)


def all_done(run: Run) -> bool:
    # The lengths first: of thousands of hosts each asks, one after the other.
    return len(run.done) >= len(run.placement) and set(run.placement) <= set(run.done)


def conclude(run: Run, at: float) -> Result:
    """No process of the attempt is left anywhere: say what it came to."""
    if all(run.done.values()):  # whatever was feared: a hang may have been a slow last step
        return end(run, at, "SUCCEEDED", f"all ranks finished in attempt {run.attempt}")
    if run.cancelled_by is not None:
        return end(told(run), at, "CANCELLED", f"cancelled by {run.cancelled_by}")
    if run.leaving is not None and run.leaving.cause is None:
        return run, ()  # why is still to be told: a cancelled job must not be queued again
    if run.findings is not None:
        if asks_who_differed(run.findings):
            return ask_who_differed(run, run.findings, at)
        judge_by = None if run.findings.judged else run.findings.judge_by
        if judge_by is not None and at < judge_by:
            return replace(run, deadline=judge_by), ()  # the verdict is on its way
        return recover(run, run.findings, at)
    assert run.leaving is not None
    return _leave(run, run.leaving, at)


def _leave(run: Run, leaving: Leaving, at: float) -> Result:
    """The ranks wrote a checkpoint and left; go on elsewhere."""
    if leaving.requeue:
        return requeue(run, at, leaving.words, whole=not has_successors(run))
    return start_if_ready(replace(wait(run, at, leaving.words), leaving=None), at)


def recover(run: Run, findings: Findings, at: float, verdict: Verdict | None = None) -> Result:
    """Record the incident, of `verdict` where there is one; start again or give up."""
    verdict = verdict or first_cause(run, findings)
    if taken := taken_by_scheduler(findings, verdict):
        run = replace(run, findings=None)
        return _leave(run, run.leaving or Leaving(cause="drained", words=taken, requeue=False), at)
    decision = decide(run, verdict)
    if decision.action == "replan" and not oom_replan.is_of_the_plan(run, verdict):
        decision = replace(decision, action="stop", reason=oom_replan.no_help(verdict))
    if decision.action == "rollback":
        run, decision = rollback.perform(run, findings.exits, decision)
    incident = decided(run, incident_of(run, findings, verdict, decision.reason), decision)
    if decision.without is not None:
        why = f"{verdict.cause} (rule {decision.rule})"
        run = without(run, decision.without, why, at)
    run = replace(run, incidents=(*run.incidents, incident), findings=None)
    if decision.action == "stop":
        return _give_up(run, at, verdict, decision)
    run = replace(
        wait(run, at, decision.words),
        restarts=run.restarts + 1,
        fruitless=run.fruitless + decision.counts,
    )
    if decision.action == "replan":
        short = oom_replan.shortage_of(run, verdict, decision.words, adopt=True)
        run, orders = oom_replan.look(run, at, short)
        if run.leaving is None or not run.leaving.requeue:
            return replace(run, leaving=None), orders
    if run.leaving is not None:
        return _leave(run, run.leaving, at)
    if decision.action == "requeue":
        return requeue(run, at, decision.words, whole=not has_successors(run))
    ordered = {lost.host for lost in findings.lost}
    missing = tuple(
        ReplaceAgent(host=host.name, reason=decision.words)
        for host in run.hosts.values()
        if not (host.alive or host.unfit or host.name in ordered or host.name in run.exclude)
    )
    run, actions = hold(run, at, decision) if decision.wait_s else start_if_ready(run, at)
    return run, (*missing, *actions)


def without(run: Run, host: str, why: str, at: float) -> Run:
    """The host is used no more in this job, whoever leads it."""
    replaced = {**run.replaced, host: Replaced(at=at, why=why)}
    return replace(leave_out(run, {host: why}), replaced=replaced)


def leave_out(run: Run, bad: Mapping[str, str]) -> Run:
    """For what they did: whether the scheduler opens them again does not matter any more."""
    why = {host: words for host, words in bad.items() if host not in {*run.exclude} - {*run.shut}}
    shut = tuple(host for host in run.shut if host not in bad)
    return replace(run, exclude={**run.exclude, **why}, shut=shut)


def _give_up(run: Run, at: float, verdict: Verdict, decision: Decision) -> Result:
    """End the job; where memory was short, the planner is asked first what would help."""
    if run.leaving is not None or not oom_replan.is_of_the_plan(run, verdict):
        return end(run, at, "FAILED", decision.words)
    short = oom_replan.shortage_of(run, verdict, decision.words, adopt=False)
    return oom_replan.look(wait(run, at, decision.words), at, short)


def hold(run: Run, at: float, decision: Decision) -> Result:
    """Give what broke time to heal; agents that are missing come meanwhile."""
    reason = (
        f"waits {decision.wait_s:.0f} s before attempt {run.attempt + 1},"
        f" rule {decision.rule}: {decision.reason}"
    )
    until = at + decision.wait_s
    return replace(run, stage=Stage.HOLDING, since=at, deadline=until, reason=reason), ()


def end(run: Run, at: float, ending: Ending, reason: str) -> Result:
    after = replace(
        run,
        stage=Stage.ENDED,
        since=at,
        deadline=None,
        reason=reason,
        ending=ending,
        findings=None,
    )
    return after, (EndJob(state=ending, reason=reason),)
