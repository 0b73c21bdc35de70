"""Which policy rule decides about a failure, and which remedy follows."""

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
from orchestrator.contract.spec.failures import FailureRule, Remedy
from orchestrator.contract.spec.policy import PolicyRule, Same
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.diagnosis.classes import default_rules as known_classes
from orchestrator.errors import SpecError
from orchestrator.job.failures import policy
from orchestrator.job.incident import Incident
from orchestrator.job.stage import Holding, Queued, Waiting
from orchestrator.job.transitions import fold
from orchestrator.load import load_spec
from tests.job.fake_cluster import Cluster
from tests.job.job_driver import Job, drills, plan

IB = "NET/IB : Got completion from peer 10.0.0.2<4> with status=12 opcode=0 len=0 vendor err 129"


def fails(job: Job, rank: int, message: str, **more: object) -> tuple[Action, ...]:
    """A rank raises, and all hosts stop."""
    job.raises(rank, message, **more)
    return job.stops()


def last_incident(job: Job) -> Incident:
    return job.run.history.incidents[-1]


def decision(job: Job) -> tuple[str, str | None, str]:
    incident = last_incident(job)
    return incident.failure, incident.remedy, incident.rule


# By class


@pytest.mark.parametrize(
    ("message", "name", "rule"),
    [
        ("[Errno 28] No space left on device", "disk-full", "class-stop"),
        ("[Errno 13] Permission denied: '/data'", "permission", "class-stop"),
    ],
)
def test_a_failure_that_a_restart_cannot_fix_ends_the_job_with_advice(
    message: str, name: str, rule: str
) -> None:
    job = Job().running()
    (end,) = fails(job, 2, message)
    assert isinstance(end, EndJob)
    assert decision(job) == (name, "stop", rule)
    assert end.reason.endswith(f"; {last_incident(job).advice} (rule {rule})")
    assert end.reason.startswith(f"the job was stopped: {name}; ")
    assert message not in end.reason, "the message belongs to the cause"
    assert message in last_incident(job).cause


def test_a_python_exception_restarts_on_the_same_hosts() -> None:
    job = Job().running()
    (start,) = fails(job, 2, "shapes differ")
    assert isinstance(start, StartAttempt)
    assert decision(job) == ("python-exception", "restart", "class-default")


# Excluded hosts

LOST_GPU = "CUDA error: device is lost"


def test_a_broken_device_is_a_strike_even_if_the_job_ends() -> None:
    job = Job(max_restarts=0).running()
    (end,) = fails(job, 3, LOST_GPU)
    assert isinstance(end, EndJob)
    assert decision(job)[:2] == ("gpu-lost", "stop")
    assert last_incident(job).culprit.host == "host-1"
    assert policy.strike_weight(last_incident(job)) == 1.0


def test_a_broken_device_moves_the_job_to_the_spare() -> None:
    job = Job(spares=1).running()
    (start,) = fails(job, 3, LOST_GPU)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    assert decision(job) == ("gpu-lost", "replace", "class-default")
    assert last_incident(job).action == (
        "restart as attempt 2 from the beginning: no checkpoint yet; host-1 is excluded: a spare"
        " takes its place"
    )


def test_a_pinned_host_stays_after_any_failure() -> None:
    job = Job(spares=1).granted()
    job.always = ("host-1",)
    job.running()
    (start,) = fails(job, 3, LOST_GPU)
    assert isinstance(start, StartAttempt)
    assert (start.hosts, job.run.hosts.exclude) == (("host-0", "host-1"), {})
    assert last_incident(job).remedy == "restart"
    assert last_incident(job).action.endswith("; host-1 stays, as it is pinned")


def test_the_next_leader_does_not_use_a_replaced_host() -> None:
    job = Job(spares=1).granted().running()
    fails(job, 3, LOST_GPU)
    assert list(job.run.hosts.exclude) == ["host-1"]
    job.leads()
    assert list(job.run.hosts.exclude) == ["host-1"]
    job.always = ("host-1",)
    job.leads()
    assert job.run.hosts.exclude == {}, "a person pinned the host"


