"""Which files a job enters from `ndctl submit` to its first step, in each kind of process.

The test prints the list. tests/job/test_walks.py does the same for one decision.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, Ndctl, submit_args

pytestmark = pytest.mark.process

ENTRIES = {
    ("orchestrator/cli/__init__.py", "main"): "submit",
    ("orchestrator/backends/entry/agent.py", "main"): "agent",
    ("orchestrator/agent/processes/fork_server.py", "main"): "fork server",
    ("orchestrator/agent/processes/fork_server.py", "_run_in_child"): "torchrun",
    ("orchestrator/agent/processes/rank_watcher.py", "main"): "rank watcher",
    ("orchestrator/agent/processes/rank_watcher.py", "_run_rank"): "rank",
}
"""The function that makes a process what it is."""

SMALL = {"cluster__gpus_per_host": "1", "train__steps": "5"}
"""2 hosts x 1 rank, because recording takes more processor time than training."""

MOST_FILES = {
    "submit": 141,
    "agent": 95,  # one fewer, unless the start is so slow that a timer of the leader comes first
    "fork server": 12,
    "torchrun": 8,
    "rank watcher": 10,
    "rank": 91,
}
"""A reader who follows the job opens these; a change that adds many must be a decision."""


def walks(recorded: str, until: float) -> dict[int, tuple[str, list[str]]]:
    """Process id to the kind of process and its files, in the order in which it entered them."""
    kinds: dict[int, str] = {}
    files: dict[int, list[str]] = {}
    for line in recorded.splitlines():
        at, pid, path, function = line.split("\t")
        if (kind := ENTRIES.get((path, function))) is not None:
            kinds.setdefault(int(pid), kind)
        if float(at) <= until:
            files.setdefault(int(pid), []).append(path)
    return {pid: (kinds[pid], entered) for pid, entered in files.items()}


def test_from_submit_to_the_first_step(ndctl: Ndctl, tmp_path: Path) -> None:
    record = tmp_path / "entered"
    recorder = {
        "PYTHONPATH": str(Path(__file__).parent),
        "WALK_ROOT": str(ROOT),
        "WALK_FILE": str(record),
    }
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *submit_args("--follow", **SMALL)],
        env=ndctl.environ | recorder,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first_step = ndctl.events("StepReached")[0]["at"]
    found = walks(record.read_text(), first_step)
    assert Counter(kind for kind, _ in found.values()) == {
        "submit": 1,
        "agent": 2,
        "fork server": 2,
        "torchrun": 2,
        "rank watcher": 2,
        "rank": 2,
    }
    for kind, most in MOST_FILES.items():
        # The first agent also leads, and rank 0 also writes the metrics: these enter most.
        files = max((entered for of, entered in found.values() if of == kind), key=len)
        sys.stdout.write(f"{kind} ({len(files)} files)\n  " + "\n  ".join(files) + "\n")
        assert len(files) <= most, kind
