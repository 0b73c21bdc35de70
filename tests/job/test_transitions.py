"""The table of stages and events is complete, and a pair that cannot happen is counted."""

from typing import get_args

import pytest
from msgspec.structs import replace

from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CancelRequested,
    Event,
    Notice,
    RankExited,
    RequeueRefused,
    Tick,
)
from orchestrator.job.stage import Ended, Stage, Submitted
from orchestrator.job.transitions import STAGES, TABLE, no_effect, step
from orchestrator.journal.supervisor import is_journalled
from tests.job.job_driver import START, Job, host

BEFORE_A_LEADER = {"JobSubmitted", "LeaderStarted", "CancelRequested", "RunDirLost"}
NOT_COUNTED = {"RankExited", "Tick", *(kind.__name__ for kind in get_args(Notice))}


def test_every_event_has_a_row() -> None:
    assert set(TABLE) == {*get_args(Event)}
    assert set(STAGES) == {*get_args(Stage)}


def test_pairs_that_cannot_happen() -> None:
    """Before a leader has started, no agent, rank or scheduler can report. The scheduler can refuse
    a requeue only after it was asked for one."""
    missing = {
        (event.__name__, stage.__name__)
        for event, row in TABLE.items()
        for stage in STAGES
        if stage not in row
    }
    events, stages = ({kind.__name__ for kind in kinds} for kinds in (TABLE, STAGES))
    assert missing == {
        *((event, "Submitted") for event in events - BEFORE_A_LEADER - NOT_COUNTED),
        *(("RequeueRefused", stage) for stage in stages - {"Queued", "Ended"}),
    }


@pytest.mark.parametrize("event", [Tick, RankExited, *get_args(Notice)])
def test_events_that_are_not_journalled_have_a_handler_in_every_stage(event: type[Event]) -> None:
    """Counting them would change the state, and each change of state is journalled."""
    assert set(TABLE[event]) == {*STAGES}


def test_late_events_change_nothing() -> None:
    job = Job().running()
    job.cancelled()
    job.stops()
    job.stops(host(1))
    assert isinstance(job.run.stage, Ended)
    lost = AgentLost(at=START + 99, host=host(0), why="gone", silent_s=0.0)
    assert TABLE[AgentLost][Ended] is no_effect
    assert step(job.run, lost) == (job.run, ())
    again = CancelRequested(at=START + 99, by="bob")
    assert step(job.run, again)[0] is job.run


def test_an_impossible_pair_is_counted_and_does_nothing_else() -> None:
    job = Job()
    assert isinstance(job.run.stage, Submitted)
    registered = AgentRegistered(
        at=START + 1, host=host(0), address="10.0.0.1", devices=2, pid=1, incarnation="a"
    )
    run, actions = step(job.run, registered)
    assert actions == ()
    assert run.history.ignored == {"AgentRegistered in Submitted": 1}
    assert replace(run, history=job.run.history) == job.run
    assert is_journalled(registered, job.run, run), "the journal gets a line for it"
    run, _ = step(run, registered)
    run, _ = step(run, RequeueRefused(at=START + 2, why="no"))
    assert run.history.ignored == {
        "AgentRegistered in Submitted": 2,
        "RequeueRefused in Submitted": 1,
    }
