"""Which rule decides about a failure, and what comes of it."""

from collections.abc import Sequence
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.codec import Invalid
from orchestrator.contract.messages.actions import (
    Action,
    EndJob,
    ReplaceAgent,
    Replan,
    Requeue,
    StartAttempt,
)
from orchestrator.contract.messages.events import Event, EvidenceGathered, LeaveAsked, RankExited
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.contract.spec.policy import PolicyRule, Same
from orchestrator.diagnosis.classes import default_rules as known_classes
from orchestrator.job.failures import policy
from orchestrator.job.incident import Incident
from orchestrator.job.stage import Holding, Queued, Waiting
from orchestrator.job.transitions import fold
from tests.job.supervise_cluster import Cluster
from tests.job.supervise_stage import Job, drills, plan

IB = "NET/IB : Got completion from peer 10.0.0.2<4> with status=12 opcode=0 len=0 vendor err 129"


def fails(job: Job, rank: int, message: str, **more: object) -> tuple[Action, ...]:
    """A rank raises, and all hosts stop."""
    job.raises(rank, message, **more)
    return job.stops()


def last(job: Job) -> Incident:
    return job.run.history.incidents[-1]


def decided(job: Job) -> tuple[str, str | None, str]:
    incident = last(job)
    return incident.failure, incident.remedy, incident.rule


# By class


@pytest.mark.parametrize(
    ("message", "name", "rule"),
    [
        ("[Errno 28] No space left on device", "disk-full", "class-stop"),
        ("[Errno 13] Permission denied: '/data'", "permission", "class-stop"),
    ],
)
def test_what_a_restart_would_meet_again_ends_the_job_with_its_advice(
    message: str, name: str, rule: str
) -> None:
    job = Job().running()
    (end,) = fails(job, 2, message)
    assert isinstance(end, EndJob)
    assert decided(job) == (name, "stop", rule)
    assert end.reason.endswith(f"; {last(job).advice} (rule {rule})")
    assert end.reason.startswith(f"the job was stopped: {name}; ")
    assert message not in end.reason, "the cause has its place"
    assert message in last(job).cause


def test_a_python_exception_is_tried_again_in_place() -> None:
    job = Job().running()
    (start,) = fails(job, 2, "shapes differ")
    assert isinstance(start, StartAttempt)
    assert decided(job) == ("python-exception", "restart", "class-default")


# Without the host

LOST_GPU = "CUDA error: device is lost"


def test_a_broken_device_is_held_against_its_host_also_where_the_job_ends_with_it() -> None:
    job = Job(max_restarts=0).running()
    (end,) = fails(job, 3, LOST_GPU)
    assert isinstance(end, EndJob)
    assert decided(job)[:2] == ("gpu-lost", "stop")
    assert last(job).culprit.host == "host-1"
    assert policy.strike_weight(last(job)) == 1.0


def test_a_broken_device_moves_the_job_to_the_spare() -> None:
    job = Job(spares=1).running()
    (start,) = fails(job, 3, LOST_GPU)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    assert decided(job) == ("gpu-lost", "replace", "class-default")
    assert last(job).action == (
        "restart as attempt 2 from the beginning: no checkpoint yet; host-1 is excluded: a spare"
        " takes its place"
    )


def test_a_host_that_is_pinned_stays_whatever_breaks_on_it() -> None:
    job = Job(spares=1).granted()
    job.always = ("host-1",)
    job.running()
    (start,) = fails(job, 3, LOST_GPU)
    assert isinstance(start, StartAttempt)
    assert (start.hosts, job.run.hosts.exclude) == (("host-0", "host-1"), {})
    assert last(job).remedy == "restart"
    assert last(job).action.endswith("; host-1 stays, as it is pinned")


def test_a_host_that_was_replaced_is_not_used_by_the_next_leader_either() -> None:
    job = Job(spares=1).granted().running()
    fails(job, 3, LOST_GPU)
    assert list(job.run.hosts.exclude) == ["host-1"]
    job.leads()
    assert list(job.run.hosts.exclude) == ["host-1"]
    job.always = ("host-1",)
    job.leads()
    assert job.run.hosts.exclude == {}, "a person has overruled that"


