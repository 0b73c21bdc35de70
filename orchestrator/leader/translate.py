"""What an agent reports, as the event that it is. Pure."""

from dataclasses import replace

from orchestrator.contract.check_results import Finding
from orchestrator.contract.messages.agent_protocol import (
    Evidence,
    Exited,
    RankDigest,
    Register,
    Stopped,
    Told,
)
from orchestrator.contract.messages.events import (
    AgentRegistered,
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    DrillHappened,
    Event,
    EvidenceGathered,
    HangDetected,
    HangOver,
    HealthChanged,
    HostStopped,
    RankExited,
    StepReached,
    StragglerFound,
    StragglerGone,
    TrainingResumed,
)
from orchestrator.contract.messages.rank_messages import (
    DrillFired,
    IntervalChanged,
    Resumed,
    Saved,
    SaveFailed,
)
from orchestrator.detect.heartbeat_monitor import Hang, HealthChange, Progress
from orchestrator.detect.stragglers import Straggler


def event_of(report: Told | Exited | Evidence | Stopped, at: float) -> Event:
    """The event that `report`, come at `at`, tells of."""
    match report:
        case Told():
            return _told(report, at)
        case Exited():
            return _exited(report, at)
        case Evidence():
            return gathered(report, at)
        case Stopped():
            return HostStopped(
                at=at,
                attempt=report.attempt,
                host=report.host,
                finished=report.finished,
                why=report.why,
                reading=report.reading,
                alone_s=report.alone_s,
            )


def gathered(report: Evidence, at: float) -> EvidenceGathered:
    """The dumps themselves are for the verdict, and in the traces."""
    return EvidenceGathered(
        at=at,
        attempt=report.attempt,
        host=report.host,
        ranks=report.ranks,
        dumps=len(report.dumps),
        withheld=report.withheld,
        unread=report.unread,
        missing=report.missing,
        findings=report.findings,
        kernel=report.kernel,
        readings=report.readings,
        unasked=report.unasked,
    )


def without_stacks(event: EvidenceGathered) -> EvidenceGathered:
    """For the journal of a large job: there the verdict has those that matter."""
    return replace(event, ranks=tuple(replace(rank, stack=()) for rank in event.ranks))


def _told(told: Told, at: float) -> Event:
    match told.datagram:
        case Resumed(attempt=attempt, step=step, passed_over=passed):
            return TrainingResumed(at=at, attempt=attempt, step=step, passed_over=passed)
        case Saved(attempt=attempt, step=step):
            return CheckpointSaved(at=at, attempt=attempt, step=step)
        case SaveFailed(attempt=attempt, step=step, why=why):
            return CheckpointFailed(
                at=at, attempt=attempt, step=step, why=why, reading=told.reading
            )
        case IntervalChanged(attempt=attempt, step=step, old=old, new=new, why=why):
            return CheckpointIntervalChanged(
                at=at, attempt=attempt, step=step, old=old, new=new, why=why
            )
        case DrillFired(attempt=attempt, rank=rank, drill=drill, step=step):
            return DrillHappened(at=at, attempt=attempt, drill=drill, rank=rank, step=step)


def _exited(report: Exited, at: float) -> RankExited:
    return RankExited(
        at=at - report.age_s,
        attempt=report.ended.attempt,
        rank=report.ended.rank,
        host=report.host,
        exit_code=report.ended.exit_code,
        signal=report.ended.signal,
        step=report.step,
        stopped=report.stopped,
        detected_after_s=report.age_s,
        error=report.error,
        log_tail=report.log_tail,
        phase=report.phase,
        reading=report.reading,
        above=report.ended.above,
    )


def registered(
    register: Register, at: float, findings: tuple[Finding, ...] = (), taken: str = ""
) -> AgentRegistered:
    """`findings` are the leader's own, beside those of the agent; `taken`: why the scheduler ended
    the agent that was there before."""
    return AgentRegistered(
        at=at,
        host=register.host,
        address=register.address,
        devices=register.devices,
        pid=register.pid,
        incarnation=register.incarnation,
        findings=(*register.findings, *findings),
        running=register.running,
        taken=taken,
    )


def step_reached(progress: Progress, attempt: int, at: float) -> StepReached:
    return StepReached(
        at=at,
        attempt=attempt,
        step=progress.step,
        loss=progress.loss,
        tokens_per_second=progress.tokens_per_second,
    )


def straggler(
    change: Straggler, host: str, attempt: int, at: float
) -> StragglerFound | StragglerGone:
    if not change.slow:
        return StragglerGone(
            at=at,
            attempt=attempt,
            rank=change.rank,
            host=host,
            own_s=change.own_s,
            peers_s=change.peers_s,
        )
    return StragglerFound(
        at=at,
        attempt=attempt,
        rank=change.rank,
        host=host,
        own_s=change.own_s,
        peers_s=change.peers_s,
        step_s=change.step_s,
        steps=change.steps,
        lost_tokens_per_second=change.lost,
    )


def hang_detected(hang: Hang, attempt: int, at: float) -> HangDetected:
    return HangDetected(
        at=at,
        attempt=attempt,
        phase=hang.phase,
        step=hang.step,
        stalled_s=hang.stalled_s,
        limit_s=hang.limit_s,
        behind=hang.behind,
    )


def hang_over(moved: RankDigest, attempt: int, at: float) -> HangOver:
    return HangOver(at=at, attempt=attempt, rank=moved.rank, step=moved.step, phase=moved.phase)


def health_changed(change: HealthChange, attempt: int, at: float) -> HealthChanged:
    return HealthChanged(
        at=at, attempt=attempt, ranks=change.ranks, health=change.health, age_s=change.age_s
    )
