from collections import Counter

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.events import (
    AgentLost,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    HealthChanged,
    HostStopped,
    JobSubmitted,
    LeaderStarted,
    TrainingResumed,
)
from orchestrator.dashboard.job_view.replayed_job import FailedSave, ReplayedJob, fold_seen
from orchestrator.dashboard.job_view.standing import effective_state
from orchestrator.dashboard.job_view.view import View, view
from orchestrator.dashboard.metrics import NO_PROGRESS, fold_metrics
from orchestrator.dashboard.status import checkpoint_text
from orchestrator.job.state import Run
from tests.dashboard.dashboard_story import (
    DRILL,
    SLOW,
    START,
    arrivals,
    broken,
    finished,
    journal,
    killed,
    metric,
    metrics,
    names,
    recovered,
    restarting,
    seen_of,
    started,
    submitted,
    view_of,
)

DAY_S = 86_400.0


def health(shown: View) -> list[str]:
    return [health for host in shown.hosts for health in host.ranks]


def changed(rank: int, word: str, attempt: int = 1) -> HealthChanged:
    alone = ((rank, rank),)
    return HealthChanged(at=START + 20, attempt=attempt, ranks=alone, health=word, age_s=5.0)  # type: ignore[arg-type]


def test_ranks_are_starting_until_the_first_step_and_ok_from_then_on() -> None:
    assert health(view_of(started()[:-1])) == ["starting"] * 4
    assert health(view_of(started())) == ["ok"] * 4


def test_health_is_that_of_the_last_report() -> None:
    events = [*started(), changed(1, "slow"), changed(2, "silent"), changed(1, "ok")]
    assert health(view_of(events)) == ["ok", "ok", "silent", "ok"]


def test_a_rank_that_exited_stays_dead_despite_later_reports() -> None:
    events = [*broken(), changed(1, "silent")]
    assert health(view_of(events)) == ["ok", "dead", "ok", "ok"]


def test_hosts_of_a_new_allocation_are_not_marked_with_what_happened_in_the_one_before() -> None:
    """Slurm lost host-0, and the requeued job got host-1 again."""
    lost = AgentLost(at=START + 20, host="host-0", why="it is down", silent_s=5.0)
    leader = LeaderStarted(
        at=START + 30,
        host="host-1",
        pid=7,
        allocation=Allocation(id="12", restarts=1, hosts=("host-1", "host-2", "host-3")),
    )
    shown = view_of(
        [*broken(), changed(3, "dead"), lost, leader, *arrivals(("host-3",), START + 31)]
    )
    assert [host.name for host in shown.hosts] == ["host-1", "host-2"]
    assert health(shown) == ["stopped"] * 4
    assert shown.spares == ("host-3",)
    again = view_of([*broken(), changed(3, "dead"), replace(leader, former="it ended")])
    assert [host.name for host in again.hosts] == ["host-0", "host-1"], "after a takeover"
    assert health(again)[1:] == ["culprit", "stopped", "dead"]


def test_a_rank_that_was_told_to_stop_is_not_dead() -> None:
    stopped = replace(killed(START + 30, rank=2, host="host-1"), stopped=True)
    assert health(view_of([*broken(), stopped])) == ["ok", "dead", "stopped", "ok"]


def test_all_ranks_of_a_lost_host_are_dead() -> None:
    lost = AgentLost(at=START + 30, host="host-1", why="its connection closed", silent_s=0.1)
    assert health(view_of([*started(), lost]))[2:] == ["dead", "dead"]


def test_late_events_of_an_earlier_attempt_change_nothing() -> None:
    events = [*recovered(), changed(0, "silent", attempt=1), killed(START + 39, attempt=1)]
    assert health(view_of(events)) == ["ok"] * 4


def test_the_next_attempt_starts_with_fresh_ranks() -> None:
    assert health(view_of(restarting())) == ["starting"] * 4


def test_a_lost_host_is_marked_among_ranks_that_exited_because_of_it() -> None:
    lost = AgentLost(at=START + 29, host="host-1", why="its connection closed", silent_s=0.1)
    exits = [replace(killed(START + 30, rank), signal=None, exit_code=1) for rank in (0, 1)]
    stopped = HostStopped(at=START + 31, attempt=1, host="host-0", finished=False)
    shown = view_of([*started(), lost, *exits, stopped])
    assert shown.incidents[-1].culprit.host == "host-1"
    assert health(shown) == ["dead", "dead", "culprit", "culprit"]


