"""The life of a job, decided by `step`: start, train, fail, restart, end."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from orchestrator.contract.check_results import Finding
from orchestrator.contract.checkpoint_interval import Exposure, SavePace
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.actions import EndJob, StartAttempt, StopAttempt
from orchestrator.contract.messages.events import (
    AgentRegistered,
    CancelRequested,
    CheckpointFailed,
    CheckpointIntervalChanged,
    Event,
    HealthChanged,
    LeaderStarted,
    ProgramRuns,
    RankExited,
    StepReached,
    Tick,
)
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.job.failures.incident_records import left_out
from orchestrator.job.stage import Starting, Stopping, Submitted, Waiting
from orchestrator.job.state import Run, pace_of
from orchestrator.job.transitions import fold, step
from tests.job.job_driver import START, Job, exited, plan, raised, submitted


def test_nothing_happens_before_a_job_is_submitted() -> None:
    events: list[Event] = [
        LeaderStarted(at=1, host="host-0", pid=1),
        Tick(at=2),
        exited(0, attempt=0),
        CancelRequested(at=3, by="ann"),
    ]
    for event in events:
        assert step(Run(), event) == (Run(), ())


def test_a_job_goes_from_submission_to_success() -> None:
    job = Job()
    assert (type(job.run.stage), job.run.state) == (Submitted, "SUBMITTED")
    job.leads()
    assert (type(job.run.stage), job.run.state) == (Waiting, "PENDING")
    assert job.registers("host-1") == ()
    assert job.registers("host-0") == (
        StartAttempt(
            attempt=1,
            hosts=("host-0", "host-1"),
            plan=1,
            drills=(),
            reason="attempt 1 on 2 hosts from the beginning",
        ),
    )
    assert job.run.state == "STARTING"
    assert job.trains() == ()
    assert (job.run.state, job.run.attempt.step) == ("RUNNING", 1)
    assert job.stops("host-0", finished=True) == ()
    assert job.stops("host-1", finished=True) == (
        EndJob(state="SUCCEEDED", reason="all ranks finished in attempt 1"),
    )
    assert (job.run.state, job.run.history.incidents, job.run.history.restarts) == (
        "SUCCEEDED",
        (),
        0,
    )


def test_agents_that_register_before_the_leader_or_after_the_end_are_ignored() -> None:
    job = Job()
    assert job.registers("host-0") == ()
    assert job.run.hosts.by_name == {}
    job.cancelled()
    assert job.registers("host-0") == ()
    assert job.run.hosts.by_name == {}


def test_a_host_with_too_few_devices_is_not_used() -> None:
    job = Job()
    job.leads()
    job.registers("host-0", devices=1)
    assert job.registers("host-1") == ()
    (end,) = job.waits(600)
    assert end == EndJob(
        state="FAILED",
        reason="1 of 2 hosts registered within 600 s (host-1); host-0: fewer than 2 devices;"
        " see logs/agent-<host>.log of the others",
    )


def test_too_few_hosts_end_the_job_after_the_init_timeout() -> None:
    job = Job(init_timeout=60.0)
    job.leads()
    assert job.waits(59) == ()
    (end,) = job.waits(1)
    assert isinstance(end, EndJob)
    assert end.reason.startswith("0 of 2 hosts registered within 60 s (none);")


def test_a_job_does_not_wait_for_hosts_that_failed_their_own_checks() -> None:
    """Without a scheduler there are no other hosts, and a host checks itself only once."""
    full = Finding(what="/dev/shm", verdict="stops", found="full", fix="make room there")
    job = Job()
    job.leads()
    assert job.registers("host-0", findings=(full,)) == ()
    assert job.registers("host-1") == (
        EndJob(
            state="FAILED",
            reason="1 of 2 hosts are left; host-0: /dev/shm: full (make room there)",
        ),
    )


def test_a_job_waits_for_hosts_whose_nvlink_blocks_hold_its_tp_groups() -> None:
    switches = {"host-0": ("rack-1",), "host-1": ("rack-2",), "host-2": ("rack-2",)}
    wide = replace(plan(), mesh=Mesh(tp=4), switches=switches)
    job = Job(plan=wide, launch=submitted(spares=1).launch, init_timeout=60.0)
    job.leads()
    job.registers("host-0")
    job.registers("host-1")
    assert job.waits(30) == ()
    (start,) = job.registers("host-2")
    assert isinstance(start, StartAttempt)
    assert set(start.hosts) == {"host-1", "host-2"}


def test_a_job_ends_if_its_hosts_have_no_room_for_tp_groups() -> None:
    wide = replace(plan(), mesh=Mesh(tp=4), switches={"host-0": ("a",), "host-1": ("b",)})
    job = Job(plan=wide, init_timeout=60.0)
    job.leads()
    job.registers("host-0")
    job.registers("host-1")
    (end,) = job.waits(60)
    assert isinstance(end, EndJob)
    assert "only 0 of them have room for tp groups that stay in an NVLink block" in end.reason


def test_a_late_tick_changes_nothing_while_training() -> None:
    job = Job().running()
    before = job.run
    assert job.waits(1e6) == ()
    assert job.run is before


def test_a_health_change_causes_no_action() -> None:
    job = Job().running()
    before = job.run
    event = HealthChanged(at=job.now(), attempt=1, ranks=((0, 1),), health="slow", age_s=3.0)
    assert job.tell(event) == ()
    assert job.run is before


def test_a_failed_save_causes_no_action_and_restores_no_restart_budget() -> None:
    job = Job().running()
    before = job.run
    event = CheckpointFailed(at=job.now(), attempt=1, step=8, why="disk full")
    assert job.tell(event) == ()
    assert job.run is before


def test_the_next_attempt_gets_the_failure_rate_and_the_checkpoint_interval() -> None:
    job = Job().running()
    assert pace_of(job.run) == SavePace()
    begun = job.run.progress.stepped_at
    for done, after_s in ((5, 40.0), (9, 100.0)):
        at = begun + after_s
        reached = StepReached(at=at, attempt=1, step=done, loss=1.0, tokens_per_second=1.0)
        assert job.tell(reached) == ()
    changed = CheckpointIntervalChanged(
        at=begun + 101.0, attempt=1, step=9, old=100, new=7, why="a save costs little"
    )
    assert job.tell(changed) == ()
    job.exits(1)
    job.stops("host-0")
    job.stops("host-1")
    exposure = Exposure(failures=1, observed_s=100.0)
    assert pace_of(job.run) == SavePace(exposure=exposure, every_steps=7)
    unfit = left_out(job.run, job.now(), "host-9", "no GPU")
    assert len(unfit.history.incidents) == 2
    assert pace_of(unfit) == pace_of(job.run), "host-9 never trained, so it adds no failure"


def test_a_killed_rank_stops_all_and_the_next_attempt_starts_from_the_checkpoint() -> None:
    job = Job().running()
    job.saves(20)
    (stop,) = job.exits(1)
    assert stop == StopAttempt(attempt=1, grace_s=3.0, reason="rank 1 on host-0 exited")
    assert (type(job.run.stage), job.run.state) == (Stopping, "RECOVERING")
    assert job.stops("host-0") == ()
    assert job.stops("host-1") == (
        StartAttempt(
            attempt=2,
            hosts=("host-0", "host-1"),
            plan=1,
            drills=(),
            reason="attempt 2 on 2 hosts from checkpoint step-20",
        ),
    )
    assert (type(job.run.stage), job.run.state) == (Starting, "RECOVERING")
    (incident,) = job.run.history.incidents
    assert (incident.id, incident.attempt, incident.kind) == (1, 1, "rank-killed")
    assert (incident.culprit.host, incident.culprit.rank) == ("host-0", 1)
    assert incident.action == "restart as attempt 2 from checkpoint step-20"
    assert incident.recovered_after_s is None


def test_the_first_new_step_closes_the_incident() -> None:
    job = Job().running()
    job.exits(1)
    broke = job.at
    job.stops()
    job.trains(first=0)
    (incident,) = job.run.history.incidents
    assert incident.recovered_after_s == job.at - broke
    assert job.run.state == "RUNNING"
    recovered = incident.recovered_after_s
    job.steps(2)
    assert job.run.history.incidents[0].recovered_after_s == recovered


def test_the_recovery_time_of_an_incident_does_not_change_at_the_next_recovery() -> None:
    job = Job().running()
    job.fails_once()
    job.trains()
    cost = job.run.history.incidents[0].recovered_after_s
    job.saves(10)
    job.waits(100)
    job.fails_once()
    job.trains(10)
    first, second = job.run.history.incidents
    assert first.recovered_after_s == cost
    assert second.recovered_after_s is not None


def test_one_recovery_closes_all_open_incidents() -> None:
    job = Job().running()
    job.fails_once()
    job.fails_once()
    job.trains()
    first, second = job.run.history.incidents
    assert first.recovered_after_s is not None
    assert second.recovered_after_s is not None
    assert first.recovered_after_s > second.recovered_after_s


def test_a_recovery_time_is_never_negative() -> None:
    """The clock of the new leader may be behind the clock of the previous one."""
    job = Job().running()
    job.at -= 3600
    job.starts().trains()
    (incident,) = job.run.history.incidents
    assert (incident.recovered_after_s, incident.detected_after_s) == (0.0, 0.0)


def test_an_exit_that_is_reported_late_does_not_shorten_the_time_to_stop() -> None:
    """An exit that no agent saw gets the time of the rank's last message, perhaps minutes ago."""
    job = Job().running()
    job.at += 300
    late = exited(1, at=job.at - 290, detected_after_s=290.0)
    job.tell(late)
    assert job.run.stage.since == job.run.last_at == job.at
    assert job.waits(17) == ()
    (incident,) = job.run.history.incidents or [None]
    assert incident is None
    job.stops()
    assert job.run.history.incidents[0].at == late.at


