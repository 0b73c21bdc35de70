"""Commands that outlive the process that starts them."""

import os
import signal
from pathlib import Path

import pytest

from orchestrator.backends.slurm.detach import start
from orchestrator.errors import BackendError

PATH = {"PATH": "/usr/bin:/bin"}
pytestmark = pytest.mark.process


def test_a_running_command_has_its_own_session(tmp_path: Path) -> None:
    process = start(["sleep", "60"], PATH, tmp_path / "log", 0.05)
    try:
        assert process.poll() is None
        assert os.getsid(process.pid) == process.pid
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_a_command_that_fails_early_is_reported_with_the_end_of_its_output(tmp_path: Path) -> None:
    script = "echo first; echo second; echo no such node >&2; exit 3"
    with pytest.raises(BackendError, match="sh failed with code 3: second no such node"):
        start(["sh", "-c", script], PATH, tmp_path / "log", 20.0)


def test_a_command_that_succeeds_early_is_no_error(tmp_path: Path) -> None:
    assert start(["true"], PATH, tmp_path / "log", 20.0).returncode == 0


def test_a_missing_command_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="failed to start no-such-program"):
        start(["no-such-program"], PATH, tmp_path / "log", 1.0)
    with pytest.raises(BackendError, match="failed to start"):
        start(["true"], PATH, tmp_path / "no" / "log", 1.0)
