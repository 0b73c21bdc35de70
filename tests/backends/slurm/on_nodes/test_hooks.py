import os
import time
from pathlib import Path

import pytest

from orchestrator.backends.slurm.on_nodes.hooks import run_hook

pytestmark = pytest.mark.process


def hook(log: Path, line: str, limit_s: float = 20.0, **environ: str) -> str:
    return run_hook("before", line, {"PATH": os.environ["PATH"], **environ}, log, limit_s)


def test_a_successful_hook_is_no_problem_and_its_output_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "hooks-node1.log"
    assert hook(log, 'echo "$NDCTL_HOST is ready"; echo twice >&2', NDCTL_HOST="node1") == ""
    assert log.read_text().splitlines() == [
        '# before: echo "$NDCTL_HOST is ready"; echo twice >&2',
        "node1 is ready",
        "twice",
    ]


def test_the_end_of_a_hooks_output_is_the_evidence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    hook(log, "echo of an earlier run; exit 1")
    why = hook(log, "seq 1000; echo no space left on /scratch >&2; exit 3")
    assert why == "exited with code 3; output: 997 | 998 | 999 | 1000 | no space left on /scratch"
    assert hook(log, "exit 4") == "exited with code 4 without output"
    assert hook(log, "kill -9 $$") == "was killed by SIGKILL without output"
    assert hook(log, "no-such-program").startswith("exited with code 127; output: bash: ")


def test_a_hook_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    log, alive = tmp_path / "log", tmp_path / "alive"
    line = f"(sleep 2; touch {alive}) & echo copying; wait"
    began = time.monotonic()
    assert hook(log, line, 0.3) == "timed out after 0.3 s; output: copying"
    assert time.monotonic() - began < 2
    time.sleep(2.2)
    assert not alive.exists()


def test_a_hook_that_cannot_start_is_reported(tmp_path: Path) -> None:
    assert "failed to start: " in hook(tmp_path / "no" / "folder", "true")