@pytest.mark.parametrize("stage", ["starting", "running"])
def test_an_exit_of_a_rank_stops_the_attempt_in_every_live_stage(stage: str) -> None:
    job = Job().starts() if stage == "starting" else Job().running()
    (stop,) = job.exits(0)
    assert isinstance(stop, StopAttempt)


def test_an_exit_is_counted_once() -> None:
    job = Job().running()
    job.exits(1)
    before = job.run
    assert job.exits(1) == ()
    assert job.run is before


def test_the_step_of_an_incident_is_the_last_that_any_rank_reported() -> None:
    job = Job().running()
    job.fails_once(step=24)
    assert job.run.history.incidents[0].step == 24
    job.trains(first=20)
    job.fails_once(step=0)
    assert job.run.history.incidents[1].step == 21


def test_late_events_of_previous_attempts_change_nothing() -> None:
    job = Job().running()
    job.fails_once()
    before = job.run
    late: list[Event] = [
        exited(3, attempt=1),
        StepReached(at=1, attempt=1, step=99, loss=None, tokens_per_second=None),
        exited(3, attempt=7),
    ]
    for event in late:
        assert job.tell(event) == ()
        assert job.run is before


def test_events_of_an_attempt_that_has_stopped_cause_no_action() -> None:
    job = Job().running()
    job.loses("host-1")
    job.stops("host-0")
    assert isinstance(job.run.stage, Waiting)
    late: list[Callable[[], object]] = [
        lambda: job.exits(0),
        job.hangs,
        lambda: job.shows("host-0"),
        job.stops,
    ]
    for act in late:
        assert act() == ()
        assert job.run.state == "RECOVERING"


