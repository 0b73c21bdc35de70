import pytest

from orchestrator.contract.files.checkpoint_names import PassedOver
from orchestrator.contract.messages.agent_protocol import Evidence, Exited, Register, Stopped, Told
from orchestrator.contract.messages.events import (
    AgentRegistered,
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    DrillHappened,
    Event,
    EvidenceGathered,
    HangDetected,
    HealthChanged,
    HostStopped,
    RankError,
    RankEvidence,
    RankExited,
    StepReached,
    TrainingResumed,
)
from orchestrator.contract.messages.rank_messages import (
    DrillFired,
    IntervalChanged,
    RankEnded,
    Resumed,
    Saved,
    SaveFailed,
)
from orchestrator.detect.heartbeat_monitor import Hang, HealthChange, Progress
from orchestrator.leader.translate import (
    event_of,
    hang_detected,
    health_changed,
    registered,
    step_reached,
)

AT = 1000.0
PASSED = (PassedOver(name="step-8", why="it has no marker"),)
ERROR = RankError(error="ValueError", message="no", step=5, traceback="Traceback …")
FROZEN = RankEvidence(
    rank=1, pid=9, process_state="T", step=4, phase="train", age_s=2.0, stack=("frame",)
)


@pytest.mark.parametrize(
    ("report", "event"),
    [
        (
            Told(host="h", datagram=Resumed(attempt=2, rank=0, step=4, passed_over=PASSED)),
            TrainingResumed(at=AT, attempt=2, step=4, passed_over=PASSED),
        ),
        (
            Told(host="h", datagram=Saved(attempt=2, rank=0, step=8)),
            CheckpointSaved(at=AT, attempt=2, step=8),
        ),
        (
            Told(host="h", datagram=SaveFailed(attempt=2, rank=0, step=8, why="disk full")),
            CheckpointFailed(at=AT, attempt=2, step=8, why="disk full"),
        ),
        (
            Told(
                host="h",
                datagram=IntervalChanged(attempt=2, rank=0, step=8, old=10, new=4, why="dear"),
            ),
            CheckpointIntervalChanged(at=AT, attempt=2, step=8, old=10, new=4, why="dear"),
        ),
        (
            Told(host="h", datagram=DrillFired(attempt=2, rank=3, drill=1, step=5)),
            DrillHappened(at=AT, attempt=2, drill=1, rank=3, step=5),
        ),
        (
            Exited(
                host="h",
                ended=RankEnded(attempt=2, rank=3, exit_code=1, signal=None),
                age_s=1.5,
                step=4,
                stopped=True,
                error=ERROR,
                log_tail=("last",),
            ),
            RankExited(
                at=AT - 1.5,
                attempt=2,
                rank=3,
                host="h",
                exit_code=1,
                signal=None,
                step=4,
                stopped=True,
                detected_after_s=1.5,
                error=ERROR,
                log_tail=("last",),
            ),
        ),
        (
            Evidence(attempt=2, host="h", ranks=(FROZEN,)),
            EvidenceGathered(at=AT, attempt=2, host="h", ranks=(FROZEN,)),
        ),
        (
            Stopped(attempt=2, host="h", finished=False, why="torchrun said no"),
            HostStopped(at=AT, attempt=2, host="h", finished=False, why="torchrun said no"),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_report_is_the_event_it_tells_of(
    report: Told | Exited | Evidence | Stopped, event: Event
) -> None:
    assert event_of(report, AT) == event


def test_what_the_leader_finds_out_itself_is_an_event_as_well() -> None:
    register = Register(
        host="h",
        address="10.0.0.1",
        devices=8,
        pid=5,
        incarnation="a1",
        launch=1,
        sent_at=AT,
        running=3,
    )
    assert registered(register, AT) == AgentRegistered(
        at=AT, host="h", address="10.0.0.1", devices=8, pid=5, incarnation="a1", running=3
    )
    assert step_reached(Progress(3, 2.5, 9.0), 2, AT) == StepReached(
        at=AT, attempt=2, step=3, loss=2.5, tokens_per_second=9.0
    )
    assert hang_detected(Hang("train", 3, 40.0, 30.0, (1,)), 2, AT) == HangDetected(
        at=AT, attempt=2, phase="train", step=3, stalled_s=40.0, limit_s=30.0, behind=(1,)
    )
    assert health_changed(HealthChange(((1, 3), (7, 7)), "slow", 4.0), 2, AT) == HealthChanged(
        at=AT, attempt=2, ranks=((1, 3), (7, 7)), health="slow", age_s=4.0
    )