def test_with_no_spare_the_job_goes_on_with_fewer_if_that_is_allowed() -> None:
    job = Job(shrink=True).granted().running()
    (replan,) = fails(job, 3, LOST_GPU)
    assert isinstance(replan, Replan)
    assert replan.hosts == 1
    assert "the job continues with fewer hosts" in last(job).action


def test_with_no_spare_and_no_shrinking_the_job_is_queued_again_without_the_host() -> None:
    job = Job().granted().running()
    (requeue,) = fails(job, 3, LOST_GPU)
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    assert job.run.history.fruitless == 1


def test_where_hosts_have_successors_another_one_comes_in_its_place() -> None:
    job = Job().granted(successor_s=300.0).running()
    (order,) = fails(job, 3, LOST_GPU)
    assert order == ReplaceAgent(host="host-1", reason=order.reason, elsewhere=True)
    (start,) = job.registers("host-7")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-7")


def test_hosts_that_are_all_there_is_stay_and_it_is_said() -> None:
    job = Job().running()
    (start,) = fails(job, 3, LOST_GPU)
    assert isinstance(start, StartAttempt)
    assert decided(job)[1] == "restart"
    assert "host-1 stays" in last(job).action


def test_a_host_that_is_suspected_is_better_than_none() -> None:
    """The spare that took its place is lost as well, and no scheduler has another."""
    job = Job(spares=1, init_timeout=60.0).running()
    fails(job, 3, LOST_GPU)
    job.trains()
    job.loses("host-2")
    job.stops("host-0")
    assert isinstance(job.run.stage, Waiting)
    (start,) = job.waits(40.0)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_what_strikes_one_host_twice_a_day_is_the_host() -> None:
    job = Job(spares=1).running()
    for message in ("an illegal memory access was encountered", "device-side assert triggered"):
        fails(job, 3, message)
        job.trains()
    assert decided(job) == ("illegal-memory-access", "replace", "repeat-on-host")
    assert job.run.attempt.placement == ("host-0", "host-2")


@pytest.mark.parametrize("second", [{"rank": 0}, {"later": 86_401.0}], ids=["elsewhere", "later"])
def test_twice_on_two_hosts_or_two_days_is_not(second: dict[str, float]) -> None:
    job = Job(spares=1).running()
    fails(job, 3, "an illegal memory access was encountered")
    job.trains()
    job.at += second.get("later", 0.0)
    fails(job, int(second.get("rank", 3)), "device-side assert triggered")
    assert decided(job)[2] == "class-default"
    assert job.run.hosts.exclude == {}


def strikes_twice(job: Job) -> Sequence[Action]:
    """Two incidents of different classes that machines cause, both on host-1."""
    job.exits(3, signal=7)
    job.stops()
    job.trains()
    job.hangs()
    job.judged(3)
    return job.stops()


def test_a_second_strike_of_whatever_class_moves_the_job_and_the_incident_says_so() -> None:
    job = Job().granted().running()
    (requeue,) = strikes_twice(job)
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    assert decided(job) == ("hang", "replace", "second-strike")
    assert last(job).action.endswith("; host-1 is excluded: the job is requeued for another host")
    job.granted(restarts=1).leads()
    assert list(job.run.hosts.exclude) == ["host-1"]


def test_a_rule_of_the_user_goes_before_a_second_strike_also_with_the_next_leader() -> None:
    own = PolicyRule(name="ours", classes=("hang", "segfault"), action="restart")
    job = Job(policy=(own,), spares=1).granted().running()
    (start,) = strikes_twice(job)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")
    assert decided(job) == ("hang", "restart", "ours")
    job.leads()
    assert job.run.hosts.exclude == {}


def test_a_kill_that_nothing_explains_is_not_half_of_what_a_host_may_do() -> None:
    """One `kill -9` by a person beside one hang: no machine is at fault for both."""
    job = Job(spares=1).granted().running()
    job.exits(3, signal=9)
    job.stops()
    job.trains()
    job.hangs()
    job.judged(3)
    job.stops()
    assert decided(job) == ("hang", "restart", "class-default")
    job.trains()
    job.exits(3, signal=9)
    job.stops()
    assert decided(job) == ("sigkill-from-outside", "restart", "class-default")
    assert job.run.hosts.exclude == {}