def test_without_a_spare_a_job_with_shrink_continues_on_fewer_hosts() -> None:
    job = Job(shrink=True).granted().running()
    (replan,) = fails(job, 3, LOST_GPU)
    assert isinstance(replan, Replan)
    assert replan.hosts == 1
    assert "the job continues with fewer hosts" in last_incident(job).action


def test_without_spare_and_shrink_the_requeue_excludes_the_host() -> None:
    job = Job().granted().running()
    (requeue,) = fails(job, 3, LOST_GPU)
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    assert job.run.history.fruitless == 1


def test_a_scheduler_that_replaces_hosts_is_asked_for_another_host() -> None:
    job = Job().granted(successor_s=300.0).running()
    (order,) = fails(job, 3, LOST_GPU)
    assert order == ReplaceAgent(host="host-1", reason=order.reason, elsewhere=True)
    (start,) = job.registers("host-7")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-7")


def test_a_suspected_host_without_replacement_stays_and_the_incident_says_so() -> None:
    job = Job().running()
    (start,) = fails(job, 3, LOST_GPU)
    assert isinstance(start, StartAttempt)
    assert decision(job)[1] == "restart"
    assert "host-1 stays" in last_incident(job).action


def test_a_suspected_host_is_used_if_there_is_no_other() -> None:
    """The spare that replaced it is lost too, and there is no scheduler to ask."""
    job = Job(spares=1, init_timeout=60.0).running()
    fails(job, 3, LOST_GPU)
    job.trains()
    job.loses("host-2")
    job.stops("host-0")
    assert isinstance(job.run.stage, Waiting)
    (start,) = job.waits(40.0)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_two_failures_on_one_host_within_a_day_replace_the_host() -> None:
    job = Job(spares=1).running()
    for message in ("an illegal memory access was encountered", "device-side assert triggered"):
        fails(job, 3, message)
        job.trains()
    assert decision(job) == ("illegal-memory-access", "replace", "repeat-on-host")
    assert job.run.attempt.placement == ("host-0", "host-2")


@pytest.mark.parametrize("second", [{"rank": 0}, {"later": 86_401.0}], ids=["elsewhere", "later"])
def test_two_failures_on_two_hosts_or_two_days_replace_no_host(second: dict[str, float]) -> None:
    job = Job(spares=1).running()
    fails(job, 3, "an illegal memory access was encountered")
    job.trains()
    job.at += second.get("later", 0.0)
    fails(job, int(second.get("rank", 3)), "device-side assert triggered")
    assert decision(job)[2] == "class-default"
    assert job.run.hosts.exclude == {}


def fails_twice_on_host_1(job: Job) -> Sequence[Action]:
    """Two incidents on host-1, of different classes that hardware causes."""
    job.exits(3, signal=7)
    job.stops()
    job.trains()
    job.hangs()
    job.judged(3)
    return job.stops()


def test_a_second_strike_of_any_class_replaces_the_host_and_the_incident_says_so() -> None:
    job = Job().granted().running()
    (requeue,) = fails_twice_on_host_1(job)
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    assert decision(job) == ("hang", "replace", "second-strike")
    assert last_incident(job).action.endswith(
        "; host-1 is excluded: the job is requeued for another host"
    )
    job.granted(restarts=1).leads()
    assert list(job.run.hosts.exclude) == ["host-1"]


def test_a_rule_of_the_user_overrides_a_second_strike_for_the_next_leader_too() -> None:
    own = PolicyRule(name="ours", classes=("hang", "segfault"), action="restart")
    job = Job(policy=(own,), spares=1).granted().running()
    (start,) = fails_twice_on_host_1(job)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")
    assert decision(job) == ("hang", "restart", "ours")
    job.leads()
    assert job.run.hosts.exclude == {}


def test_an_unexplained_kill_is_not_a_first_strike() -> None:
    """A `kill -9` by a person and a hang do not have the same host as their cause."""
    job = Job(spares=1).granted().running()
    job.exits(3, signal=9)
    job.stops()
    job.trains()
    job.hangs()
    job.judged(3)
    job.stops()
    assert decision(job) == ("hang", "restart", "class-default")
    job.trains()
    job.exits(3, signal=9)
    job.stops()
    assert decision(job) == ("sigkill-from-outside", "restart", "class-default")
    assert job.run.hosts.exclude == {}


