"""Jobs that wait in a scheduler's queue, or were put back there, have no leader and go on."""

from dataclasses import replace

from orchestrator.dashboard.holding import ASK_AGAIN_S, Holding
from orchestrator.dashboard.view import effective_state, view
from orchestrator.supervise.state import Run
from tests.agent.world import TurnedClock
from tests.dashboard.dashboard_story import START, recovered, seen_of

WAITS = "Slurm job 12 is PENDING (Resources)"


def on_slurm() -> Run:
    run = seen_of(recovered()).run
    assert run.job is not None
    return replace(run, job=replace(run.job, backend="slurm"))


def test_a_scheduler_is_asked_now_and_then_while_nobody_leads() -> None:
    asked: list[Run] = []

    def ask(run: Run) -> str | None:
        asked.append(run)
        return WAITS if len(asked) < 2 else None

    clock, run = TurnedClock(), on_slurm()
    holding = Holding(ask, clock)
    assert holding(run, True) is None
    assert holding(replace(run, ending="FAILED"), False) is None
    assert holding(seen_of(recovered()).run, False) is None, "there is no scheduler"
    assert asked == []
    assert [holding(run, False), holding(run, False)] == [WAITS, WAITS]
    assert len(asked) == 1
    clock.sleep(ASK_AGAIN_S)
    assert holding(run, False) is None
    assert holding(run, True) is None
    assert holding(run, False) is None
    assert len(asked) == 3, "asked anew when a leader has gone"


def test_a_job_that_is_held_has_not_failed() -> None:
    run = on_slurm()
    assert effective_state(run, False, START + 9999).state == "FAILED"
    found = effective_state(run, False, START + 9999, held=WAITS)
    assert (found.state, found.reason) == ("PENDING", WAITS)
    assert effective_state(run, True, START + 9999, held=WAITS).state == "RUNNING"
    seen = replace(seen_of(recovered()), run=run)
    assert view(seen, leader_alive=False, now=START + 9999, held=WAITS).state == "PENDING"
