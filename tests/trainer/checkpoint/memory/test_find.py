"""All ranks resume from the newest step of which all have a whole copy, or from none."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.files.env import HOST
from tests.trainer.launch.tiny_runs import work

pytestmark = pytest.mark.process

WORKER = "tests.trainer.checkpoint.memory.memory_worker"
BOTH = [[6, 7], [6, 7]]


def test_the_newest_step_that_all_ranks_have_is_used(tmp_path: Path) -> None:
    asked: list[tuple[dict[str, Any], int | None, list[str]]] = [
        ({"steps": BOTH}, 7, []),
        # Rank 1 was killed before or while it copied step 7.
        ({"steps": [[6, 7], [6]]}, 6, []),
        ({"steps": BOTH, "torn": 1}, 6, []),
        ({"steps": [[6, 7], [4, 5]]}, None, []),
        # A host was lost, and the agent of its substitute has empty slots.
        ({"steps": [[6, 7], []], "torn": None}, None, []),
        (
            {"steps": BOTH, "flipped": 1},
            6,
            ["step-7 in memory: the copy of rank 1 on a has changed since it was made"],
        ),
        (
            {"steps": BOTH, "skip": [7, 9]},
            6,
            ["step-7 in memory: it has read batches up to 7, but batches 7 to 9 must be skipped"],
        ),
        # Training started from the disk since, or follows another plan.
        ({"steps": BOTH, "lineage": 3}, None, []),
        ({"steps": BOTH, "lineage": 0}, None, []),
        # Another plan of the same job.
        ({"steps": BOTH, "config": "other"}, 7, []),
        ({"steps": [[6, 7], [6]], "config": "other"}, 6, []),
        (
            {"steps": BOTH, "config": "other", "flipped": 1},
            6,
            ["step-7 in memory: the copy of rank 1 on a has changed since it was made"],
        ),
        (
            {"steps": BOTH, "config": "other", "skip": [7, 9]},
            6,
            ["step-7 in memory: it has read batches up to 7, but batches 7 to 9 must be skipped"],
        ),
        (
            {"steps": BOTH, "config": "other", "history": "other"},
            None,
            ["step-7 in memory: it was made with another configuration or version"],
        ),
        # Attempt 3 resumed from step 6 while a host was unreachable, and trained step 7 again.
        ({"steps": BOTH, "resumed": [6, 3]}, 6, []),
        # The same step of two attempts is not one checkpoint.
        ({"steps": BOTH, "attempts": [1, 2]}, None, []),
    ]
    answers = work(tmp_path, 2, [case for case, _, _ in asked], worker=WORKER, env={HOST: "a"})
    assert answers == [{"step": step, "skipped": skipped} for _, step, skipped in asked]