def test_the_state_is_the_fold_of_all_events() -> None:
    job = Job(spares=1).running()
    job.fails_once()
    job.trains()
    assert fold(event for event, _ in job.all) == job.run
    ignored: list[Event] = [
        submitted(at=START),
        RankExited(**{f: getattr(raised(0, "x"), f) for f in RankExited.__struct_fields__}),
        AgentRegistered(at=START, host="host-0", address="::1", devices=2, pid=1, incarnation="1"),
    ]
    assert isinstance(fold(ignored).stage, Submitted)


def test_a_program_that_never_reports_a_step_runs_when_its_ranks_do() -> None:
    job = Job(run=RunSpec(script="serve.py")).starts()
    states = [job.run.state]
    assert job.tell(ProgramRuns(at=job.now(), attempt=1)) == ()
    states.append(job.run.state)
    assert job.run.stage.reason == "attempt 1 runs, without steps"
    # The stage stays, and with it the limits of a start. So does the incident: it counts as a
    # failure without a step in between for the rule crash-loop.
    assert type(job.run.stage) is Starting
    job.fails_once(rank=1)
    states.append(job.run.state)
    job.tell(ProgramRuns(at=job.now(), attempt=2))
    states.append(job.run.state)
    assert states == ["STARTING", "RUNNING", "RECOVERING", "RUNNING"]
    incident = job.run.history.incidents[-1]
    assert incident.recovered_after_s is None
    assert incident.resumed_after_s == incident.runs_after_s == job.at - incident.at


