"""`step` still makes the decisions that are recorded in the journals under `tests/captured`."""

import json
from pathlib import Path

from orchestrator.contract.messages.actions import StartAttempt
from tests.job.replay import check, record, without_prose

CAPTURED = Path(__file__).parents[1] / "captured/journals"


def test_captured_journals_give_the_same_actions() -> None:
    found = check(CAPTURED, prose=False)
    assert found.recordings >= 1
    assert found.lines > 20
    assert not found.differences, found.differences[:3]


def test_a_recording_of_simulated_jobs_gives_the_same_actions(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    found = check(tmp_path)
    assert (found.recordings, found.differences) == (5, [])
    assert found.lines > 50


def test_a_changed_decision_is_reported(tmp_path: Path) -> None:
    (source,) = CAPTURED.glob("*.jsonl")
    lines = source.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if '"StartAttempt"' in line)
    body = json.loads(lines[at])
    body["actions"] = []
    lines[at] = json.dumps(body)
    (tmp_path / "one.jsonl").write_text("\n".join(lines) + "\n")
    (difference,) = check(tmp_path, prose=False).differences
    assert StartAttempt.__name__ in difference
    assert without_prose({"reason": "x", "kind": "y"}) == {"kind": "y"}
