"""Adds to events the classification (`reading`) that the agents of their hosts would add."""

from typing import TypeVar

from msgspec.structs import replace

from orchestrator.contract.messages.events import (
    CheckpointFailed,
    EvidenceGathered,
    HostStopped,
    RankExited,
)
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.logs.readings import (
    End,
    read_exit,
    read_kernel,
    read_launcher,
    read_words,
)

E = TypeVar("E")


def as_read(event: E, own: tuple[FailureRule, ...] = ()) -> E:
    match event:
        case RankExited():
            end = End(
                exit_code=event.exit_code,
                signal=event.signal,
                error=event.error,
                lines=event.log_tail,
                phase=event.phase,
                ended_first=event.ended_first,
            )
            return replace(event, reading=read_exit(end, own))
        case EvidenceGathered():
            return replace(event, readings=read_kernel(event.kernel, own))
        case HostStopped():
            return replace(event, reading=read_launcher(event.why, own) if event.why else None)
        case CheckpointFailed():
            return replace(event, reading=read_words(event.why, own))
        case _:
            return event
