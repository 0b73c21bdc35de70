"""Remedies for too little memory (`on_oom`) and for a loss that diverges (`on_nan`)."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.contract.check_results import Finding
from orchestrator.contract.messages.actions import Action, EndJob, Replan, StartAttempt
from orchestrator.contract.messages.events import LeaderStarted, RankError, Replanned, ReplanRefused
from orchestrator.contract.plan import Memory, Plan
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.failures.oom_replan import ANSWER_S, MOST_REFITS
from orchestrator.job.failures.rollback import MOST_FROM_ONE
from tests.job.job_driver import GLOO_CLOSED, Job, plan

GIB = 1 << 30
OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of {} GiB of which"
    " 1.10 GiB is free."
)


def plan_with_peak(peak: float, hosts: int = 2) -> Plan:
    return replace(
        plan(hosts), memory=Memory(peak_bytes=int(peak * GIB), device_bytes=80 * GIB, items={})
    )


def runs_out_of_memory(job: Job, capacity: str = "79.10") -> tuple[Action, ...]:
    """Rank 1 runs out of memory, and all hosts stop."""
    step = job.run.attempt.step + 1
    job.raises(1, OOM.format(capacity), kind="OutOfMemoryError", at_step=step)
    return job.stops()


def replan_order(actions: tuple[Action, ...]) -> Replan:
    (order,) = actions
    assert isinstance(order, Replan)
    assert order.device_bytes is not None
    return order


def planner_answers(job: Job, peak: float, number: int) -> tuple[Action, ...]:
    assert job.run.plans.shortage is not None
    return job.tell(
        Replanned(
            at=job.now(),
            plan=plan_with_peak(peak, len(job.run.plan.hosts)),
            plan_number=number,
            device_bytes=job.run.plans.shortage.device_bytes,
            why="micro batch 1",
        )
    )


def planner_refuses(job: Job, *commands: str, why: str = "nothing fits") -> tuple[Action, ...]:
    assert job.run.plans.shortage is not None
    size = job.run.plans.shortage.device_bytes
    edits = tuple(command.partition("  (")[0] for command in commands)
    return job.tell(
        ReplanRefused(at=job.now(), hosts=2, why=why, device_bytes=size, ways=commands, edits=edits)
    )


def job_with_replan(**more: Any) -> Job:
    return Job(plan=plan_with_peak(70), on_oom="replan", **more).running()


# Memory


def test_a_job_that_stops_advises_the_cheapest_changes() -> None:
    job = Job(plan=plan_with_peak(70)).running()
    order = replan_order(runs_out_of_memory(job))
    assert (order.adopt, order.hosts, order.device_bytes) == (False, 2, int(0.95 * 70 * GIB))
    assert job.waits(30) == (), "no attempt starts before the planner has answered"
    commands = ("--set train.micro_batch_size=1  (66 GiB)", "--set cluster.hosts=4  (more hosts)")
    (end,) = planner_refuses(job, *commands)
    assert isinstance(end, EndJob)
    assert end.state == "FAILED"
    assert end.reason.startswith("the job was stopped: cuda-out-of-memory; ")
    assert end.reason.endswith(f"; 2 ways out are known, the cheapest {commands[0]}")
    (incident,) = job.run.history.incidents
    assert incident.failure == "cuda-out-of-memory"
    assert incident.advice == f"resume with one of: {commands[0]}; {commands[1]}"
    assert incident.edits == ("--set train.micro_batch_size=1", "--set cluster.hosts=4")
    assert f"way out: {commands[0]}" in incident.evidence.notes


OTHER_PROCESS_OOM = (
    "CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 139.80 GiB of"
    " which 3.14 GiB is free. Process 470 has 90.60 GiB memory in use. Including non-PyTorch"
    " memory, this process has 46.05 GiB memory in use. Of the allocated memory 45.14 GiB is"
    " allocated by PyTorch, and 172.30 MiB is reserved by PyTorch but unallocated."
)
"""What torch raised on an H200 where another process held memory."""


@pytest.mark.parametrize("on_oom", ["stop", "replan"])
def test_no_smaller_plan_is_proposed_if_another_process_uses_the_device(on_oom: str) -> None:
    job = Job(plan=plan_with_peak(67), on_oom=on_oom).running()
    job.raises(1, OTHER_PROCESS_OOM, kind="OutOfMemoryError", at_step=1)
    (end,) = job.stops()
    assert isinstance(end, EndJob)
    assert end.state == "FAILED"
    assert "process 470 90.6 GiB; the plan needs 67 GiB" in end.reason
    assert "`nvidia-smi` on host-0" in end.reason
    (incident,) = job.run.history.incidents
    assert not any("smaller micro batch" in note for note in incident.evidence.notes)


def test_a_smaller_plan_is_sought_if_the_plan_does_not_fit_the_empty_device() -> None:
    job = Job(plan=plan_with_peak(140)).running()
    job.raises(1, OTHER_PROCESS_OOM, kind="OutOfMemoryError", at_step=1)
    (order,) = job.stops()
    assert isinstance(order, Replan)


def test_with_replan_the_job_continues_with_a_smaller_plan() -> None:
    job = job_with_replan()
    order = replan_order(runs_out_of_memory(job))
    assert (order.adopt, order.device_bytes) == (True, int(0.95 * 70 * GIB))
    (start,) = planner_answers(job, 60, 2)
    assert isinstance(start, StartAttempt)
    assert (job.run.current.number, job.run.full.number) == (2, 2)
    job.trains()
    assert job.run.history.incidents[0].recovered_after_s is not None


def test_each_new_plan_is_smaller_and_their_number_is_limited() -> None:
    job, sizes = job_with_replan(max_restarts=20), []
    for number in range(2, 2 + MOST_REFITS):
        order = replan_order(runs_out_of_memory(job))
        assert order.adopt
        sizes.append(order.device_bytes)
        planner_answers(job, 70 - 5 * number, number)
        job.trains()
        job.saves(10 * number)
    assert all(a > b for a, b in pairwise(sizes) if a and b)
    assert all(size < peak * GIB for size, peak in zip(sizes, (70, 60, 55), strict=True) if size)
    last = replan_order(runs_out_of_memory(job))
    assert not last.adopt
    assert f"{MOST_REFITS} plans for less memory did not fit either" in last.reason
    (end,) = planner_refuses(job, "--set data.sequence_length=64  (other data: shorter sequences)")
    assert isinstance(end, EndJob)


def test_the_capacity_in_the_error_message_limits_the_new_plan() -> None:
    job = job_with_replan()
    assert replan_order(runs_out_of_memory(job, "39.50")).device_bytes == int(
        0.95 * int(39.5 * GIB)
    )


def test_a_job_ends_if_the_planner_does_not_answer_in_time() -> None:
    job = job_with_replan()
    runs_out_of_memory(job)
    assert job.waits(ANSWER_S - 10) == ()
    (end,) = job.waits(20)
    assert isinstance(end, EndJob)
    assert "the planner did not answer within 120 s" in end.reason
    assert planner_answers_late(job) == ()


def planner_answers_late(job: Job) -> tuple[Action, ...]:
    return job.tell(
        Replanned(
            at=job.now(), plan=plan_with_peak(60), plan_number=2, device_bytes=int(66.5 * GIB)
        )
    )


def test_a_replan_rule_for_a_failure_that_no_plan_fixes_ends_the_job_with_advice() -> None:
    rule = PolicyRule(name="mine", classes=("host-out-of-memory",), action="replan")
    job = Job(plan=replace(plan_with_peak(70), profile="h100-sxm-80gb"), policy=(rule,)).running()
    job.raises(1, "[Errno 12] Cannot allocate memory", kind="OSError")
    (end,) = job.stops()
    assert isinstance(end, EndJob)
    (incident,) = job.run.history.incidents
    words = "the job was stopped: no plan for the devices helps host-out-of-memory"
    assert incident.action == f"{words}; {incident.advice}"
    assert end.reason == f"{incident.action} (rule mine)"


def test_an_answer_for_another_memory_size_is_ignored() -> None:
    job = job_with_replan()
    runs_out_of_memory(job)
    late = Replanned(at=job.now(), plan=plan_with_peak(60), plan_number=2, device_bytes=5)
    assert job.tell(late) == ()
    assert job.tell(Replanned(at=job.now(), plan=plan_with_peak(60), plan_number=2)) == ()


def test_the_next_leader_asks_again_and_keeps_the_plan_that_fits() -> None:
    job = job_with_replan()
    first = replan_order(runs_out_of_memory(job))
    again = job.tell(LeaderStarted(at=job.now(), host="host-0", pid=5))
    assert replan_order(again) == first
    for name in job.all_hosts:
        job.registers(name, pid=7)
    planner_answers(job, 60, 2)
    job.trains()
    job.tell(LeaderStarted(at=job.now(), host="host-0", pid=6))
    assert job.run.current.number == 2, "the original plan still does not fit"


def test_the_advice_belongs_to_the_memory_incident_even_after_another_incident() -> None:
    job = Job(plan=plan_with_peak(70)).running()
    runs_out_of_memory(job)
    job.tell(LeaderStarted(at=job.now(), host="host-0", pid=5))
    broken = Finding(what="GPUs", verdict="stops", found="none answers")
    job.registers("host-1", pid=7, findings=(broken,))
    command = "--set train.micro_batch_size=1"
    (end,) = planner_refuses(job, command)
    assert isinstance(end, EndJob)
    memory, unfit = job.run.history.incidents
    assert (memory.edits, unfit.kind, unfit.edits) == ((command,), "preflight", ())
    assert end.reason.startswith("the job was stopped: cuda-out-of-memory; ")


def test_a_shrunk_job_keeps_the_plan_for_more_hosts() -> None:
    job = Job(hosts=3, plan=plan_with_peak(70, 3), on_oom="replan", shrink=True).running()
    job.loses("host-2")
    job.stops("host-0", "host-1")
    job.waits(60)
    job.tell(Replanned(at=job.now(), plan=plan_with_peak(79), plan_number=2))
    job.trains()
    runs_out_of_memory(job)
    planner_answers(job, 70, 3)
    assert (job.run.current.number, job.run.full.number) == (3, 1)


def test_memory_of_the_host_is_device_memory_only_for_cpu_training() -> None:
    words = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory:"
        " you tried to allocate 1152921504606846976 bytes. Error code 12 (Cannot allocate memory)"
    )
    for profile, expected in (("cpu", Replan), ("h100-sxm-80gb", EndJob)):
        job = Job(plan=replace(plan_with_peak(3), profile=profile)).running()
        job.raises(1, words, at_step=1)
        assert [type(action) for action in job.stops()] == [expected]


# A loss that is not finite, or that spikes


MESSAGES = {
    "NotFinite": "the loss is nan, not finite, and so it was for 3 steps in a row",
    "LossSpike": "the loss is 9.0000, and for 8 steps in a row it was above 4.5000",
}


def loss_diverges(job: Job, since: int, failed: int, kind: str = "NotFinite") -> tuple[Action, ...]:
    message = f"step {failed}: {MESSAGES[kind]}"
    error = RankError(error=kind, message=message, step=failed, traceback="", since=since)
    for rank in range(4):
        job.exits(rank, exit_code=79, error=error)
    return job.stops()


def job_with_checkpoints(*saves: int, **more: Any) -> Job:
    job = Job(max_restarts=20, **more).running()
    for step in saves:
        job.saves(step)
    return job


@pytest.mark.parametrize(
    ("saves", "since", "failed", "to", "skipped"),
    [
        ((20, 40), 55, 57, 40, (41, 57)),
        ((20, 40, 56), 55, 57, 40, (41, 57)),
        ((20, 40), 41, 43, 40, (41, 43)),
        ((), 3, 5, 0, (1, 5)),
    ],
)
def test_a_rollback_goes_to_the_checkpoint_before_the_first_bad_step(
    saves: tuple[int, ...], since: int, failed: int, to: int, skipped: tuple[int, int]
) -> None:
    job = job_with_checkpoints(*saves, on_nan="rollback")
    (start,) = loss_diverges(job, since, failed)
    assert isinstance(start, StartAttempt)
    assert start.skip == (Window(first=skipped[0], last=skipped[1]),)
    assert (job.run.progress.saved, job.run.progress.skipped) == (to, start.skip)
    (incident,) = job.run.history.incidents
    assert (incident.failure, incident.culprit) == ("nan-loss", NOBODY)
    assert f"skipping batches {skipped[0]} to {skipped[1]} of the data" in incident.action
    job.trains(to)
    job.saves(to + 10)
    assert (job.run.progress.saved, job.run.history.fruitless) == (to + 10, 0)


def test_no_data_is_skipped_without_a_checkpoint_from_before_the_first_bad_step() -> None:
    """A rollback to the beginning would skip all data that was read."""
    job = job_with_checkpoints(10, 20, on_nan="rollback")
    (end,) = loss_diverges(job, since=5, failed=22)
    assert isinstance(end, EndJob)
    assert "no rollback, no checkpoint from before step 5 is known" in end.reason
    assert (job.run.progress.skipped, job.run.progress.saved) == ((), 20)


def test_a_checkpoint_of_the_first_bad_step_is_not_used() -> None:
    job = job_with_checkpoints(10, 20, on_nan="rollback")
    (start,) = loss_diverges(job, since=20, failed=22)
    assert isinstance(start, StartAttempt)
    assert (job.run.progress.saved, start.skip) == (10, (Window(first=11, last=22),))


def test_a_peer_that_reports_first_does_not_hide_since_when_the_loss_was_bad() -> None:
    """Seed 100689 of the simulation: the checkpoint of step 6 was taken for a good one."""
    job = job_with_checkpoints(2, 4, on_nan="rollback")
    job.raises(3, GLOO_CLOSED, at_step=8)
    text = f"step 8: {MESSAGES['NotFinite']}"
    error = RankError(error="NotFinite", message=text, step=8, traceback="", since=6)
    job.exits(2, exit_code=79, error=error)
    job.saves(6)
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert (job.run.progress.saved, start.skip) == (4, (Window(first=5, last=8),))


def test_a_failure_before_the_first_step_is_not_rolled_back() -> None:
    rule = PolicyRule(name="all-back", action="rollback")
    job = Job(policy=(rule,)).running()
    error = RankError(error="KeyError", message="'input_ids'", step=0, traceback="")
    for rank in range(4):
        job.exits(rank, error=error)
    (end,) = job.stops()
    assert isinstance(end, EndJob)
    assert "no rollback, it failed before its first step" in end.reason


def test_a_loss_spike_is_rolled_back_and_a_second_window_counts_the_first() -> None:
    job = job_with_checkpoints(40, on_nan="rollback")
    loss_diverges(job, 50, 52, "LossSpike")
    assert job.run.history.incidents[0].failure == "loss-spike"
    job.trains(40)
    job.saves(60)  # by this step the job has read batches 1-40 and 53-72
    (start,) = loss_diverges(job, 65, 67)
    assert isinstance(start, StartAttempt)
    assert start.skip == (Window(first=41, last=52), Window(first=73, last=79))


def test_a_second_rollback_to_the_same_checkpoint_skips_the_whole_window() -> None:
    job = job_with_checkpoints(40, on_nan="rollback")
    loss_diverges(job, 50, 52)
    job.trains(40)
    (start,) = loss_diverges(job, 44, 45)
    assert isinstance(start, StartAttempt)
    assert start.skip == (Window(first=41, last=57),)


def test_a_loss_that_diverges_with_other_data_too_ends_the_job() -> None:
    job = job_with_checkpoints(40, on_nan="rollback")
    loss_diverges(job, 50, 52)
    job.trains(40)
    (end,) = loss_diverges(job, 50, 52)
    assert isinstance(end, EndJob)
    assert "the loss diverged at step 50 with other data too" in end.reason
    job = job_with_checkpoints(40, on_nan="rollback")
    for turn in range(MOST_FROM_ONE):
        assert isinstance(loss_diverges(job, 60 - turn, 70)[0], StartAttempt)
        job.trains(40)
    (end,) = loss_diverges(job, 41, 42)
    assert isinstance(end, EndJob)
    assert f"{MOST_FROM_ONE} rollbacks to checkpoint step-40 did not help" in end.reason


def test_without_on_nan_the_job_stops_at_once_and_advises_a_rollback() -> None:
    for kind, name in (("NotFinite", "nan-loss"), ("LossSpike", "loss-spike")):
        job = job_with_checkpoints(40)
        (end,) = loss_diverges(job, 50, 52, kind)
        assert isinstance(end, EndJob)
        assert (end.state, job.run.history.incidents[0].failure) == ("FAILED", name)
        assert "resume from " in end.reason
        assert job.run.history.incidents[0].edits == ("--set resilience.on_nan=rollback",)


def test_the_advised_key_lets_a_resumed_job_continue() -> None:
    job = job_with_checkpoints(40)
    loss_diverges(job, 50, 52)
    submission = job.run.job
    assert submission is not None
    job.tell(replace(submission, at=job.now(), resume=True, on_nan="rollback"))
    job.running()
    (start,) = loss_diverges(job, 50, 52)
    assert isinstance(start, StartAttempt)
    assert start.skip == (Window(first=41, last=52),)


def test_no_key_is_advised_that_a_rule_of_the_spec_overrides() -> None:
    mine = PolicyRule(name="mine", classes=("nan-loss",), action="stop")
    job = job_with_checkpoints(40, policy=(mine,))
    loss_diverges(job, 50, 52)
    assert job.run.history.incidents[0].edits == ()


def test_a_new_leader_keeps_the_skipped_windows() -> None:
    job = job_with_checkpoints(40, on_nan="rollback")
    loss_diverges(job, 50, 52)
    job.tell(LeaderStarted(at=job.now(), host="host-0", pid=5))
    assert job.run.progress.skipped == (Window(first=41, last=52),)
