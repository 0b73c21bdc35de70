"""An attempt is stopped early: ranks that do not end, hangs and their evidence, drills."""

import pytest
from msgspec.structs import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.actions import (
    EndJob,
    GatherEvidence,
    JudgeHang,
    ReplaceAgent,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import EvidenceGathered, HostLeaving
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.attempt_end import JUDGE_S, MOST_EXITS
from orchestrator.job.failures.policy import strike_weight
from orchestrator.job.stage import Diagnosing, Running, Stage, Starting, Stopping, Waiting
from orchestrator.job.state import pace_of
from tests.job.job_driver import Job, drills, error, found

# Stopping


def test_agents_whose_ranks_do_not_end_are_replaced() -> None:
    job = Job().running()
    job.exits(1)
    job.stops("host-0")
    assert job.waits(16) == ()
    (order,) = job.waits(1)
    assert isinstance(order, ReplaceAgent)
    assert order.host == "host-1"
    assert not job.run.hosts.by_name["host-1"].alive
    assert job.run.history.incidents[0].kind == "rank-killed"
    (stop,) = job.registers("host-1")
    assert isinstance(stop, StopAttempt), "the same agent still runs those ranks"
    assert isinstance(job.registers("host-1", pid=2)[-1], StartAttempt)


def test_an_exit_of_torchrun_without_a_failed_rank_is_a_failed_launch() -> None:
    job = Job().starts()
    (stop,) = job.stops("host-1", why="torchrun ended with code 1\nno such module")
    assert isinstance(stop, StopAttempt)
    job.stops("host-0")
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit.host) == ("launch-failed", "host-1")
    assert incident.evidence.log_tail[-1] == "no such module"


def test_a_hang_after_which_all_ranks_finish_is_no_incident() -> None:
    job = Job().running()
    job.hangs()
    job.waits(6)
    (end,) = job.stops(finished=True)
    assert isinstance(end, EndJob)
    assert (end.state, job.run.history.incidents) == ("SUCCEEDED", ())


def test_a_cause_that_is_reported_after_many_symptoms_is_kept() -> None:
    job = Job(hosts=100).running()
    for rank in range(MOST_EXITS):
        job.raises(rank, "Connection closed by peer")
    job.raises(MOST_EXITS, "Connection closed by peer")
    job.raises(150, "shapes differ")
    assert job.run.interruption.findings is not None
    assert len(job.run.interruption.findings.exits) == MOST_EXITS
    job.stops()
    assert job.run.history.incidents[0].culprit.rank == 150


def test_the_first_of_many_causes_are_kept() -> None:
    job = Job(hosts=100).running()
    for rank in range(MOST_EXITS + 1):
        job.exits(rank)
    assert job.run.interruption.findings is not None
    assert [e.rank for e in job.run.interruption.findings.exits] == list(range(MOST_EXITS))


# Hangs


def test_a_hang_gathers_evidence_from_all_hosts_and_then_stops() -> None:
    job = Job().running()
    assert job.hangs() == (
        GatherEvidence(attempt=1, timeout_s=5.0, reason="no progress for 0.5 s in phase train"),
    )
    assert (type(job.run.stage), job.run.state) == (Diagnosing, "RECOVERING")
    assert job.hangs() == (), "the hang is known already"
    assert job.shows("host-0", found(0), found(1)) == ()
    assert job.shows("host-0", found(0), found(1)) == (), "this evidence is known already"
    stop, judge = job.shows("host-1", found(2, process_state="T", stack=()), found(3))
    assert isinstance(stop, StopAttempt)
    assert isinstance(judge, JudgeHang)
    assert job.shows("host-1") == (), "too late"
    job.stops()
    assert isinstance(job.run.stage, Stopping), "no rank is left, and the analysis still runs"
    job.judged(2, stacks={"0": ("all_reduce",), "2": ()})
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("hang", "rank 2 on host-1")
    assert incident.evidence.stacks == {"0": ("all_reduce",), "2": ()}