def test_many_kills_that_nothing_explains_are_the_hosts_all_the_same() -> None:
    job = Job(spares=1, max_restarts=9).granted().running()
    rules = []
    for _ in range(4):
        job.exits(3, signal=9)
        job.stops()
        rules.append(last(job).rule)
        job.trains()
    assert rules == ["class-default"] * 3 + ["repeated-kills-on-host"]
    assert job.run.attempt.placement == ("host-0", "host-2")


@pytest.mark.parametrize("no_strike", ["rehearsed", "of-the-user"])
def test_what_is_no_strike_does_not_make_one_the_second(no_strike: str) -> None:
    job = Job(spares=1, drills=drills("kill:rank=3@step=2")).granted().running()
    if no_strike == "rehearsed":
        job.drill(1)
        job.exits(3)
    else:
        job.raises(3, "shapes differ")
    job.stops()
    job.trains()
    job.hangs()
    job.judged(3)
    job.stops()
    assert decided(job) == ("hang", "restart", "class-default")
    job.trains()
    job.exits(3, signal=11)
    job.stops()
    assert decided(job) == ("segfault", "restart", "class-default"), "nor is it one itself"


def test_a_host_that_a_person_cleared_is_used_by_the_next_leader_and_begins_anew() -> None:
    job = Job(max_restarts=9).granted().running()
    strikes_twice(job)
    job.cleared = {"host-1": job.now()}
    job.granted(restarts=1).running()
    assert (job.run.hosts.exclude, job.run.attempt.placement) == ({}, ("host-0", "host-1"))
    job.hangs()
    job.judged(3)
    job.stops()
    assert decided(job) == ("hang", "restart", "class-default"), "what was before is forgotten"
    job.trains()
    job.hangs()
    job.judged(3)
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    job.granted(restarts=2).leads()
    assert list(job.run.hosts.exclude) == ["host-1"], "it was cleared before that"


def test_one_that_is_not_given_back_yet_may_be_from_the_next_run_on() -> None:
    job = Job(spares=1).granted().running()
    fails(job, 3, LOST_GPU)
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    job.cleared = {"host-1": job.now()}
    job.everywhere = ("host-0", "host-2")
    job.granted(restarts=1).running()
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert (requeue.exclude, requeue.again) == ((), ("host-1",))


# The queue


def test_a_requeue_gives_the_hosts_back_and_keeps_them_all() -> None:
    rule = PolicyRule(name="ours", classes=("python-exception",), action="requeue")
    job = Job(policy=(rule,)).granted().running()
    (requeue,) = fails(job, 2, "shapes differ")
    assert isinstance(requeue, Requeue)
    assert (requeue.exclude, type(job.run.stage)) == ((), Queued)
    assert "(rule ours)" in requeue.reason


def test_without_a_queue_a_requeue_is_a_restart() -> None:
    rule = PolicyRule(name="ours", classes=("python-exception",), action="requeue")
    job = Job(policy=(rule,)).running()
    (start,) = fails(job, 2, "shapes differ")
    assert isinstance(start, StartAttempt)
    assert last(job).action.endswith("; there is no queue")


# The user's rules and classes


def test_the_users_rules_go_first_and_the_first_that_fits_wins() -> None:
    rules = (
        PolicyRule(name="in-checkpoints", phases=("checkpoint",), action="requeue"),
        PolicyRule(name="storage-moves", scopes=("storage",), action="replace"),
        PolicyRule(name="never", classes=("disk-*",), action="stop"),
    )
    job = Job(policy=rules, spares=1).running()
    fails(job, 3, "[Errno 28] No space left on device")
    assert decided(job) == ("disk-full", "replace", "storage-moves")