def test_four_unexplained_kills_on_one_host_replace_the_host() -> None:
    job = Job(spares=1, max_restarts=9).granted().running()
    rules = []
    for _ in range(4):
        job.exits(3, signal=9)
        job.stops()
        rules.append(last_incident(job).rule)
        job.trains()
    assert rules == ["class-default"] * 3 + ["repeated-kills-on-host"]
    assert job.run.attempt.placement == ("host-0", "host-2")


@pytest.mark.parametrize("no_strike", ["drill", "user-code"])
def test_an_incident_without_strike_does_not_make_the_next_one_the_second(no_strike: str) -> None:
    job = Job(spares=1, drills=drills("kill:rank=3@step=2")).granted().running()
    if no_strike == "drill":
        job.drill(1)
        job.exits(3)
    else:
        job.raises(3, "shapes differ")
    job.stops()
    job.trains()
    job.hangs()
    job.judged(3)
    job.stops()
    assert decision(job) == ("hang", "restart", "class-default")
    job.trains()
    job.exits(3, signal=11)
    job.stops()
    assert decision(job) == ("segfault", "restart", "class-default"), (
        "the segfault is the first strike"
    )


def test_a_host_that_a_person_cleared_is_used_again_and_has_no_strikes() -> None:
    job = Job(max_restarts=9).granted().running()
    fails_twice_on_host_1(job)
    job.cleared = {"host-1": job.now()}
    job.granted(restarts=1).running()
    assert (job.run.hosts.exclude, job.run.attempt.placement) == ({}, ("host-0", "host-1"))
    job.hangs()
    job.judged(3)
    job.stops()
    assert decision(job) == ("hang", "restart", "class-default"), "earlier strikes do not count"
    job.trains()
    job.hangs()
    job.judged(3)
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    job.granted(restarts=2).leads()
    assert list(job.run.hosts.exclude) == ["host-1"], "the host was cleared before this failure"


def test_a_host_cleared_during_an_allocation_without_it_is_released_at_the_next_requeue() -> None:
    job = Job(spares=1).granted().running()
    fails(job, 3, LOST_GPU)
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    job.cleared = {"host-1": job.now()}
    job.all_hosts = ("host-0", "host-2")
    job.granted(restarts=1).running()
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert (requeue.exclude, requeue.again) == ((), ("host-1",))


# Requeue


def test_a_requeue_by_a_rule_excludes_no_host() -> None:
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
    assert last_incident(job).action.endswith("; there is no queue")


# Rules and failure classes of the user


def test_the_first_matching_rule_of_the_user_decides() -> None:
    rules = (
        PolicyRule(name="in-checkpoints", phases=("checkpoint",), action="requeue"),
        PolicyRule(name="storage-moves", scopes=("storage",), action="replace"),
        PolicyRule(name="never", classes=("disk-*",), action="stop"),
    )
    job = Job(policy=rules, spares=1).running()
    fails(job, 3, "[Errno 28] No space left on device")
    assert decision(job) == ("disk-full", "replace", "storage-moves")


@pytest.mark.parametrize(
    ("phase", "rule"),
    [("checkpoint", "ours"), ("train", "class-default"), (None, "class-default")],
)
def test_a_rule_for_one_phase_applies_to_that_phase_only(phase: str | None, rule: str) -> None:
    own = PolicyRule(
        name="ours", classes=("python-exception",), phases=("checkpoint",), action="stop"
    )
    job = Job(policy=(own,)).running()
    fails(job, 2, "shapes differ", phase=phase)
    assert decision(job)[2] == rule


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
    assert decision(job)[2] == "class-default"
    fails(job, 2, "again")
    job.trains()
    (end,) = fails(job, 2, "and again")
    assert isinstance(end, EndJob)
    assert decision(job) == ("python-exception", "stop", "thrice")


