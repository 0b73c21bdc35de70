"""Supervisors with a defect: the simulation must find the law that each one breaks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from orchestrator.contract.messages.actions import Action, Requeue, StartAttempt
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
    JobSubmitted,
    LeaderStarted,
    LeaveAsked,
    RankExited,
    Replanned,
)
from orchestrator.contract.skipped_batches import Window
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import NOBODY, Culprit
from orchestrator.diagnosis.classes import default_rules
from orchestrator.job.attempt_end import recover, stop
from orchestrator.job.failures.policy import strike_weight
from orchestrator.job.incident import Incident
from orchestrator.job.interruption import Leaving
from orchestrator.job.leave import end
from orchestrator.job.stage import IDLE, Holding, Running, Stopping, Waiting
from orchestrator.job.state import Run, with_deadline, with_leaving
from orchestrator.job.transitions import step
from orchestrator.journal.supervisor import Decide
from orchestrator.simulation.run import Outcome, simulate

Result = tuple[Run, tuple[Action, ...]]


def takes_who_comes_back_for_idle(run: Run, event: Event) -> Result:
    if isinstance(event, AgentRegistered):
        event = replace(event, running=0)
    return step(run, event)


def charges_for_a_schedulers_wish(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    asked = isinstance(event, LeaveAsked) and after is not run
    return (
        replace(after, history=replace(after.history, fruitless=after.history.fruitless + 1))
        if asked
        else after
    ), actions


def sends_away_at_once_who_comes_back(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, hosts=replace(after.hosts, away={})), actions


def does_not_say_what_it_did(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    silent = tuple(replace(incident, action="") for incident in after.history.incidents)
    return replace(after, history=replace(after.history, incidents=silent)), actions


def starts_again_under_the_same_number(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    again = [a for a in actions if isinstance(a, StartAttempt) and a.attempt > 1]
    if not again:
        return after, actions
    start = replace(again[0], attempt=again[0].attempt - 1)
    return replace(after, attempt=replace(after.attempt, number=start.attempt)), (start,)


def counts_nothing(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, history=replace(after.history, fruitless=0)), actions


def charges_for_each_agent_that_goes(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    gone = isinstance(event, AgentLost) and isinstance(run.stage, IDLE) and after is not run
    return (
        replace(after, history=replace(after.history, fruitless=after.history.fruitless + 1))
        if gone
        else after
    ), actions


def judges_each_agent_that_goes_for_itself(run: Run, event: Event) -> Result:
    """Though others go with it."""
    after, actions = step(run, event)
    if (
        not isinstance(event, AgentLost)
        or not isinstance(run.stage, IDLE)
        or after.interruption.findings is None
    ):
        return after, actions
    after, more = recover(after, Findings(opened_at=event.at, lost=(event,)), event.at)
    return after, (*actions, *more)


def forgets_whom_to_leave_out(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, hosts=replace(after.hosts, exclude={})), actions


def leaves_out_for_good_who_was_drained(run: Run, event: Event) -> Result:
    return (run, ()) if isinstance(event, HostOpened) else step(run, event)


def keeps_off_who_was_drained(run: Run, event: Event) -> Result:
    return step(replace(run, hosts=replace(run.hosts, shut=())), event)


def does_not_wait_for_the_end_of_the_former(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    for host in after.attempt.placement if isinstance(after.stage, Stopping) else ():
        stopped = HostStopped(at=event.at, attempt=after.attempt.number, host=host, finished=False)
        after, more = step(after, stopped)
        actions += more
    return after, actions


def requeues_twice(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return after, actions + tuple(a for a in actions if isinstance(a, Requeue))


def overlooks_hangs(run: Run, event: Event) -> Result:
    return (run, ()) if isinstance(event, HangDetected) else step(run, event)


def keeps_no_incidents(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    return replace(after, history=replace(after.history, incidents=(), fruitless=0)), actions


def does_not_wait_for_what_heals(run: Run, event: Event) -> Result:
    """It holds, and for a tenth of the time."""
    after, actions = step(run, event)
    if (
        isinstance(after.stage, Holding)
        and not isinstance(run.stage, Holding)
        and after.stage.deadline
    ):
        after = with_deadline(after, event.at + (after.stage.deadline - event.at) / 10)
    return after, actions


def names_no_rule(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    nameless = tuple(replace(incident, rule="") for incident in after.history.incidents)
    return replace(after, history=replace(after.history, incidents=nameless)), actions


def leaves_out_whom_no_rule_did(run: Run, event: Event) -> Result:
    """Each strike counts, whatever the incident says was decided."""
    after, actions = step(run, event)
    struck = [
        one for one in after.history.incidents[len(run.history.incidents) :] if strike_weight(one)
    ]
    more = {one.culprit.host: "a strike" for one in struck if one.culprit.host is not None}
    return (
        replace(after, hosts=replace(after.hosts, exclude={**more, **after.hosts.exclude}))
        if more
        else after
    ), actions


def uses_a_replaced_host_again(run: Run, event: Event) -> Result:
    """As soon as another leader decides."""
    if isinstance(event, LeaderStarted):
        run = replace(run, hosts=replace(run.hosts, replaced={}, exclude={}))
    return step(run, event)


def does_not_know_of_pins(run: Run, event: Event) -> Result:
    if isinstance(event, LeaderStarted):
        event = replace(event, always=())
    return step(run, event)


def uses_who_is_never_to_be_used(run: Run, event: Event) -> Result:
    if isinstance(event, LeaderStarted):
        event = replace(event, exclude={})
    return step(run, event)


def trains_what_it_names_as_skipped(run: Run, event: Event) -> Result:
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


def takes_the_same_plan_again(run: Run, event: Event) -> Result:
    if isinstance(event, Replanned) and event.device_bytes is not None:
        event = replace(event, plan=run.plan, plan_number=run.current.number)
    return step(run, event)


def grows_at_every_checkpoint(run: Run, event: Event) -> Result:
    if (
        isinstance(event, CheckpointSaved)
        and isinstance(run.stage, Running)
        and run.interruption.leaving is None
    ):
        leaving = Leaving(cause="growing", words="for fun", requeue=False)
        return stop(
            replace(
                run,
                interruption=replace(run.interruption, leaving=leaving),
                progress=replace(run.progress, saved=event.step),
            ),
            event.at,
            "for fun",
            30.0,
        )
    return step(run, event)


def forgets_the_pace(run: Run, event: Event) -> Result:
    return (run, ()) if isinstance(event, CheckpointIntervalChanged) else step(run, event)


def blames_whom_it_likes_for_a_hang(run: Run, event: Event) -> Result:
    if isinstance(event, HangJudged) and run.attempt.placement:
        event = replace(event, hosts=run.attempt.placement[-1:], ranks=(), confidence=1.0)
    return step(run, event)


def blames_whom_the_scheduler_took(run: Run, event: Event) -> Result:
    if isinstance(event, AgentLost | AgentRegistered | LeaderStarted):
        event = replace(event, taken="")
    return step(run, event)


def tells_apart_who_went_together(run: Run, event: Event) -> Result:
    if isinstance(event, AgentLost) and run.interruption.findings is not None:
        event = replace(event, silent_s=event.silent_s - 10.0 * len(run.interruption.findings.lost))
    return step(run, event)


def gives_all_hosts_up_for_one(run: Run, event: Event) -> Result:
    """Though each has a successor."""
    after, actions = step(run, event)
    return after, tuple(replace(a, whole=True) if isinstance(a, Requeue) else a for a in actions)


def gives_all_up_as_soon_each_time(run: Run, event: Event) -> Result:
    return step(replace(run, scheduler=replace(run.scheduler, given_back=0)), event)


def overlooks_what_breaks_on_the_way_out(run: Run, event: Event) -> Result:
    """Ignores failures of ranks during any stop."""
    if run.interruption.leaving is not None and isinstance(event, RankExited):
        return run, ()
    return step(run, event)


def forgives_agents_that_die_on_the_way_out(run: Run, event: Event) -> Result:
    if run.interruption.leaving is not None and isinstance(event, AgentLost):
        event = replace(event, taken="somebody had a use for it")
    return step(run, event)


def ends_at_the_first_failure(run: Run, event: Event) -> Result:
    if run.job is not None:
        tired = step(
            replace(run, history=replace(run.history, fruitless=run.job.max_restarts)), event
        )
        if tired[0].ending == "FAILED" and len(tired[0].history.incidents) > len(
            run.history.incidents
        ):
            return tired
    return step(run, event)


def restarts_whatever_the_class_says(run: Run, event: Event) -> Result:
    """On a broken GPU too."""
    if isinstance(event, JobSubmitted):
        told = [rule for rule in default_rules() if rule.action == "replace"]
        mild = tuple(replace(rule, action="restart") for rule in told)
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
    told = run.interruption.findings.exits if run.interruption.findings is not None else ()
    if not told:
        return step(run, event)
    last = max(told, key=lambda exited: exited.at)
    culprit = Culprit(host=last.host, rank=last.rank)
    return _with_last(run, event, lambda one: replace(one, culprit=culprit))


def blames_one_host_for_everything(run: Run, event: Event) -> Result:
    culprit = Culprit(host="node-0", rank=0)
    return _with_last(run, event, lambda one: replace(one, culprit=culprit))


def blames_nobody(run: Run, event: Event) -> Result:
    return _with_last(run, event, lambda one: replace(one, culprit=NOBODY))


def calls_everything_a_segfault(run: Run, event: Event) -> Result:
    return _with_last(run, event, lambda one: replace(one, failure="segfault"))


def cancels_what_was_found_as_well(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    if after.ending == "CANCELLED":
        after = replace(after, history=replace(after.history, incidents=run.history.incidents))
    return after, actions


def starts_while_the_scheduler_asks(run: Run, event: Event) -> Result:
    if (
        isinstance(run.stage, Waiting)
        and run.interruption.leaving is not None
        and run.interruption.leaving.cause is None
    ):
        run = with_leaving(run, None)
    return step(run, event)


def goes_on_from_what_is_spoilt(run: Run, event: Event) -> Result:
    """It takes the first bad step for a good one."""
    if isinstance(event, RankExited) and event.error is not None and event.error.since:
        error = replace(event.error, since=event.error.since + 1)
        event = replace(event, error=error)
    return step(run, event)


def throws_all_away_for_want_of_a_checkpoint(run: Run, event: Event) -> Result:
    after, actions = step(run, event)
    if after.ending == "FAILED" and "no checkpoint from before" in after.stage.reason:
        return step(replace(run, progress=replace(run.progress, saved=0, saves=())), event)
    return after, actions


def takes_any_zero_for_the_end(run: Run, event: Event) -> Result:
    if isinstance(event, RankExited) and event.exit_code == 0 and isinstance(run.stage, Running):
        return end(run, event.at, "SUCCEEDED", "a rank returned 0")
    return step(run, event)


def spends_no_budget_of_a_class(run: Run, event: Event) -> Result:
    return step(
        replace(run, history=replace(run.history, advanced=len(run.history.incidents))), event
    )


class RemembersBesideTheJournal:
    """Decides by what it saw, not by the state: a new leader does not know it."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, run: Run, event: Event) -> Result:
        after, actions = step(run, event)
        self.seen += 1
        return replace(
            after, stage=replace(after.stage, reason=f"{after.stage.reason} ({self.seen})")
        ), actions