@pytest.mark.parametrize(
    ("phase", "rule"),
    [("checkpoint", "ours"), ("train", "class-default"), (None, "class-default")],
)
def test_a_rule_of_one_phase_is_for_that_phase(phase: str | None, rule: str) -> None:
    own = PolicyRule(
        name="ours", classes=("python-exception",), phases=("checkpoint",), action="stop"
    )
    job = Job(policy=(own,)).running()
    fails(job, 2, "shapes differ", phase=phase)
    assert decided(job)[2] == rule


def test_a_rule_may_count_within_a_window() -> None:
    own = PolicyRule(
        name="thrice", classes=("python-exception",), times=3, window=100.0, action="stop"
    )
    job = Job(policy=(own,), max_restarts=9).running()
    for number in range(2):
        fails(job, 2, f"no. {number}")
        job.trains()
    job.at += 100
    fails(job, 2, "after a while")
    job.trains()
    assert decided(job)[2] == "class-default"
    fails(job, 2, "again")
    job.trains()
    (end,) = fails(job, 2, "and again")
    assert isinstance(end, EndJob)
    assert decided(job) == ("python-exception", "stop", "thrice")


def test_a_class_of_the_user_decides_and_may_be_a_cause_where_ours_sees_a_symptom() -> None:
    own = FailureRule(
        name="licence-server",
        scope="fabric",
        action="stop",
        patterns=("licence .* refused",),
        advice="renew it",
    )
    message = "licence 7 refused: Connection refused"
    job = Job().running()
    fails(job, 2, message)
    assert last(job).kind == "connection-lost"
    job = Job(failure_classes=(own,)).running()
    (end,) = fails(job, 2, message)
    assert isinstance(end, EndJob)
    assert (last(job).kind, last(job).failure, last(job).advice) == (
        "exception",
        "licence-server",
        "renew it",
    )
    assert last(job).culprit.rank == 2


def test_a_class_may_be_of_an_incident_that_no_line_tells_of() -> None:
    own = FailureRule(
        name="stuck-loader", scope="storage", action="stop", kinds=("hang",), phases=("train",)
    )
    job = Job(failure_classes=(own,)).running()
    job.hangs()
    job.waits(20.0)
    job.stops()
    job.judged(None)
    assert decided(job) == ("stuck-loader", "stop", "class-stop")


def test_a_loud_peer_is_not_the_cause_whatever_its_exit_looks_like() -> None:
    """It leaves with a plain code, and only its log says that a peer went away."""
    job = Job().running()
    job.exits(0, exit_code=1, log_tail=("RuntimeError: Connection closed by peer [::1]:1",))
    job.exits(3, exit_code=9, log_tail=("segmentation fault",))
    job.stops()
    assert (last(job).culprit.rank, last(job).failure) == (3, "segfault")


def test_the_class_of_ranks_that_lost_each_other_is_what_they_said() -> None:
    job = Job().running()
    fails(job, 2, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)")
    job.waits(20.0)  # nobody has evidence of it
    job.stops()
    job.judged(None)
    assert decided(job) == ("nccl-watchdog-timeout", "restart", "transient-backoff")
    assert last(job).culprit.host is None


# Backoff


def broken_fabric(job: Job) -> tuple[Action, ...]:
    return fails(job, 2, IB, at_step=job.run.attempt.number)


def test_what_may_heal_waits_longer_each_time_and_says_so() -> None:
    job = Job(max_restarts=9).starts()
    assert isinstance(broken_fabric(job)[-1], StartAttempt)  # the first one goes at once
    waits = []
    for host in (0, 1, 0):
        job.raises(host * 2, "Temporary failure in name resolution", at_step=host)
        assert job.stops() == ()
        assert isinstance(job.run.stage, Holding)
        assert job.run.stage.deadline is not None
        wait_s = job.run.stage.deadline - job.run.stage.since
        assert job.run.stage.reason.startswith(
            f"waits {wait_s:.0f} s before attempt {job.run.attempt.number + 1},"
            " rule transient-backoff: "
        )
        assert job.run.state == "RECOVERING"
        waits.append(wait_s)
        assert job.waits(wait_s - 1) == ()
        (start,) = job.waits(1.0)
        assert isinstance(start, StartAttempt)
    assert all(
        0.75 * n <= wait_s <= 1.25 * n for wait_s, n in zip(waits, (10, 20, 40), strict=True)
    )


