"""Records what `step` decides, and checks that it still decides the same.

    python -m tests.job.replay record FOLDER --seeds N    one journal for each simulated seed
    python -m tests.job.replay check FOLDER [--no-prose]  all recordings below the folder
    python -m pytest -p tests.job.replay --record-steps FOLDER tests/job
                                                          every call of `step` that tests make

A recording is a journal (`*.jsonl`, `*.jsonl.gz`), or a tree of calls (`*.steps.gz`), in which each
line has the number of the line whose state it starts from. Both hold events and their actions. A
tree also describes the state after each event in short; `record` writes this description of the
last state of each journal into `ends.json`.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.codec import decode, encode, encode_tagged
from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.events import Event
from orchestrator.job import transitions as step_module
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import parse
from orchestrator.simulation.laws.law import LawViolated
from orchestrator.simulation.run import Simulation
from orchestrator.simulation.scenario import scenario

PROSE = ("reason",)
"""Fields of actions and of the description that hold text for a person."""
ENDS = "ends.json"

Body = dict[str, Any]


def describe(run: Run) -> Body:
    """The visible part of a state, in values that do not depend on how the state is stored."""
    return {
        "state": run.state,
        "stage": run.stage.title,
        "attempt": run.attempt.number,
        "restarts": run.history.restarts,
        "step": run.attempt.step,
        "saved": run.progress.saved,
        "incidents": len(run.history.incidents),
        "hosts": list(run.attempt.placement),
        "reason": run.stage.reason,
    }


def simulated(seed: int) -> bytes:
    """The journal of one simulated job."""
    simulation = Simulation(scenario(seed))
    try:
        simulation.run()
    except LawViolated as broken:
        sys.stderr.write(f"seed {seed} broke a law: {broken}\n")
    return bytes(simulation.world.storage.journal)


def record(folder: Path, seeds: range) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ends: dict[str, Body] = {}
    for seed in seeds:
        name, data = f"seed-{seed:06}.jsonl.gz", simulated(seed)
        (folder / name).write_bytes(gzip.compress(data, 3))
        run = Run()
        for entry in parse(data):
            run, _ = step(run, entry.event)
        ends[name] = describe(run)
    (folder / ENDS).write_text(json.dumps(ends))


# Check


@dataclass(slots=True)
class Checked:
    recordings: int = 0
    lines: int = 0
    differences: list[str] = field(default_factory=list)


def check(folder: Path, *, prose: bool = True) -> Checked:
    found = Checked()
    for path in sorted(folder.rglob("*")):
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            _check_journal(path, found, prose)
        elif path.name.endswith(".steps.gz"):
            _check_tree(path, found, prose)
        else:
            continue
        found.recordings += 1
    return found


def _check_journal(path: Path, found: Checked, prose: bool) -> None:
    data = path.read_bytes()
    run = Run()
    for entry in parse(gzip.decompress(data) if path.suffix == ".gz" else data):
        run, actions = step(run, entry.event)
        _compare(f"{path}:{entry.seq}", _bodies(actions), _bodies(entry.actions), found, prose)
    ends = path.parent / ENDS
    if ends.exists() and (end := json.loads(ends.read_text()).get(path.name)):
        _compare(f"{path}: end", describe(run), end, found, prose)


def _check_tree(path: Path, found: Checked, prose: bool) -> None:
    runs = [Run()]
    for number, line in enumerate(gzip.decompress(path.read_bytes()).splitlines(), 1):
        recorded = json.loads(line)
        run, actions = step(runs[recorded["from"]], decode(Event, recorded["event"]))
        runs.append(run)
        where = f"{path}:{number}"
        _compare(where, _bodies(actions), recorded["actions"], found, prose)
        _compare(where, describe(run), recorded["after"], found, prose)


def _bodies(actions: tuple[Action, ...]) -> list[Body]:
    return [encode_tagged(action) for action in actions]


def _compare(where: str, new: Any, old: Any, found: Checked, prose: bool) -> None:
    found.lines += 1
    new, old = json.loads(json.dumps(new)), json.loads(json.dumps(old))
    if not prose:
        new, old = without_prose(new), without_prose(old)
    if new != old:
        found.differences.append(f"{where}\n  now    {new}\n  before {old}")


def without_prose(body: Any) -> Any:
    if isinstance(body, list):
        return [without_prose(one) for one in body]
    if isinstance(body, dict):
        return {key: without_prose(value) for key, value in body.items() if key not in PROSE}
    return body


# As a plugin of pytest


class Recorder:
    """Replaces `step`, and records each call whose state leads back to an empty state."""

    def __init__(self, folder: Path, real: Callable[..., Any]) -> None:
        self.folder, self.real, self.count = folder, real, 0
        self.clear()

    def clear(self) -> None:
        self.lines: list[bytes] = []
        self.known: dict[int, tuple[int, Run]] = {}
        self.number = 0

    def __call__(self, run: Run, event: Event) -> tuple[Run, tuple[Action, ...]]:
        after, actions = self.real(run, event)
        known = self.known.get(id(run))
        start = known[0] if known else 0 if run == Run() else None
        if start is not None:
            self.number += 1
            self.known.setdefault(id(after), (self.number, after))
            body = {
                "from": start,
                "event": encode_tagged(event),
                "actions": _bodies(actions),
                "after": encode(describe(after)),
            }
            self.lines.append(json.dumps(body).encode())
        return after, actions

    def flush(self) -> None:
        if self.lines:
            self.count += 1
            path = self.folder / f"test-{self.count:05}.steps.gz"
            path.write_bytes(gzip.compress(b"\n".join(self.lines), 3))
        self.clear()


_recorders: list[Recorder] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-steps", type=Path)


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Replace `step` before any test module imports it."""
    folder: Path | None = early_config.known_args_namespace.record_steps
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(folder, step)
        step_module.step = recorder
        _recorders.append(recorder)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    yield
    for recorder in _recorders:
        recorder.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.job.replay", description=__doc__)
    parser.add_argument("verb", choices=("record", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--no-prose", action="store_true")
    args = parser.parse_args()
    if args.verb == "record":
        record(args.folder, range(1, args.seeds + 1))
        return 0
    found = check(args.folder, prose=not args.no_prose)
    counts = f"{found.recordings} recordings, {found.lines} comparisons"
    differences = [*found.differences[:20], f"{counts}, {len(found.differences)} differences"]
    sys.stdout.write("\n".join(differences) + "\n")
    return 1 if found.differences else 0


if __name__ == "__main__":
    sys.exit(main())