def test_a_straggler_is_shown_while_its_rank_runs() -> None:
    lost = AgentLost(at=START + 30, host="host-1", why="its connection closed", silent_s=0.1)
    assert view_of([*started(), SLOW]).stragglers == (SLOW,)
    assert view_of([*started(), SLOW, lost]).stragglers == ()
    assert view_of([*started(), SLOW, killed(START + 30), *stopping()]).stragglers == ()


def stopping() -> list[Event]:
    hosts = ("host-0", "host-1")
    return [HostStopped(at=START + 31, attempt=1, host=host, finished=False) for host in hosts]


def test_between_attempts_dead_ranks_stay_dead() -> None:
    lost = AgentLost(at=START + 30, host="host-1", why="its connection closed", silent_s=0.1)
    stopped = HostStopped(at=START + 31, attempt=1, host="host-0", finished=False)
    assert health(view_of([*started(), lost, stopped])) == ["stopped", "stopped", "dead", "dead"]


def test_all_ranks_are_done_after_success() -> None:
    shown = view_of(finished(), leader_alive=False)
    assert shown.state == "SUCCEEDED"
    assert health(shown) == ["done"] * 4
    assert shown.elapsed_s == 82


def test_a_job_without_a_leader_has_failed_and_shows_how_to_resume() -> None:
    shown = view_of(recovered(), metrics(21, 30, 2), now=START + 5000, leader_alive=False)
    assert shown.state == "FAILED"
    assert "the leader on host-0 died without recording a reason" in shown.reason
    assert shown.fix == "ndctl submit SPEC --resume"
    assert health(shown) == ["stopped"] * 4
    assert shown.eta_s is None
    assert shown.elapsed_s < 100


def test_a_job_without_a_leader_has_failed_since_its_last_step() -> None:
    """The journal has few steps: of a job that trained for days, none of those days."""
    died = START + 8 * DAY_S
    progress = fold_metrics(NO_PROGRESS, [metric(900, at=died)])
    found = effective_state(seen_of(started()), False, died + 60, progress=progress)
    assert (found.state, found.since) == ("FAILED", died)
    # The clock of the host of rank 0 may be ahead.
    assert effective_state(seen_of(started()), False, died - 1, progress=progress).since == died - 1
    # Steps of the launch before tell nothing about one that did not start.
    again = seen_of([*started(), submitted(at=START + DAY_S, resume=True)])
    found = effective_state(again, False, died + 60, progress=progress)
    assert (found.state, found.since) == ("FAILED", START + DAY_S)


@pytest.mark.parametrize("alive", [True, False])
def test_an_ended_job_needs_no_leader(alive: bool) -> None:
    job = seen_of(finished())
    assert effective_state(job, alive, START + 100).state == "SUCCEEDED"


def test_a_leader_is_given_time_to_start() -> None:
    job = seen_of([submitted()])
    assert effective_state(job, False, START + 5).state == "SUBMITTED"
    late = effective_state(job, False, START + 500, "ndctl submit job.yaml --resume")
    assert (late.state, late.fix) == ("FAILED", "ndctl submit job.yaml --resume")


def test_a_job_with_a_live_leader_is_running() -> None:
    assert effective_state(seen_of(recovered()), True, START + 9999).state == "RUNNING"


def test_the_eta_comes_from_the_steps_of_this_attempt() -> None:
    shown = view_of(started(), metrics(1, 24), now=START + 8 + 0.8 * 24)
    assert shown.eta_s == pytest.approx(36 * 0.8)
    assert (shown.step, shown.steps) == (24, 60)


def test_an_eta_of_thousands_of_years_is_none() -> None:
    first, *rest = started()
    assert isinstance(first, JobSubmitted)
    events = [replace(first, steps=10**12), *rest]
    assert view_of(events, metrics(1, 24)).eta_s is None


def test_the_eta_of_a_job_that_recovers_counts_from_its_checkpoint() -> None:
    assert view_of(broken(), metrics(1, 24)).eta_s == pytest.approx(40 * 0.8)
    assert view_of(restarting(), metrics(1, 24)).eta_s == pytest.approx(40 * 0.8)
    resumed = [*restarting(), TrainingResumed(at=START + 36, attempt=2, step=10)]
    assert view_of(resumed, metrics(1, 24)).eta_s == pytest.approx(50 * 0.8)
    assert view_of(finished(), metrics(1, 60)).eta_s is None
    gone = view_of(started(), metrics(1, 24), now=START + 900, leader_alive=False)
    assert (gone.state, gone.eta_s) == ("FAILED", None)