def test_a_step_in_between_makes_the_next_one_the_first_again() -> None:
    job = Job(max_restarts=9).running()
    for _ in range(3):
        assert isinstance(broken_fabric(job)[-1], StartAttempt)
        job.trains()


def held() -> Job:
    job = Job(max_restarts=9, spares=1).starts()
    broken_fabric(job)
    job.raises(0, "Temporary failure in name resolution")
    job.stops()
    assert isinstance(job.run.stage, Holding)
    return job


def test_a_job_that_waits_can_be_cancelled() -> None:
    job = held()
    (end,) = job.cancelled()
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")


def test_a_new_leader_goes_on_waiting() -> None:
    job = held()
    assert isinstance(job.run.stage, Holding)
    until = job.run.stage.deadline
    job.leads()
    for name in job.everywhere:
        assert job.registers(name) == ()
    assert isinstance(job.run.stage, Holding)
    assert job.run.stage.deadline == until
    (start,) = job.waits(20.0)
    assert isinstance(start, StartAttempt)


def test_an_agent_that_is_lost_meanwhile_is_replaced_and_a_spare_starts() -> None:
    job = held()
    (order,) = job.loses("host-1")
    assert isinstance(order, ReplaceAgent)
    assert isinstance(job.run.stage, Holding)
    (start,) = job.waits(20.0)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-2")


def test_a_scheduler_may_take_a_job_that_waits() -> None:
    job = Job(max_restarts=9).granted().starts()
    broken_fabric(job)
    job.raises(0, "Temporary failure in name resolution")
    job.stops()
    assert isinstance(job.run.stage, Holding)
    asked = LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM")
    (requeue,) = job.tell(asked)
    assert isinstance(requeue, Requeue)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 10_000), st.floats(0.1, 100.0), st.text(max_size=9))
def test_a_wait_is_never_beyond_its_limit_and_the_same_in_a_replay(
    times: int, attempt: int, first: float, job: str
) -> None:
    rule = PolicyRule(name="x", action="restart", backoff=first, backoff_max=120.0)
    wait_s = policy.backoff_s(rule, times, job, attempt)
    assert wait_s == policy.backoff_s(rule, times, job, attempt)
    assert 0 <= wait_s <= 120.0
    assert (wait_s == 0) == (times == 1)
    whole = min(120.0, first * 2 ** min(times - 2, 20)) if times > 1 else 0.0
    assert wait_s >= min(120.0, 0.75 * whole) - 0.1


def test_jobs_that_lost_the_same_switch_do_not_come_back_in_one_moment() -> None:
    rule = PolicyRule(name="x", action="restart", backoff=10.0)
    assert len({policy.backoff_s(rule, 3, f"job-{n}", 2) for n in range(50)}) > 30


# Budgets


def test_four_failures_without_a_step_are_a_crash_loop() -> None:
    job = Job(max_restarts=99).starts()
    for number in range(3):
        assert isinstance(fails(job, number, f"no. {number}")[-1], StartAttempt)
    (end,) = fails(job, 3, "no. 3")
    assert isinstance(end, EndJob)
    assert decided(job)[2] == "crash-loop"
    assert "python-exception, 4 times: four failures in a row without one step" in end.reason


def test_any_number_of_a_class_is_borne_as_long_as_checkpoints_are_made() -> None:
    job = Job().running()
    for number in range(12):
        job.saves(number + 1)
        assert isinstance(fails(job, 2, f"no. {number}")[-1], StartAttempt)
        job.trains()


def test_six_of_a_class_without_a_new_checkpoint_end_a_job() -> None:
    job = Job(max_restarts=99).running()
    fails(job, 2, "long ago")
    job.trains()
    job.saves(10)
    for number in range(5):
        assert isinstance(fails(job, 2, f"no. {number}")[-1], StartAttempt)
        job.trains()
    (end,) = fails(job, 2, "once more")
    assert isinstance(end, EndJob)
    assert decided(job)[2] == "class-budget"