def test_a_class_of_the_user_may_make_a_cause_of_a_default_symptom() -> None:
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
    assert last_incident(job).kind == "connection-lost"
    job = Job(failure_classes=(own,)).running()
    (end,) = fails(job, 2, message)
    assert isinstance(end, EndJob)
    assert (last_incident(job).kind, last_incident(job).failure, last_incident(job).advice) == (
        "exception",
        "licence-server",
        "renew it",
    )
    assert last_incident(job).culprit.rank == 2


def test_a_class_may_match_an_incident_by_its_kind_without_a_log_line() -> None:
    own = FailureRule(
        name="stuck-loader", scope="storage", action="stop", kinds=("hang",), phases=("train",)
    )
    job = Job(failure_classes=(own,)).running()
    job.hangs()
    job.waits(20.0)
    job.stops()
    job.judged(None)
    assert decision(job) == ("stuck-loader", "stop", "class-stop")


def test_a_rank_that_only_lost_its_peer_is_not_the_cause() -> None:
    """Its exit code is unspecific; only its log says that the connection to a peer closed."""
    job = Job().running()
    job.exits(0, exit_code=1, log_tail=("RuntimeError: Connection closed by peer [::1]:1",))
    job.exits(3, exit_code=9, log_tail=("segmentation fault",))
    job.stops()
    assert (last_incident(job).culprit.rank, last_incident(job).failure) == (3, "segfault")


def test_ranks_that_only_lost_each_other_get_the_class_of_their_message() -> None:
    job = Job().running()
    fails(job, 2, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)")
    job.waits(20.0)  # no agent has evidence
    job.stops()
    job.judged(None)
    assert decision(job) == ("nccl-watchdog-timeout", "restart", "transient-backoff")
    assert last_incident(job).culprit.host is None


# Backoff


def broken_fabric(job: Job) -> tuple[Action, ...]:
    return fails(job, 2, IB, at_step=job.run.attempt.number)


def test_a_transient_failure_waits_longer_each_time_and_the_reason_says_so() -> None:
    job = Job(max_restarts=9).starts()
    assert isinstance(broken_fabric(job)[-1], StartAttempt)  # the first restart does not wait
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


def test_a_step_resets_the_backoff() -> None:
    job = Job(max_restarts=9).running()
    for _ in range(3):
        assert isinstance(broken_fabric(job)[-1], StartAttempt)
        job.trains()


def waiting_job() -> Job:
    job = Job(max_restarts=9, spares=1).starts()
    broken_fabric(job)
    job.raises(0, "Temporary failure in name resolution")
    job.stops()
    assert isinstance(job.run.stage, Holding)
    return job


def test_a_job_can_be_cancelled_during_the_backoff() -> None:
    job = waiting_job()
    (end,) = job.cancelled()
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")


def test_a_new_leader_continues_the_backoff() -> None:
    job = waiting_job()
    assert isinstance(job.run.stage, Holding)
    until = job.run.stage.deadline
    job.leads()
    for name in job.all_hosts:
        assert job.registers(name) == ()
    assert isinstance(job.run.stage, Holding)
    assert job.run.stage.deadline == until
    (start,) = job.waits(20.0)
    assert isinstance(start, StartAttempt)


def test_an_agent_lost_during_the_backoff_is_replaced_and_a_spare_is_used() -> None:
    job = waiting_job()
    (order,) = job.loses("host-1")
    assert isinstance(order, ReplaceAgent)
    assert isinstance(job.run.stage, Holding)
    (start,) = job.waits(20.0)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-2")


def test_a_job_leaves_during_the_backoff_if_the_scheduler_asks() -> None:
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
def test_a_backoff_is_within_its_limit_and_equal_in_a_replay(
    times: int, attempt: int, first: float, job: str
) -> None:
    rule = PolicyRule(name="x", action="restart", backoff=first, backoff_max=120.0)
    wait_s = policy.backoff_s(rule, times, job, attempt)
    assert wait_s == policy.backoff_s(rule, times, job, attempt)
    assert 0 <= wait_s <= 120.0
    assert (wait_s == 0) == (times == 1)
    whole = min(120.0, first * 2 ** min(times - 2, 20)) if times > 1 else 0.0
    assert wait_s >= min(120.0, 0.75 * whole) - 0.1


