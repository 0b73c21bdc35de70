"""Supervisors with a defect: the simulation must find the law that each one breaks."""

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from orchestrator.contract.messages.actions import Action, Requeue, StartAttempt, StopAttempt
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CheckpointIntervalChanged,
    CheckpointSaved,
    Event,
    HangDetected,
    HangJudged,
    HostOpened,
    HostStopped,
    HostWarned,
    JobSubmitted,
    LeaderStarted,
    LeaveAsked,
    RankExited,
    Replanned,
    Tick,
)
from orchestrator.contract.skipped_batches import Window
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import NOBODY, Culprit
from orchestrator.diagnosis.classes import default_rules
from orchestrator.job.attempt_end import recover, stop
from orchestrator.job.failures.policy import strike_weight
from orchestrator.job.incident import WARNED, Incident
from orchestrator.job.interruption import Leaving
from orchestrator.job.leave import end
from orchestrator.job.stage import IDLE, Holding, Running, Stopping, Waiting
from orchestrator.job.state import Run, with_deadline, with_leaving
from orchestrator.job.transitions import step
from orchestrator.journal.supervisor import Decide
from orchestrator.simulation.run import Outcome, simulate

Result = tuple[Run, tuple[Action, ...]]


def treats_returned_agents_as_idle(run: Run, event: Event) -> Result:
    if isinstance(event, AgentRegistered):
        event = replace(event, running=0)
    return step(run, event)