def test_evidence_that_was_not_requested_is_no_answer() -> None:
    """A host that reports its hardware unasked has not reported the stacks of its ranks yet."""
    job = Job().running()
    job.hangs()
    job.shows("host-0", found(0), found(1))
    unasked_evidence = EvidenceGathered(
        at=job.now(), attempt=1, host="host-1", ranks=(found(2), found(3)), unasked=True
    )
    assert job.tell(unasked_evidence) == ()
    assert isinstance(job.run.stage, Diagnosing)
    stop, _ = job.shows("host-1", found(2), found(3))
    assert isinstance(stop, StopAttempt)


@pytest.mark.parametrize("stage", [Starting, Running])
def test_an_attempt_continues_if_its_ranks_make_progress_again(stage: type[Stage]) -> None:
    job = Job().starts()
    if stage is Running:
        job.trains()
    job.hangs()
    job.shows("host-0", found(0), found(1))
    assert job.moves_again() == ()
    assert (type(job.run.stage), job.run.interruption.findings) == (stage, None)
    assert job.run.stage.reason == "attempt 1 continues: rank 2 makes progress again"
    assert job.shows("host-1", found(2), found(3)) == (), (
        "the job does not wait for this evidence any more"
    )
    assert job.waits(60) == (), "the deadline of the diagnosis is cancelled"
    job.steps(11)
    assert (type(job.run.stage), job.run.state) == (Running, "RUNNING")
    assert (job.run.history.incidents, job.run.history.restarts, job.run.history.fruitless) == (
        (),
        0,
        0,
    )


def test_a_second_hang_gathers_evidence_from_all_hosts_again() -> None:
    job = Job().running()
    job.hangs()
    job.shows("host-0", found(0), found(1))
    job.moves_again()
    assert isinstance(job.hangs()[0], GatherEvidence)
    assert job.shows("host-1", found(2), found(3)) == (), "evidence of host-0 is still missing"
    assert isinstance(job.shows("host-0", found(0), found(1))[0], StopAttempt)


def test_progress_after_the_order_to_stop_does_not_continue_the_attempt() -> None:
    job = Job().running()
    job.hangs()
    job.shows("host-0", found(0), found(1))
    job.shows("host-1", found(2), found(3))
    job.moves_again()
    assert isinstance(job.run.stage, Stopping)
    job.stops()
    job.judged(2)
    assert job.run.history.incidents[0].kind == "hang"


def test_progress_does_not_end_a_diagnosis_that_a_watchdog_started() -> None:
    """The rank with the watchdog has exited, so its peers cannot continue for long."""
    job = Job().running()
    job.raises(0, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)")
    assert isinstance(job.run.stage, Diagnosing)
    job.moves_again()
    assert isinstance(job.run.stage, Diagnosing)


def test_a_program_that_leaves_a_thread_twice_is_not_trained_a_third_time() -> None:
    job, fix = Job().running(), "join the thread"
    for _ in range(2):
        job.hangs()
        job.shows("host-0", found(0), found(1))
        job.shows("host-1", found(2), found(3))
        job.stops()
        left = {"verdict": "thread", "scope": "user", "confidence": 0.9, "advice": fix}
        actions = job.judged(None, **left)
    first, second = job.run.history.incidents
    assert (first.remedy, first.advice) == ("restart", fix)
    assert (second.remedy, second.rule, second.culprit) == ("stop", "repeated-error", NOBODY)
    (end,) = actions
    assert isinstance(end, EndJob)
    assert end.reason.endswith(f"the program has a bug (rule repeated-error); fix: {fix}")


def test_a_job_stops_waiting_for_evidence_at_the_deadline() -> None:
    job = Job().running()
    job.hangs()
    assert job.waits(9) == ()
    stop, _ = job.waits(2)
    assert isinstance(stop, StopAttempt)
    job.stops()
    job.judged(None)
    assert job.run.history.incidents[0].kind == "hang"