def first_broken(decide: Decide, kinds: Sequence[str], first: int = 0) -> Outcome:
    for seed in range(first, first + 300):
        outcome = simulate(seed, kinds, decide)
        if outcome.broken:
            return outcome
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(
    ("decide", "kinds", "law", "seed"),
    [
        (counts_nothing, ("rank",), "attempts without progress", 0),
        (charges_for_each_agent_that_goes, ("host", "switch"), "nothing failed", 47),
        (judges_each_agent_that_goes_for_itself, ("partition",), "outages", 39),
        (forgets_whom_to_leave_out, ("drain",), "used, ", 1),
        (leaves_out_for_good_who_was_drained, ("drain",), "the scheduler no longer drains it", 3),
        (keeps_off_who_was_drained, ("drain",), "only drained", 1),
        (does_not_wait_for_the_end_of_the_former, ("hang", "stuck"), "still runs", 0),
        (requeues_twice, ("preemption",), "requeued twice", 1),
        (overlooks_hangs, ("hang",), "has not ended", 0),
        (keeps_no_incidents, ("rank",), "nothing says why", 0),
        (RemembersBesideTheJournal(), ("leader",), "replaying gives another state", 2),
        (takes_who_comes_back_for_idle, ("stuck", "messages", "rank"), "still runs", 18),
        (charges_for_a_schedulers_wish, ("preemption",), "nothing failed", 1),
        (does_not_say_what_it_did, ("rank",), "has no outcome", 0),
        (starts_again_under_the_same_number, ("rank",), "attempt 1 after 1", 0),
        (does_not_wait_for_what_heals, ("fabric",), "too early", 0),
        (names_no_rule, ("hang",), "names no rule", 0),
        (leaves_out_whom_no_rule_did, ("rank",), "does not say so", 0),
        (
            uses_a_replaced_host_again,
            ("error", "leader"),
            "used again after they were replaced",
            16,
        ),
        (does_not_know_of_pins, ("error",), "pinned to be always used", 60),
        (uses_who_is_never_to_be_used, ("rank",), "pinned to be never used", 1),
        (trains_what_it_names_as_skipped, ("nan",), "does not skip the batches", 0),
        (skips_data_without_a_rollback, ("rank",), "nothing was rolled back", 0),
        (takes_the_same_plan_again, ("memory",), "is too large", 0),
        (grows_at_every_checkpoint, ("drain",), "grows twice", 0),
        (forgets_the_pace, ("rank",), "checkpoint interval is lost", 1),
        (blames_whom_it_likes_for_a_hang, ("hang",), "and never hung", 3),
        (blames_whom_the_scheduler_took, ("eviction",), "is blamed, but the scheduler took it", 0),
        (tells_apart_who_went_together, ("switch",), "alone is blamed", 9),
        (sends_away_at_once_who_comes_back, ("drain", "dead-spare"), "is replaced again", 32),
        (overlooks_what_breaks_on_the_way_out, ("slow", "parting"), "nothing says why", 1),
        (forgives_agents_that_die_on_the_way_out, ("slow", "parting"), "nothing says why", 2),
        (gives_all_hosts_up_for_one, ("preemption",), "all hosts are given up", 1),
        (ends_at_the_first_failure, ("rank",), "restarts are spent", 0),
        (restarts_whatever_the_class_says, ("error",), "and restart is done", 1),
        (blames_the_last_to_fail, ("rank",), "and never failed", 0),
        (blames_one_host_for_everything, ("rank",), "and never failed", 0),
        (blames_nobody, ("rank",), "the culprit is nobody", 0),
        (calls_everything_a_segfault, ("error",), "and segfault is reported", 0),
        (
            cancels_what_was_found_as_well,
            ("rank", "cancel"),
            "no incident reports the earlier failure",
            6,
        ),
        (starts_while_the_scheduler_asks, ("preemption", "dead-spare"), "asks for the hosts", 80),
        (goes_on_from_what_is_spoilt, ("nan",), "is bad", 29),
        (throws_all_away_for_want_of_a_checkpoint, ("nan",), "all steps are discarded", 60),
        (takes_any_zero_for_the_end, ("error",), "steps are done", 3),
        (spends_no_budget_of_a_class, ("rank",), "the first that fits", 6),
        (gives_all_up_as_soon_each_time, ("host", "switch"), "for the time 2", 32),
    ],
)
def test_a_broken_supervisor_is_caught(
    decide: Decide, kinds: Sequence[str], law: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`seed`: the first one that is tried; it finds the fault where nothing else has changed."""
    if decide is overlooks_hangs:
        monkeypatch.setattr("orchestrator.simulation.run.BOUND_S", 900.0)
    assert law in first_broken(decide, kinds, first=seed).broken