def charges_budget_for_scheduler_request(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    asked = isinstance(event, LeaveAsked) and after is not run
    return (
        replace(after, history=replace(after.history, fruitless=after.history.fruitless + 1))
        if asked
        else after
    ), actions


def replaces_returned_hosts_without_wait(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, hosts=replace(after.hosts, away={})), actions


def writes_no_action_in_incidents(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    silent = tuple(replace(incident, action="") for incident in after.history.incidents)
    return replace(after, history=replace(after.history, incidents=silent)), actions


def reuses_the_attempt_number(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    again = [a for a in actions if isinstance(a, StartAttempt) and a.attempt > 1]
    if not again:
        return after, actions
    start = replace(again[0], attempt=again[0].attempt - 1)
    return replace(after, attempt=replace(after.attempt, number=start.attempt)), (start,)


def never_counts_failures(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, history=replace(after.history, fruitless=0)), actions


def charges_budget_for_each_lost_agent(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    gone = isinstance(event, AgentLost) and isinstance(run.stage, IDLE) and after is not run
    return (
        replace(after, history=replace(after.history, fruitless=after.history.fruitless + 1))
        if gone
        else after
    ), actions


def makes_one_incident_per_lost_agent(run: Run, event: Event) -> Result:
    """Although other agents are lost at the same time."""
    after, actions = step(run, event)
    if (
        not isinstance(event, AgentLost)
        or not isinstance(run.stage, IDLE)
        or after.interruption.findings is None
    ):
        return after, actions
    after, more = recover(after, Findings(opened_at=event.at, lost=(event,)), event.at)
    return after, (*actions, *more)


def forgets_excluded_hosts(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, hosts=replace(after.hosts, exclude={})), actions


def ignores_reopened_hosts(run: Run, event: Event) -> Result:
    return (run, ()) if isinstance(event, HostOpened) else step(run, event)


def excludes_drained_hosts_permanently(run: Run, event: Event) -> Result:
    return step(replace(run, hosts=replace(run.hosts, shut=())), event)


def starts_before_ranks_have_stopped(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    for host in after.attempt.placement if isinstance(after.stage, Stopping) else ():
        stopped = HostStopped(at=event.at, attempt=after.attempt.number, host=host, finished=False)
        after, more = step(after, stopped)
        actions += more
    return after, actions


def requeues_twice(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return after, actions + tuple(a for a in actions if isinstance(a, Requeue))


def ignores_hangs(run: Run, event: Event) -> Result:
    return (run, ()) if isinstance(event, HangDetected) else step(run, event)


def drops_incidents(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, history=replace(after.history, incidents=(), fruitless=0)), actions


def shortens_the_backoff(run: Run, event: Event) -> Result:
    """The job waits only for a tenth of the backoff."""
    after, actions = step(run, event)
    if (
        isinstance(after.stage, Holding)
        and not isinstance(run.stage, Holding)
        and after.stage.deadline
    ):
        after = with_deadline(after, event.at + (after.stage.deadline - event.at) / 10)
    return after, actions


def leaves_out_the_rule(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    nameless = tuple(replace(incident, rule="") for incident in after.history.incidents)
    return replace(after, history=replace(after.history, incidents=nameless)), actions


def excludes_host_after_each_strike(run: Run, event: Event) -> Result:
    """Excludes the host for each strike, even if the incident's remedy is another one."""
    after, actions = step(run, event)
    run_with_fault = [
        one for one in after.history.incidents[len(run.history.incidents) :] if strike_weight(one)
    ]
    more = {one.culprit.host: "a strike" for one in run_with_fault if one.culprit.host is not None}
    return (
        replace(after, hosts=replace(after.hosts, exclude={**more, **after.hosts.exclude}))
        if more
        else after
    ), actions


def uses_replaced_hosts_again(run: Run, event: Event) -> Result:
    """Forgets the replaced hosts when a new leader starts."""
    if isinstance(event, LeaderStarted):
        run = replace(run, hosts=replace(run.hosts, replaced={}, exclude={}))
    return step(run, event)


def ignores_always_pins(run: Run, event: Event) -> Result:
    if isinstance(event, LeaderStarted):
        event = replace(event, always=())
    return step(run, event)


def ignores_never_pins(run: Run, event: Event) -> Result:
    if isinstance(event, LeaderStarted):
        event = replace(event, exclude={})
    return step(run, event)


def trains_on_skipped_batches(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return after, tuple(replace(a, skip=()) if isinstance(a, StartAttempt) else a for a in actions)


def skips_data_without_a_rollback(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    if isinstance(event, CheckpointSaved) and after.progress.saved > run.progress.saved:
        window = Window(first=after.progress.saved + 100, last=after.progress.saved + 100)
        after = replace(
            after, progress=replace(after.progress, skipped=(*after.progress.skipped, window))
        )
    return after, actions


def keeps_the_plan_after_oom(run: Run, event: Event) -> Result:
    if isinstance(event, Replanned) and event.device_bytes is not None:
        event = replace(event, plan=run.plan, plan_number=run.current.number)
    return step(run, event)


def scales_up_at_every_checkpoint(run: Run, event: Event) -> Result:
    if (
        isinstance(event, CheckpointSaved)
        and isinstance(run.stage, Running)
        and run.interruption.leaving is None
    ):
        leaving = Leaving(cause="growing", words="test", requeue=False)
        return stop(
            replace(
                run,
                interruption=replace(run.interruption, leaving=leaving),
                progress=replace(run.progress, saved=event.step),
            ),
            event.at,
            "test",
            30.0,
        )
    return step(run, event)


def ignores_new_checkpoint_interval(run: Run, event: Event) -> Result:
    return (run, ()) if isinstance(event, CheckpointIntervalChanged) else step(run, event)


def blames_last_host_for_a_hang(run: Run, event: Event) -> Result:
    if isinstance(event, HangJudged) and run.attempt.placement:
        event = replace(event, hosts=run.attempt.placement[-1:], ranks=(), confidence=1.0)
    return step(run, event)


def blames_evicted_hosts(run: Run, event: Event) -> Result:
    if isinstance(event, AgentLost | AgentRegistered | LeaderStarted):
        event = replace(event, taken="")
    return step(run, event)


def separates_simultaneous_losses(run: Run, event: Event) -> Result:
    if isinstance(event, AgentLost) and run.interruption.findings is not None:
        event = replace(event, silent_s=event.silent_s - 10.0 * len(run.interruption.findings.lost))
    return step(run, event)


def releases_all_hosts_at_once(run: Run, event: Event) -> Result:
    """Although the scheduler replaces each host by a successor."""
    after, actions = step(run, event)
    return after, tuple(replace(a, whole=True) if isinstance(a, Requeue) else a for a in actions)


def never_doubles_the_wait_for_successors(run: Run, event: Event) -> Result:
    return step(replace(run, scheduler=replace(run.scheduler, given_back=0)), event)


def ignores_rank_failures_during_stop(run: Run, event: Event) -> Result:
    """Ignores failures of ranks during any stop."""
    if run.interruption.leaving is not None and isinstance(event, RankExited):
        return run, ()
    return step(run, event)


def ignores_lost_agents_during_stop(run: Run, event: Event) -> Result:
    if run.interruption.leaving is not None and isinstance(event, AgentLost):
        event = replace(event, taken="the scheduler used it for another job")
    return step(run, event)


def ends_at_the_first_failure(run: Run, event: Event) -> Result:
    if run.job is not None:
        early = step(
            replace(run, history=replace(run.history, fruitless=run.job.max_restarts)), event
        )
        if early[0].ending == "FAILED" and len(early[0].history.incidents) > len(
            run.history.incidents
        ):
            return early
    return step(run, event)


def restarts_on_a_broken_gpu(run: Run, event: Event) -> Result:
    """Restarts on the same host, although the failure class says that the host must be replaced."""
    if isinstance(event, JobSubmitted):
        losses = [rule for rule in default_rules() if rule.action == "replace"]
        mild = tuple(replace(rule, action="restart") for rule in losses)
        event = replace(event, failure_classes=(*event.failure_classes, *mild))
    return step(run, event)


def _with_last(run: Run, event: Event, change: Callable[[Incident], Incident]) -> Result:
    after, actions = step(run, event)
    new = after.history.incidents[len(run.history.incidents) :]
    if not new or new[-1].kind == "preflight":
        return after, actions
    return replace(
        after,
        history=replace(after.history, incidents=(*after.history.incidents[:-1], change(new[-1]))),
    ), actions


def blames_the_last_to_fail(run: Run, event: Event) -> Result:
    losses = run.interruption.findings.exits if run.interruption.findings is not None else ()
    if not losses:
        return step(run, event)
    last = max(losses, key=lambda exited: exited.at)
    culprit = Culprit(host=last.host, rank=last.rank)
    return _with_last(run, event, lambda one: replace(one, culprit=culprit))


def blames_one_host_for_everything(run: Run, event: Event) -> Result:
    culprit = Culprit(host="node-0", rank=0)
    return _with_last(run, event, lambda one: replace(one, culprit=culprit))


def blames_no_culprit(run: Run, event: Event) -> Result:
    return _with_last(run, event, lambda one: replace(one, culprit=NOBODY))


def calls_everything_a_segfault(run: Run, event: Event) -> Result:
    return _with_last(run, event, lambda one: replace(one, failure="segfault"))


def drops_incident_on_cancel(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    if after.ending == "CANCELLED":
        after = replace(after, history=replace(after.history, incidents=run.history.incidents))
    return after, actions


def starts_while_scheduler_wants_hosts(run: Run, event: Event) -> Result:
    if (
        isinstance(run.stage, Waiting)
        and run.interruption.leaving is not None
        and run.interruption.leaving.cause is None
    ):
        run = with_leaving(run, None)
    return step(run, event)


def resumes_from_a_bad_step(run: Run, event: Event) -> Result:
    """Takes the first bad step as a good one."""
    if isinstance(event, RankExited) and event.error is not None and event.error.since:
        error = replace(event.error, since=event.error.since + 1)
        event = replace(event, error=error)
    return step(run, event)


def restarts_from_step_0_without_good_checkpoint(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    if after.ending == "FAILED" and "no checkpoint from before" in after.stage.reason:
        return step(replace(run, progress=replace(run.progress, saved=0, saves=())), event)
    return after, actions


def takes_any_exit_0_as_success(run: Run, event: Event) -> Result:
    if isinstance(event, RankExited) and event.exit_code == 0 and isinstance(run.stage, Running):
        return end(run, event.at, "SUCCEEDED", "a rank returned 0")
    return step(run, event)


def ignores_class_budget(run: Run, event: Event) -> Result:
    return step(
        replace(run, history=replace(run.history, advanced=len(run.history.incidents))), event
    )


def names_hosts_for_a_shared_problem(run: Run, event: Event) -> Result:
    if isinstance(event, HostWarned):
        event = replace(event, problem="gpu-memory")
    return step(run, event)


def replaces_hosts_at_every_warning(run: Run, event: Event) -> Result:
    """It forgets when it last replaced a host."""
    kept = run.history.incidents
    if isinstance(event, HostWarned):
        before = tuple(replace(one, at=0.0) if one.kind == WARNED else one for one in kept)
        run = replace(run, history=replace(run.history, incidents=before))
    after, actions = step(run, event)
    all_ = (*kept, *after.history.incidents[len(kept) :])
    return replace(after, history=replace(after.history, incidents=all_)), actions


def replaces_hosts_without_a_checkpoint(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    killed = tuple(
        replace(one, grace_s=0.0) if isinstance(one, StopAttempt) else one for one in actions
    )
    return after, killed


class KeepsStateOutsideTheJournal:
    """Decides by a counter of its own, which a new leader does not have."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, run: Run, event: Event) -> Result:
        after, actions = step(run, event)
        self.seen += 1
        return replace(
            after, stage=replace(after.stage, reason=f"{after.stage.reason} ({self.seen})")
        ), actions


def journals_each_tick(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return (replace(after) if isinstance(event, Tick) else after), actions


def test_a_law_finds_a_supervisor_that_journals_each_tick() -> None:
    assert "a tick that changes nothing" in simulate(0, ("rank",), journals_each_tick).broken


def first_broken(decide: Decide, kinds: Sequence[str], first: int = 0) -> Outcome:
    def decided(run: Run, event: Event) -> Result:
        after, actions = decide(run, event)
        # Another law is about ticks whose state is equal, but not the same object.
        return (run if isinstance(event, Tick) and after == run else after), actions

    for seed in range(first, first + 300):
        outcome = simulate(seed, kinds, decided)
        if outcome.broken:
            return outcome
    raise AssertionError("no law was broken in 300 seeds")


@pytest.mark.parametrize(
    ("decide", "kinds", "law", "seed"),
    [
        (never_counts_failures, ("rank",), "attempts without progress", 0),
        (charges_budget_for_each_lost_agent, ("host", "switch"), "nothing failed", 47),
        (makes_one_incident_per_lost_agent, ("partition",), "outages", 39),
        (forgets_excluded_hosts, ("drain",), "used, ", 1),
        (ignores_reopened_hosts, ("drain",), "the scheduler no longer drains it", 3),
        (excludes_drained_hosts_permanently, ("drain",), "only drained", 1),
        (starts_before_ranks_have_stopped, ("hang", "stuck"), "still runs", 0),
        (requeues_twice, ("preemption",), "requeued twice", 1),
        (ignores_hangs, ("hang",), "has not ended", 0),
        (drops_incidents, ("rank",), "nothing says why", 0),
        (KeepsStateOutsideTheJournal(), ("leader",), "replaying gives another state", 2),
        (treats_returned_agents_as_idle, ("stuck", "messages", "rank"), "still runs", 18),
        (charges_budget_for_scheduler_request, ("preemption",), "nothing failed", 1),
        (writes_no_action_in_incidents, ("rank",), "has no outcome", 0),
        (reuses_the_attempt_number, ("rank",), "attempt 1 after 1", 0),
        (shortens_the_backoff, ("fabric",), "too early", 0),
        (leaves_out_the_rule, ("hang",), "names no rule", 0),
        (excludes_host_after_each_strike, ("rank",), "does not say so", 0),
        (
            uses_replaced_hosts_again,
            ("error", "leader"),
            "used again after they were replaced",
            16,
        ),
        (ignores_always_pins, ("error",), "pinned to be always used", 60),
        (ignores_never_pins, ("rank",), "pinned to be never used", 1),
        (trains_on_skipped_batches, ("nan",), "does not skip the batches", 0),
        (skips_data_without_a_rollback, ("rank",), "nothing was rolled back", 0),
        (keeps_the_plan_after_oom, ("memory",), "is too large", 0),
        (scales_up_at_every_checkpoint, ("drain",), "grows twice", 0),
        (ignores_new_checkpoint_interval, ("rank",), "checkpoint interval is lost", 1),
        (blames_last_host_for_a_hang, ("hang",), "and never hung", 3),
        (blames_evicted_hosts, ("eviction",), "is blamed, but the scheduler took it", 0),
        (separates_simultaneous_losses, ("switch",), "alone is blamed", 9),
        (replaces_returned_hosts_without_wait, ("drain", "dead-spare"), "is replaced again", 32),
        (ignores_rank_failures_during_stop, ("slow", "parting"), "nothing says why", 1),
        (ignores_lost_agents_during_stop, ("slow", "parting"), "nothing says why", 2),
        (releases_all_hosts_at_once, ("preemption",), "all hosts are given up", 1),
        (ends_at_the_first_failure, ("rank",), "restarts are spent", 0),
        (restarts_on_a_broken_gpu, ("error",), "and restart is done", 1),
        (blames_the_last_to_fail, ("rank",), "and never failed", 0),
        (blames_one_host_for_everything, ("rank",), "and never failed", 0),
        (blames_no_culprit, ("rank",), "the culprit is nobody", 0),
        (calls_everything_a_segfault, ("error",), "and segfault is reported", 0),
        (
            drops_incident_on_cancel,
            ("rank", "cancel"),
            "no incident reports the earlier failure",
            6,
        ),
        (
            starts_while_scheduler_wants_hosts,
            ("preemption", "dead-spare"),
            "asks for the hosts",
            80,
        ),
        (resumes_from_a_bad_step, ("nan",), "is bad", 29),
        (restarts_from_step_0_without_good_checkpoint, ("nan",), "all steps are discarded", 60),
        (takes_any_exit_0_as_success, ("error",), "steps are done", 3),
        (ignores_class_budget, ("rank",), "the first that fits", 6),
        (names_hosts_for_a_shared_problem, ("warning",), "has no problem of its own", 38),
        (replaces_hosts_at_every_warning, ("warning",), "twice for warnings", 75),
        (replaces_hosts_without_a_checkpoint, ("warning",), "costs", 7),
        (never_doubles_the_wait_for_successors, ("host", "switch"), "for the time 2", 32),
    ],
)
def test_a_law_finds_each_broken_supervisor(
    decide: Decide, kinds: Sequence[str], law: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`seed`: the first seed that is tried; it broke the law when the test was written."""
    if decide is ignores_hangs:
        monkeypatch.setattr("orchestrator.simulation.run.END_WITHIN_S", 900.0)
    assert law in first_broken(decide, kinds, first=seed).broken