@pytest.mark.parametrize("failure", ["exit", "host stopped", "host lost"])
def test_a_failure_during_a_diagnosis_ends_the_diagnosis(failure: str) -> None:
    job = Job().running()
    job.hangs()
    match failure:
        case "exit":
            actions = job.exits(2)
        case "host stopped":
            actions = job.stops("host-1")
        case _:
            actions = job.loses("host-1")
    assert isinstance(actions[0], StopAttempt)
    assert isinstance(job.run.stage, Stopping)


def test_a_rank_that_was_ordered_to_stop_after_a_hang_is_not_its_cause() -> None:
    job = Job().running()
    job.hangs(behind=(2,))
    job.shows("host-0", found(0), found(1))
    job.shows("host-1", found(2, step=9), found(3))
    job.judged(2)
    job.exits(0, stopped=True)
    job.stops("host-0")
    job.waits(60)
    assert str(job.run.history.incidents[0].culprit) == "rank 2 on host-1"


def test_a_job_stops_waiting_for_the_hang_analysis_at_the_deadline() -> None:
    job = Job().running()
    job.hangs()
    job.shows("host-0", found(0), found(1))
    job.shows("host-1", found(2, process_state="T", stack=()), found(3))
    job.stops()
    job.waits(JUDGE_S - 5)
    assert isinstance(job.run.stage, Stopping)
    job.waits(10)
    (incident,) = job.run.history.incidents
    assert str(incident.culprit) == "rank 2 on host-1", "the evidence in the journal is enough"
    assert job.judged(0) == (), "too late"


WATCHDOG = ("[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",)


def test_an_abort_by_a_watchdog_gathers_evidence_even_if_peers_abort_too() -> None:
    job = Job().running()
    (gather,) = job.exits(0, signal=6, log_tail=WATCHDOG)
    assert isinstance(gather, GatherEvidence)
    assert isinstance(job.run.stage, Diagnosing)
    assert job.exits(1, signal=6, log_tail=WATCHDOG) == (), "a peer aborts too"
    job.shows("host-0")
    stop, judge = job.shows("host-1", found(2), found(3))
    assert isinstance(stop, StopAttempt)
    assert isinstance(judge, JudgeHang)
    job.judged(3)
    job.stops()
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("hang", "rank 3 on host-1")
    assert incident.confidence == 0.95


@pytest.mark.parametrize("seen_by", ["ndctl", "a watchdog"])
def test_the_same_rules_hold_for_hangs_that_ndctl_or_a_watchdog_found(seen_by: str) -> None:
    job = Job(spares=1).running()
    for number in (1, 2):
        if seen_by == "ndctl":
            job.hangs()
        else:
            job.exits(0, signal=6, log_tail=WATCHDOG)
        job.judged(2)
        for name in job.run.attempt.placement:
            job.shows(name)
        job.stops()
        job.trains()
        job.saves(10 * number)
    rules = [(incident.failure, incident.rule) for incident in job.run.history.incidents]
    assert rules == [("hang", "class-default"), ("hang", "repeat-on-host")]


def test_a_killed_rank_stops_the_attempt_at_once_despite_later_watchdogs() -> None:
    job = Job().running()
    (stop,) = job.exits(2)
    assert isinstance(stop, StopAttempt)
    assert job.exits(0, signal=6, log_tail=WATCHDOG) == ()
    assert isinstance(job.run.stage, Stopping)


# Drills


def test_a_drill_is_passed_to_attempts_until_it_happened_and_its_incident_names_it() -> None:
    both = drills("kill:rank=1@step=5", "kill:rank=1@step=50")
    job = Job(drills=both)
    job.starts()
    (start,) = job.all[-1][1]
    assert isinstance(start, StartAttempt)
    assert start.drills == both
    job.trains()
    job.drill(1)
    (again,) = job.fails_once()
    assert isinstance(again, StartAttempt)
    assert again.drills == both[1:]
    assert job.run.history.incidents[0].drill == "kill:rank=1@step=5"
    job.trains()
    job.fails_once()
    assert job.run.history.incidents[1].drill is None