def test_no_rule_lifts_the_budget_by_progress() -> None:
    rule = PolicyRule(name="always", action="restart")
    job = Job(policy=(rule,), max_restarts=2).running()
    for number in range(2):
        assert isinstance(fails(job, 2, f"no. {number}")[-1], StartAttempt)
    (end,) = fails(job, 2, "no. 2")
    assert isinstance(end, EndJob)
    assert decided(job)[2] == "max-restarts"


def test_a_rank_that_was_told_to_leave_before_the_scheduler_was_heard_spends_nothing() -> None:
    job = Job(max_restarts=0).granted().running()
    job.exits(2, exit_code=210)
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert (job.run.history.fruitless, job.run.ending) == (0, None)


def test_a_rank_that_nobody_says_was_told_to_leave_counts_until_the_next_checkpoint() -> None:
    """What sends signals at each start would start the job for ever."""
    job = Job(max_restarts=1).granted().running()
    for number in range(1, 4):
        job.saves(number)  # as all ranks do before they leave with 210
        job.exits(2, exit_code=210)
        job.stops()
        assert decided(job) == ("scheduler-sigterm", "restart", "scheduler-signal")
        assert job.run.history.fruitless == 1
        job.trains(number)
    job.exits(2, exit_code=210)
    (end,) = job.stops()
    assert isinstance(end, EndJob)
    assert decided(job)[2] == "max-restarts"


def test_a_person_who_submits_again_forgives_what_was_counted() -> None:
    job = Job(max_restarts=99).starts()
    for number in range(4):
        fails(job, number, f"no. {number}")
    assert job.run.state == "FAILED"
    submission = job.run.job
    assert submission is not None
    job.tell(replace(submission, at=job.now(), resume=True))
    job.starts()
    assert isinstance(fails(job, 0, "no. 4")[-1], StartAttempt)


ACTIONS = st.sampled_from(("restart", "replace", "requeue", "class"))
SCOPES = st.lists(
    st.sampled_from(("user", "rank", "host", "fabric", "storage", "scheduler")), max_size=2
)
RULES = st.builds(
    PolicyRule,
    name=st.just("drawn"),
    action=ACTIONS,
    scopes=SCOPES.map(tuple),
    same=st.sampled_from(get_args(Same)),
    times=st.integers(1, 3),
    window=st.none() | st.floats(1.0, 1e5),
    backoff=st.sampled_from((0.0, 5.0)),
)


@settings(deadline=None, max_examples=40)
@given(
    st.randoms(use_true_random=False),
    st.lists(RULES, max_size=3),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from((None, None, 300.0)),
)
def test_whatever_the_rules_say_no_budget_is_exceeded_and_every_law_holds(
    random: Random,
    rules: Sequence[PolicyRule],
    budget: int,
    shrink: bool,
    successor_s: float | None,
) -> None:
    """`Cluster`'s witness counts the starts, and knows who may be used."""
    more = {"max_restarts": budget, "shrink": shrink, "policy": tuple(rules)}
    scheduled = random.random() < 0.6
    successor = successor_s if scheduled else None
    cluster = Cluster(random, 2, 1, scheduled=scheduled, successor_s=successor, **more)
    cluster.play(40)
    run = cluster.run
    assert run.history.fruitless <= budget
    assert all(i.rule for i in run.history.incidents if i.remedy), "a decision without its rule"
    events: list[Event] = [entry.event for entry in cluster.witness.entries]
    assert fold(events) == run


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(("preempted", "time-limit", "requeued")), max_size=30))
def test_preemption_never_counts(causes: list[str]) -> None:
    job = Job(max_restarts=0).granted().running()
    for number, cause in enumerate(causes, 1):
        job.exits(1, exit_code=210)
        job.tell(LeaveAsked(at=job.now(), cause=cause, words="SIGTERM"))  # type: ignore[arg-type]
        job.stops()
        assert isinstance(job.run.stage, Queued)
        job.granted(restarts=number).running()
    assert (job.run.history.fruitless, job.run.ending) == (0, None)


# What single keys of the spec say