def test_a_program_that_has_reported_steps_recovers_with_a_step() -> None:
    job = Job(run=RunSpec(script="train.py")).running()
    job.fails_once(rank=1)
    assert job.tell(ProgramRuns(at=job.now(), attempt=2)) == ()
    states = [job.run.state]
    job.trains()
    assert [*states, job.run.state] == ["RECOVERING", "RUNNING"]


def test_nothing_is_known_of_lost_steps_of_a_program_that_resumes_from_its_own_file() -> None:
    job = Job(run=RunSpec(script="train.py")).starts()
    job.steps(1)
    job.fails_once(rank=1)
    incident = job.run.history.incidents[-1]
    assert (incident.step, incident.lost_steps) == (1, None)
    assert incident.action.endswith("ndctl knows no checkpoint of it")
    # transformers' Trainer says where it begins: then what is lost is known.
    job.trains()
    assert job.run.history.incidents[-1].lost_steps == 1


@pytest.mark.parametrize("first", [1, 5, 20])
def test_the_first_step_of_a_program_does_not_tell_which_steps_are_repeated(first: int) -> None:
    """ndctl counts the steps of each attempt from 1 if the program does not, and may hear of a
    later step first."""
    job = Job(run=RunSpec(script="train.py")).starts()
    job.steps(7)
    job.fails_once(rank=1)
    job.steps(first)
    (incident,) = job.run.history.incidents
    assert (incident.step, incident.lost_steps) == (7, None)
    assert incident.recovered_after_s is not None


def test_a_program_that_fails_before_its_first_step_repeats_none() -> None:
    job = Job(run=RunSpec(script="train.py")).starts()
    job.fails_once(rank=1)
    job.steps(1)
    assert job.run.history.incidents[-1].lost_steps is None


def test_a_program_that_does_not_load_its_checkpoint_is_noticed() -> None:
    job = Job(run=RunSpec(script="train.py")).running()
    job.saves(20)
    job.fails_once(rank=1)
    assert job.run.history.incidents[-1].action.endswith("its newest checkpoint is step-20")
    assert job.run.progress.unused == 0
    job.trains()
    job.saves(10)
    assert job.run.progress.unused == 20
    job.fails_once(rank=1)
    job.trains(first=10)
    assert job.run.progress.unused == 0


def test_the_bundled_trainer_chooses_where_it_resumes() -> None:
    job = Job().running()
    job.saves(20)
    job.fails_once(rank=1)
    job.trains()
    assert job.run.progress.unused == 0