@pytest.mark.parametrize(
    ("drill", "rank", "step", "by_drill"),
    [
        ("slow:rank=0@step=5", 3, 9000, False),
        ("slow:rank=0@step=5", 3, 6, False),
        ("slow:rank=0@step=5", 1, 6, True),  # on the host of rank 0
        ("slow:rank=0@step=5", 0, 9000, False),
        ("kill:rank=3@step=5", 3, 4, True),
        ("kill:host=1@step=5", 3, 5, True),
        ("kill:host=0@step=5", 3, 5, False),
        ("kill:host=7@step=5", 3, 5, False),
    ],
)
def test_an_incident_names_a_drill_only_if_the_drill_can_have_caused_it(
    drill: str, rank: int, step: int, by_drill: bool
) -> None:
    job = Job(drills=drills(drill)).running()
    job.drill(1)
    job.steps(step)
    job.fails_once(rank, signal=7)
    (incident,) = job.run.history.incidents
    assert incident.drill == (drill if by_drill else None)
    assert strike_weight(incident) == (0.0 if by_drill else 1.0)
    assert pace_of(job.run).exposure.failures == (0 if by_drill else 1)


def test_a_drill_elsewhere_does_not_excuse_the_second_failure_of_a_host() -> None:
    job = Job(spares=1, drills=drills("slow:rank=0@step=5")).granted().running()
    for _ in range(2):
        job.drill(1)
        job.steps(9000)
        job.fails_once(3, signal=7)
        job.trains()
    assert [i.drill for i in job.run.history.incidents] == [None, None]
    assert list(job.run.hosts.exclude) == ["host-1"]


def test_a_nan_drill_explains_a_loss_that_became_nan_at_its_step() -> None:
    job = Job(drills=drills("nan:rank=1@step=5")).running()
    job.drill(1)
    job.steps(104)
    words = "step 104: the loss is nan, and so it was for 100 steps in a row"
    not_finite = replace(error(words, "NotFinite", at_step=104), since=5)
    job.fails_once(3, exit_code=exit_codes.UNSTABLE, error=not_finite)
    assert job.run.history.incidents[0].drill == "nan:rank=1@step=5"


def test_a_drill_that_blocks_writes_explains_only_a_failure_during_a_checkpoint() -> None:
    for phase, by_drill in (("checkpoint", "write:rank=2@step=5"), ("train", None)):
        job = Job(drills=drills("write:rank=2@step=5")).running()
        job.drill(1)
        job.steps(500)
        job.fails_once(2, phase=phase)
        assert job.run.history.incidents[0].drill == by_drill


def test_a_drill_explains_nothing_after_its_ranks_have_stopped() -> None:
    job = Job(hosts=3, drills=drills("slow:rank=0@step=5")).granted(successor_s=600.0).running()
    job.drill(1)
    job.steps(6)
    job.tell(HostLeaving(at=job.now(), host="host-2", why="node drained"))
    job.stops()
    assert isinstance(job.run.stage, Waiting)
    job.loses("host-0")
    job.waits(4)
    assert [(i.kind, i.drill) for i in job.run.history.incidents] == [("host-lost", None)]


def test_a_drill_explains_one_incident() -> None:
    """The drill killed the agent. The loss of the agent that replaced it is a real failure."""
    job = Job(hosts=3, drills=drills("kill:host=1@step=5")).running()
    job.drill(1)
    job.loses("host-1")
    job.stops("host-0", "host-2")
    job.loses("host-0")
    job.waits(4)
    job.registers("host-1", pid=2)
    job.loses("host-1")
    job.waits(4)
    assert [i.drill for i in job.run.history.incidents] == ["kill:host=1@step=5", None, None]