@pytest.mark.parametrize(
    ("key", "message", "remedy", "rule"),
    [
        ({"on_oom": "replan"}, "CUDA out of memory", "replan", "on-oom"),
        ({"on_nan": "rollback"}, "loss is nan", "rollback", "on-nan"),
        ({}, "loss is nan", "stop", "class-stop"),
    ],
)
def test_keys_of_the_spec_are_rules_before_ours(
    key: dict[str, Any], message: str, remedy: str, rule: str
) -> None:
    job = Job(**key).running()
    fails(job, 2, message)
    assert decided(job)[1:] == (remedy, rule)


# The table


def test_every_rule_of_ours_has_its_reason_and_the_last_covers_everything() -> None:
    rules = policy.default_rules()
    assert all(rule.why for rule in rules)
    assert len({rule.name for rule in rules}) == len(rules)
    final = rules[-1]
    assert (final.classes, final.scopes, final.phases, final.times) == ((), (), (), 1)


def test_a_rule_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(Invalid) as caught:
        PolicyRule(name="x", action="restart", backoff=500.0)
    assert [problem.path for problem in caught.value.problems] == ["backoff"]


def test_an_exit_tells_its_phase_to_the_class() -> None:
    job = Job().running()
    job.raises(2, "shapes differ", phase="eval")
    job.stops()
    event = next(event for event, _ in job.all if isinstance(event, RankExited))
    assert (event.phase, last(job).phase) == ("eval", "eval")


def test_hosts_that_cannot_reach_a_peer_are_never_replaced() -> None:
    job = Job(hosts=3, spares=1).granted().running()
    words = "ncclSystemError\nLast error:\nsocketStartConnect: Connect to {}<4> failed : {}"
    for times in range(2):
        for rank in range(4):
            said = words.format(f"10.0.0.{times}", "No route to host")
            job.raises(rank, said, kind="DistBackendError", at_step=times)
        job.stops()
        assert (last(job).failure, last(job).culprit.host) == ("peer-unreachable", None)
        job.waits(400)
        job.trains()
    assert not job.run.hosts.replaced


def test_an_incident_names_the_host_that_could_not_be_reached() -> None:
    alone, several = Job(hosts=1).running(), Job().running()
    for job in (alone, several):
        job.raises(0, "socketStartConnect: Connect to ::1<4> failed : No route to host")
        job.stops()
    assert last(alone).evidence.notes[-1] == "1 rank could not connect to ::1, which is host-0"
    assert last(several).evidence.notes[-1] == "1 rank could not connect to ::1", "all have it"


def test_a_job_that_recovered_is_not_ended_by_the_warning_that_its_log_still_shows() -> None:
    job = Job(hosts=2, spares=1).running()
    job.saves(30)
    warned = "the checkpoint of step 40 failed: OSError: [Errno 28] No space left on device"
    job.fails_once(0, log_tail=(warned, "step 41/60 loss 3.1"))
    assert job.run.ending is None
    assert last(job).failure == "sigkill-from-outside"


@pytest.mark.parametrize(
    ("on_oom", "profile", "rule"),
    [
        ("stop", "cpu", "class-stop"),
        ("replan", "cpu", "on-oom-cpu"),
        ("replan", "h100-sxm-80gb", "class-stop"),
    ],
)
def test_a_rank_that_the_kernel_killed_for_memory_is_not_its_hosts_fault(
    on_oom: str, profile: str, rule: str
) -> None:
    job = Job(hosts=3, on_oom=on_oom, plan=replace(plan(3), profile=profile)).running()
    job.exits(2)
    said = "[51.0] Memory cgroup out of memory: Killed process 123 (python) total-vm:1kB"
    told = EvidenceGathered(
        at=job.now(),
        attempt=1,
        host="host-1",
        ranks=(),
        kernel=(said,),
        unasked=True,
    )
    job.tell(told)
    job.stops()
    assert (last(job).failure, last(job).scope, last(job).rule) == (
        "host-out-of-memory",
        "user",
        rule,
    )
    if rule == "class-stop":
        advice = next(one.advice for one in known_classes() if one.name == "host-out-of-memory")
        assert last(job).action.endswith(advice)