def test_a_view_has_the_steps_at_which_attempts_began() -> None:
    shown = view_of(recovered(), [*metrics(1, 24), *metrics(21, 30, 2)])
    assert shown.resumed_steps == (21,)
    assert len(shown.samples) == 30


def test_the_newest_checkpoint_is_the_one_that_was_saved_or_resumed_from() -> None:
    shown = view_of(recovered())
    assert (shown.checkpoint.step, shown.checkpoint.at) == (20, START + 25)
    passed = (SkippedCheckpoint("step-40", "its marker is missing"),)
    events: list[Event] = [
        *broken(),
        CheckpointSaved(at=START + 30.5, attempt=1, step=40),
        *restarting()[-2:],
        TrainingResumed(at=START + 36, attempt=2, step=20, passed_over=passed),
    ]
    checkpoint = view_of(events).checkpoint
    assert (checkpoint.step, checkpoint.at, checkpoint.passed_over) == (20, None, passed)


def test_a_failed_save_is_shown_until_a_save_is_complete() -> None:
    full = CheckpointFailed(at=START + 40, attempt=2, step=40, why="No space left on device: /c")
    shown = view_of([*recovered(), full]).checkpoint
    assert (shown.step, shown.at) == (20, START + 25)
    assert shown.failed == FailedSave(step=40, at=START + 40, why=full.why, since=START + 40)
    words = checkpoint_text(shown, view_of(recovered()))
    assert "warning: the save at step 40 failed: No space left on device: /c" in words
    again = replace(full, at=START + 50, step=60)
    both = view_of([*recovered(), full, again]).checkpoint
    assert both.failed == FailedSave(
        step=60, at=START + 50, why=full.why, since=START + 40, times=2
    )
    words = checkpoint_text(both, view_of(recovered()))
    assert "the save at step 60 failed (2 failed saves in a row): No space" in words
    saved = CheckpointSaved(at=START + 41, attempt=2, step=41)
    assert view_of([*recovered(), full, saved]).checkpoint.failed is None


def test_drills_are_shown_as_armed_and_then_as_done() -> None:
    assert view_of(started(drills=(DRILL,))).drills == ((str(DRILL), False),)
    assert view_of(broken()).drills == ((str(DRILL), True),)


def test_waiting_hosts_are_shown_as_spares() -> None:
    assert view_of(started(spares=1)).spares == ("host-2",)
    assert view_of([*started(spares=1)[:3]]).spares == ()


def test_a_waiting_job_shows_how_many_hosts_have_registered() -> None:
    assert view_of(started()[:3]).stage == "waiting for agents, 1 of 2 registered"


def test_a_resumed_job_keeps_its_incidents_and_checkpoint() -> None:
    again = submitted(at=START + 500, resume=True)
    leader = LeaderStarted(at=START + 501, host="host-0", pid=7)
    agents = arrivals(names(2), START + 502)
    shown = view_of([*recovered(), again, leader, *agents], now=START + 510)
    assert [incident.kind for incident in shown.incidents] == ["rank-killed", "leader-lost"]
    assert shown.checkpoint.step == 20
    assert health(shown) == ["starting"] * 4
    assert shown.elapsed_s == 10


def test_folding_in_parts_gives_the_same_view_as_folding_at_once() -> None:
    entries = journal([*finished()])
    parts = ReplayedJob()
    for entry in entries:
        parts = fold_seen(parts, [entry])
    assert parts == fold_seen(ReplayedJob(), entries)


def test_a_view_of_16384_ranks_can_be_folded() -> None:
    events = started(2048, 8)
    for rank in range(16_384):
        events += [changed(rank, "slow"), changed(rank, "ok")]
    events.append(changed(16_383, "silent"))
    seen = seen_of(events)
    shown = view(seen, NO_PROGRESS, leader_alive=True, now=START + 60)
    assert Counter(health(shown)) == {"ok": 16_383, "silent": 1}
    assert shown.hosts[-1].worst == "silent"


def test_a_view_needs_the_submission() -> None:
    assert ReplayedJob().run == Run()
    with pytest.raises(AssertionError):
        view(ReplayedJob(), leader_alive=True, now=0.0)