def test_jobs_that_lost_the_same_switch_restart_at_different_times() -> None:
    rule = PolicyRule(name="x", action="restart", backoff=10.0)
    assert len({policy.backoff_s(rule, 3, f"job-{n}", 2) for n in range(50)}) > 30


# Budgets


def test_four_failures_without_a_step_are_a_crash_loop() -> None:
    job = Job(max_restarts=99).starts()
    for number in range(3):
        assert isinstance(fails(job, number, f"no. {number}")[-1], StartAttempt)
    (end,) = fails(job, 3, "no. 3")
    assert isinstance(end, EndJob)
    assert decision(job)[2] == "crash-loop"
    assert end.reason.startswith(
        "the job was stopped: rank 3 on host-1 raised RuntimeError: no. 3 at step 10 (class"
        " python-exception), and 3 failures before it: four failures in a row without one step"
    )


def exits_six_times(*ranks: int) -> str:
    """The reason why the job ended after these ranks, one by one, exited with code 3."""
    job = Job(max_restarts=99).running()
    for rank in ranks:
        job.exits(rank, exit_code=3, signal=None)
        *_, end = job.stops()
        if isinstance(end, StartAttempt):
            job.trains()
    assert isinstance(end, EndJob)
    return end.reason


def test_failures_that_were_alike_are_told_with_rank_host_and_number() -> None:
    reason = exits_six_times(3, 3, 3, 3, 3, 3)
    assert reason.startswith(
        "the job was stopped: rank 3 on host-1 exited with code 3, 6 times: six failures"
    )


def test_failures_of_several_ranks_are_not_told_as_those_of_one() -> None:
    reason = exits_six_times(0, 3, 3, 3, 3, 3)
    assert reason.startswith(
        "the job was stopped: rank 3 on host-1 exited with code 3, and 5 failures before it: six"
    )


def test_hangs_are_told_with_their_phase_and_culprit() -> None:
    job = Job(max_restarts=99).running()
    for _ in range(6):
        job.hangs()
        job.judged(None)
        *_, end = job.stops()
        if isinstance(end, StartAttempt):
            job.trains()
    assert isinstance(end, EndJob)
    assert end.reason.startswith(
        "the job was stopped: hang in phase train (no culprit), 6 times: six failures"
    )


def test_any_number_of_failures_is_allowed_while_checkpoints_are_saved() -> None:
    job = Job().running()
    for number in range(12):
        job.saves(number + 1)
        assert isinstance(fails(job, 2, f"no. {number}")[-1], StartAttempt)
        job.trains()


def test_six_failures_of_a_class_without_a_new_checkpoint_end_the_job() -> None:
    job = Job(max_restarts=99).running()
    fails(job, 2, "long ago")
    job.trains()
    job.saves(10)
    for number in range(5):
        assert isinstance(fails(job, 2, f"no. {number}")[-1], StartAttempt)
        job.trains()
    (end,) = fails(job, 2, "once more")
    assert isinstance(end, EndJob)
    assert decision(job)[2] == "class-budget"


def test_no_rule_overrides_max_restarts() -> None:
    rule = PolicyRule(name="always", action="restart")
    job = Job(policy=(rule,), max_restarts=2).running()
    for number in range(2):
        assert isinstance(fails(job, 2, f"no. {number}")[-1], StartAttempt)
    (end,) = fails(job, 2, "no. 2")
    assert isinstance(end, EndJob)
    assert decision(job)[2] == "max-restarts"


def test_a_rank_that_exits_on_a_signal_before_the_request_to_leave_spends_no_budget() -> None:
    job = Job(max_restarts=0).granted().running()
    job.exits(2, exit_code=210)
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert (job.run.history.fruitless, job.run.ending) == (0, None)


