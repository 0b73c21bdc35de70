"""What happened in a job as the spans of one trace. Pure: from the journal and the state.

A span appears once it has ended. Ids follow from the job and the span's key, so a new leader finds
the same spans under the same ids, and so does a job that is resumed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.messages.actions import Action, EndJob, Requeue, StartAttempt
from orchestrator.contract.messages.events import (
    CheckpointSaved,
    Event,
    HostStopped,
    JobSubmitted,
    StepReached,
)
from orchestrator.dashboard.format import culprit_text
from orchestrator.job.incident import Incident
from orchestrator.job.stage import Ended
from orchestrator.job.state import Run
from orchestrator.journal.journal import Entry

KINDS: tuple[type[Event] | type[Action], ...] = (
    *(JobSubmitted, HostStopped, CheckpointSaved, StepReached),
    *(StartAttempt, EndJob, Requeue),
)
"""The lines of the journal that are needed."""
Attribute = str | int | float | bool


class Span(Struct, frozen=True, kw_only=True):
    key: str
    """Names the span within its trace."""
    parent: str | None
    name: str
    start: float
    """Unix seconds."""
    end: float
    attributes: Mapping[str, Attribute]
    error: str | None = None
    """Why it ended badly."""


class Trace(Struct, frozen=True, kw_only=True):
    name: str
    """What the ids are made of: the run directory and the time of the first submission."""
    spans: tuple[Span, ...]

    @property
    def id(self) -> int:
        return _number(self.name, 16)

    def span_id(self, key: str) -> int:
        return _number(f"{self.name} {key}", 8)


def _number(text: str, size: int) -> int:
    # An id of 0 is not valid.
    return int.from_bytes(sha256(text.encode()).digest()[:size]) or 1


@dataclass
class _Attempt:
    start: StartAttempt
    at: float
    stopped: float | None = None
    """When its last host had stopped."""
    end: float | None = None


@dataclass
class _Seen:
    """What the journal tells since the last submission."""

    first: float = 0.0
    """When the job was submitted for the first time."""
    attempts: dict[int, _Attempt] = field(default_factory=dict)
    saves: list[tuple[int, float]] = field(default_factory=list)
    """Steps with a complete checkpoint, in order of time."""
    steps: dict[int, float] = field(default_factory=dict)
    """Attempt -> when it reached its first step."""


def trace_of(run_dir: Path, entries: Iterable[Entry], run: Run) -> Trace:
    """The spans of the last submission that have ended.

    Args:
        entries: the lines of the journal with one of `KINDS`.
        run: the state; the job must have been submitted.
    """
    seen = _read(entries)
    own = {"job_name": run_dir.name, "run_root": str(run_dir.parent)}
    spans = [*_attempts(seen, run), *_incidents(seen, run), *_job(run)]
    return Trace(
        name=f"{run_dir} {seen.first:.6f}",
        spans=tuple(_with(span, own) for span in spans),
    )


def _with(span: Span, own: Mapping[str, Attribute]) -> Span:
    return Span(
        key=span.key,
        parent=span.parent,
        name=span.name,
        start=span.start,
        end=max(span.start, span.end),
        attributes={**own, **span.attributes},
        error=span.error,
    )


def _read(entries: Iterable[Entry]) -> _Seen:
    seen = _Seen()
    for entry in entries:
        match entry.event:
            case JobSubmitted(at=at):
                seen = _Seen(first=seen.first or at, saves=seen.saves)
            case HostStopped(attempt=number, at=at) if number in seen.attempts:
                seen.attempts[number].stopped = at
            case CheckpointSaved(step=step, at=at):
                seen.saves.append((step, at))
            case StepReached(attempt=number, at=at):
                seen.steps.setdefault(number, at)
            case _:
                pass
        for action in entry.actions:
            if isinstance(action, StartAttempt | EndJob | Requeue):
                _end_attempts(seen, entry.event.at)
            if isinstance(action, StartAttempt):
                seen.attempts[action.attempt] = _Attempt(action, entry.event.at)
    return seen


def _end_attempts(seen: _Seen, at: float) -> None:
    for one in seen.attempts.values():
        if one.end is None:
            one.end = at if one.stopped is None else one.stopped


def _root(run: Run) -> str:
    """A resumed job has a further root in the same trace."""
    assert run.job is not None
    return f"job-{run.job.launch.launch}"


def _job(run: Run) -> Iterator[Span]:
    job, stage = run.job, run.stage
    if job is None or not isinstance(stage, Ended):
        return
    yield Span(
        key=_root(run),
        parent=None,
        name=f"job {job.launch.job}",
        start=job.at,
        end=stage.since,
        attributes={
            "backend": job.backend,
            "state": stage.ending,
            "ndctl_step": run.attempt.step,
            "ndctl_checkpoint_step": run.progress.saved,
            "ndctl_attempt": run.attempt.number,
            "ndctl_restarts_total": run.history.restarts,
        },
        error=stage.reason if stage.ending == "FAILED" else None,
    )


def _attempts(seen: _Seen, run: Run) -> Iterator[Span]:
    broke = {one.attempt: one for one in reversed(run.history.incidents)}
    for number, one in seen.attempts.items():
        if one.end is None:
            continue
        first = broke.get(number)
        yield Span(
            key=f"attempt-{number}",
            parent=_root(run),
            name=f"attempt {number}",
            start=one.at,
            end=one.end,
            attributes={
                "ndctl_attempt": number,
                "ndctl_hosts": len(one.start.hosts),
                "reason": one.start.reason,
            },
            error=first.cause if first is not None else None,
        )


def _incidents(seen: _Seen, run: Run) -> Iterator[Span]:
    for one in run.history.incidents:
        if one.resumed_after_s is not None:
            end = one.at + one.resumed_after_s
        elif isinstance(run.stage, Ended):
            end = run.stage.since
        else:
            continue
        # One of an earlier submission was exported then.
        if one.attempt and one.attempt not in seen.attempts:
            continue
        key = f"incident-{one.id}"
        yield Span(
            key=key,
            parent=f"attempt-{one.attempt}" if one.attempt else _root(run),
            name=f"incident {one.id} {one.kind}",
            start=one.at,
            end=end,
            attributes=_incident_attributes(one),
            error=one.cause,
        )
        detected = min(end, one.at + one.detected_after_s)
        yield _lost("detection", key, one.at, detected)
        if one.resumed_after_s is not None:
            yield _lost("restart", key, detected, end)
        if one.lost_steps:
            yield _lost("lost_work", key, _lost_since(one, seen), one.at)


def _incident_attributes(one: Incident) -> Mapping[str, Attribute]:
    told: dict[str, Attribute | None] = {
        "kind": one.kind,
        "class": one.failure,
        "scope": one.scope,
        "culprit": culprit_text(one.culprit),
        "decision": one.action,
        "rule": one.rule,
        "advice": one.advice,
        "drill": one.drill,
        "ndctl_attempt": one.attempt,
        "ndctl_step": one.step,
        "ndctl_checkpoint_step": one.saved,
        "lost_steps": one.lost_steps,
    }
    return {name: value for name, value in told.items() if value not in (None, "")}


def _lost(cause: str, incident: str, start: float, end: float) -> Span:
    return Span(
        key=f"{incident}-{cause}",
        parent=incident,
        name=cause,
        start=start,
        end=end,
        attributes={"cause": cause},
    )


def _lost_since(one: Incident, seen: _Seen) -> float:
    """When the work began that is repeated: with the checkpoint from which the next attempt
    resumed, or with the first step of the attempt if that is later."""
    began = [seen.steps[one.attempt]] if one.attempt in seen.steps else []
    saves: Sequence[float] = [at for step, at in seen.saves if step == one.saved and at <= one.at]
    return max([*began, *saves[-1:]], default=one.at)
