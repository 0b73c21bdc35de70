"""Ctrl-C at the start of a command, and while it waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.app.cancel_jobs import after_interrupt
from orchestrator.app.remote import Found
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import CancelRequested
from tests.cli.test_verbs import AT, job, ndctl, run_root
from tests.jobs_on_disk import JOB, cluster, lead

__all__ = ["cluster", "job", "run_root"]
COMMAND = Path(__file__).parents[2] / "ndctl_command.py"
INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.argv[:] = ["ndctl", "--help"]
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
runpy.run_path(sys.argv.pop(2), run_name="__main__")
"""


@pytest.mark.process
@pytest.mark.parametrize("module", ["orchestrator.cli", "orchestrator.cli.options", "click"])
def test_an_interrupted_import_shows_no_traceback(module: str) -> None:
    argv = [sys.executable, "-c", INTERRUPTED_IMPORT, module, str(COMMAND)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (exit_codes.INTERRUPTED, "", "")


def test_an_interrupted_cancel_says_what_was_asked_and_what_to_type(
    job: Path, run_root: Path
) -> None:
    found = Found(RunDir(run_root / JOB))
    before = after_interrupt([found], {})
    assert (
        before == f"e2e is not cancelled yet; to cancel it: ndctl cancel e2e --run-root {run_root}"
    )
    lead(run_root, CancelRequested(at=AT + 9, by="me"))
    after = after_interrupt([found], dict(os.environ))
    assert after.startswith(("e2e is being cancelled, also without", "e2e has ended: CANCELLED"))


def test_an_empty_name_is_no_group(job: Path) -> None:
    """`ndctl cancel "$JOB"` without JOB must not cancel all jobs."""
    for verb in ("cancel", "status", "wait"):
        refused = ndctl(verb, "")
        assert refused.exit_code == exit_codes.BAD_JOB_STATE, verb
        assert "no job ''" in refused.stderr