def test_a_rank_that_exits_on_a_signal_without_a_request_to_leave_spends_budget() -> None:
    """Otherwise a program that signals ranks at each start would restart the job for ever."""
    job = Job(max_restarts=1).granted().running()
    for number in range(1, 4):
        job.saves(number)  # as all ranks do before they leave with 210
        job.exits(2, exit_code=210)
        job.stops()
        assert decision(job) == ("scheduler-sigterm", "restart", "scheduler-signal")
        assert job.run.history.fruitless == 1
        job.trains(number)
    job.exits(2, exit_code=210)
    (end,) = job.stops()
    assert isinstance(end, EndJob)
    assert decision(job)[2] == "max-restarts"


def test_submitting_again_resets_the_crash_loop() -> None:
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
def test_with_any_rules_no_budget_is_exceeded_and_every_law_holds(
    random: Random,
    rules: Sequence[PolicyRule],
    budget: int,
    shrink: bool,
    successor_s: float | None,
) -> None:
    """The law checker of `Cluster` counts the starts, and knows which hosts may be used."""
    more = {"max_restarts": budget, "shrink": shrink, "policy": tuple(rules)}
    scheduled = random.random() < 0.6
    successor = successor_s if scheduled else None
    cluster = Cluster(random, 2, 1, scheduled=scheduled, successor_s=successor, **more)
    cluster.play(40)
    run = cluster.run
    assert run.history.fruitless <= budget
    assert all(i.rule for i in run.history.incidents if i.remedy), "a decision has no rule"
    events: list[Event] = [entry.event for entry in cluster.checker.entries]
    assert fold(events) == run


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(("preempted", "time-limit", "requeued")), max_size=30))
def test_preemption_spends_no_budget(causes: list[str]) -> None:
    job = Job(max_restarts=0).granted().running()
    for number, cause in enumerate(causes, 1):
        job.exits(1, exit_code=210)
        job.tell(LeaveAsked(at=job.now(), cause=cause, words="SIGTERM"))  # type: ignore[arg-type]
        job.stops()
        assert isinstance(job.run.stage, Queued)
        job.granted(restarts=number).running()
    assert (job.run.history.fruitless, job.run.ending) == (0, None)


# Keys of the spec that are rules


@pytest.mark.parametrize(
    ("key", "message", "remedy", "rule"),
    [
        ({"on_oom": "replan"}, "CUDA out of memory", "replan", "on-oom"),
        ({"on_nan": "rollback"}, "loss is nan", "rollback", "on-nan"),
        ({}, "loss is nan", "stop", "class-stop"),
    ],
)
def test_keys_of_the_spec_override_the_default_rules(
    key: dict[str, Any], message: str, remedy: str, rule: str
) -> None:
    job = Job(**key).running()
    fails(job, 2, message)
    assert decision(job)[1:] == (remedy, rule)


# The table


def test_every_default_rule_has_a_reason_and_the_last_one_matches_everything() -> None:
    rules = policy.default_rules()
    assert all(rule.why for rule in rules)
    assert len({rule.name for rule in rules}) == len(rules)
    final = rules[-1]
    assert (final.classes, final.scopes, final.phases, final.times) == ((), (), (), 1)


def test_a_rule_whose_backoff_exceeds_its_maximum_is_refused() -> None:
    with pytest.raises(Invalid) as caught:
        PolicyRule(name="x", action="restart", backoff=500.0)
    assert [problem.path for problem in caught.value.problems] == ["backoff"]


def test_an_incident_has_the_phase_of_the_exit() -> None:
    job = Job().running()
    job.raises(2, "shapes differ", phase="eval")
    job.stops()
    event = next(event for event, _ in job.all if isinstance(event, RankExited))
    assert (event.phase, last_incident(job).phase) == ("eval", "eval")


def test_hosts_that_cannot_reach_a_peer_are_never_replaced() -> None:
    job = Job(hosts=3, spares=1).granted().running()
    words = "ncclSystemError\nLast error:\nsocketStartConnect: Connect to {}<4> failed : {}"
    for times in range(2):
        for rank in range(4):
            message = words.format(f"10.0.0.{times}", "No route to host")
            job.raises(rank, message, kind="DistBackendError", at_step=times)
        job.stops()
        assert (last_incident(job).failure, last_incident(job).culprit.host) == (
            "peer-unreachable",
            None,
        )
        job.waits(400)
        job.trains()
    assert not job.run.hosts.replaced


