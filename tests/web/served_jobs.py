"""Run directories with the journals of stories, for tests of what is served."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import Event, JobSubmitted
from orchestrator.journal.journal import to_line
from orchestrator.web.fleet import Fleet, FleetState, Place
from tests.dashboard.dashboard_story import START, StoryClock, journal, metric

PATIENT_S = 60.0
"""A busy machine reads everything within this time."""
HOSTILE = 'a"b\\c\nd{e="f"} \x1b[31mred\u202egnp'


def written(
    path: Path, events: Sequence[Event], steps: Iterable[int] = (), attempt: int = 1
) -> RunDir:
    """A run directory with the journal of these events, and metrics of these steps."""
    path.mkdir(parents=True)
    run_dir = RunDir(path)
    run_dir.journal.write_bytes(b"".join(map(to_line, journal(events))))
    lines = [json.dumps(line(number, attempt=attempt)) for number in steps]
    run_dir.metrics.write_text("".join(f"{text}\n" for text in lines))
    return run_dir


def line(number: int, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    made = metric(number)
    return {
        "attempt": made.attempt,
        "step": number,
        "loss": made.loss,
        "tokens_per_second": made.tokens_per_second,
        "mfu": 0.41,
        "step_s": made.step_s,
        "checkpoint_s": 0.25 if number % 20 == 0 else 0.0,
        "time": made.time,
        **more,
    }


def renamed(events: Sequence[Event], name: str) -> list[Event]:
    return [
        replace(one, launch=replace(one.launch, job=name)) if isinstance(one, JobSubmitted) else one
        for one in events
    ]


def patient(fleet: Fleet) -> Fleet:
    """On a busy machine reading takes long although the storage does not hang."""
    fleet.limit_s = fleet.crew.slow_s = PATIENT_S
    return fleet


def fleet_of(run_dirs: Sequence[RunDir], at: float = START + 100) -> Fleet:
    return patient(Fleet(lambda: [Place(run_dir=one) for one in run_dirs], StoryClock(at)))


def state_of(run_dirs: Sequence[RunDir], at: float = START + 100) -> FleetState:
    return fleet_of(run_dirs, at).look()