def test_an_incident_names_the_host_that_could_not_be_reached() -> None:
    alone, several = Job(hosts=1).running(), Job().running()
    for job in (alone, several):
        job.raises(0, "socketStartConnect: Connect to ::1<4> failed : No route to host")
        job.stops()
    assert (
        last_incident(alone).evidence.notes[-1]
        == "1 rank could not connect to ::1, which is host-0"
    )
    assert last_incident(several).evidence.notes[-1] == "1 rank could not connect to ::1", (
        "every host of the job may have ::1"
    )


def test_an_old_warning_in_the_log_does_not_end_the_job() -> None:
    job = Job(hosts=2, spares=1).running()
    job.saves(30)
    warned = "the checkpoint of step 40 failed: OSError: [Errno 28] No space left on device"
    job.fails_once(0, log_tail=(warned, "step 41/60 loss 3.1"))
    assert job.run.ending is None
    assert last_incident(job).failure == "sigkill-from-outside"


@pytest.mark.parametrize(
    ("on_oom", "profile", "rule"),
    [
        ("stop", "cpu", "class-stop"),
        ("replan", "cpu", "on-oom-cpu"),
        ("replan", "h100-sxm-80gb", "class-stop"),
    ],
)
def test_a_rank_killed_by_the_kernel_for_memory_is_no_fault_of_its_host(
    on_oom: str, profile: str, rule: str
) -> None:
    job = Job(hosts=3, on_oom=on_oom, plan=replace(plan(3), profile=profile)).running()
    job.exits(2)
    message = "[51.0] Memory cgroup out of memory: Killed process 123 (python) total-vm:1kB"
    evidence = EvidenceGathered(
        at=job.now(),
        attempt=1,
        host="host-1",
        ranks=(),
        kernel=(message,),
        unasked=True,
    )
    job.tell(evidence)
    job.stops()
    assert (last_incident(job).failure, last_incident(job).scope, last_incident(job).rule) == (
        "host-out-of-memory",
        "user",
        rule,
    )
    if rule == "class-stop":
        advice = next(one.advice for one in known_classes() if one.name == "host-out-of-memory")
        assert last_incident(job).action.endswith(advice)


# A program of the user


OWN = "{name: own, run: {script: train.py}, cluster: {backend: local, hosts: 1, gpus_per_host: 1}}"


def own_program() -> Job:
    planned = replace(plan(), memory=None)
    return Job(steps=0, run=RunSpec(script="train.py"), plan=planned).running()


def test_each_way_to_go_on_that_is_advised_for_a_program_is_accepted_for_it() -> None:
    job = own_program()
    fails(job, 1, "no known message")
    for name in {one.name for one in known_classes()}:
        incident = replace(last_incident(job), failure=name)
        for action in get_args(Remedy):
            decided = policy.Decision(action=action, rule="class-default", reason="")
            for words in policy.ways_to_go_on(job.run, incident, decided):
                load_spec(OWN, "spec.yaml", words.replace("--set ", "").split())


def test_settings_of_the_trainer_are_refused_for_a_program() -> None:
    with pytest.raises(SpecError, match="on_nan: must be left out beside run"):
        load_spec(OWN, "spec.yaml", policy.ROLLBACK.removeprefix("--set ").split())


def test_the_advice_for_a_full_gpu_of_a_program_does_not_lead_to_ndctl_plan() -> None:
    """The plan of a program says nothing about memory."""
    job = own_program()
    (end,) = fails(job, 1, "CUDA out of memory. Tried to allocate 2 GiB", kind="OutOfMemoryError")
    assert decision(job) == ("cuda-out-of-memory", "stop", "class-stop")
    assert isinstance(end, EndJob)
    for said in (end.reason, last_incident(job).advice):
        assert "use a smaller micro batch" in said
        assert "ndctl plan" not in said
