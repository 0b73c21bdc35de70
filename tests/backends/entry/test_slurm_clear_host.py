"""The step that kills the agent and ranks left on a host. Real processes and locks."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.backends.entry.slurm_clear_host import main
from orchestrator.backends.host_processes import pid_in
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.posix.locks import is_free
from orchestrator.system import SystemClock
from tests.agent.world import WAIT_S, TurnedClock, wait_for

pytestmark = pytest.mark.process

AGENT_SCRIPT = """
import fcntl, os, subprocess, sys, time
lock, ranks = sys.argv[1:]
fd = os.open(lock, os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
os.ftruncate(fd, 0)
os.write(fd, str(os.getpid()).encode())
shared = os.open(ranks, os.O_RDONLY | os.O_CREAT)
fcntl.flock(shared, fcntl.LOCK_SH)
die = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); print('up', flush=True); time.sleep(600)"
rank = subprocess.Popen([sys.executable, "-c", die], pass_fds=[shared], stdout=subprocess.PIPE)
os.close(shared)
rank.stdout.readline()
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    return run_dir


@contextmanager
def agent(run_dir: RunDir) -> Iterator["subprocess.Popen[bytes]"]:
    """An agent that holds its lock. Its rank holds the ranks lock and dies with it."""
    locks = (str(run_dir.agent_lock("node1")), str(run_dir.ranks_lock("node1")))
    process = subprocess.Popen([sys.executable, "-c", AGENT_SCRIPT, *locks], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


def clear_host(run_dir: RunDir, capfd: pytest.CaptureFixture[str]) -> str:
    code = main([f"--run-dir={run_dir.path}", "--host=node1"], SystemClock())
    output = capfd.readouterr()
    assert code == exit_codes.OK, output.err
    assert is_free(run_dir.agent_lock("node1"))
    assert is_free(run_dir.ranks_lock("node1")), "a rank still holds the lock"
    return output.out


def test_an_agent_that_has_ended_leaves_nothing_to_clear(
    run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    output = clear_host(run_dir, capfd)
    assert output == "its process on node1 had exited, and node1 is healthy\n"


@pytest.mark.parametrize("stopped", [True, False])
def test_a_remaining_agent_is_killed_with_its_ranks(
    run_dir: RunDir, capfd: pytest.CaptureFixture[str], stopped: bool
) -> None:
    with agent(run_dir) as process:
        if stopped:
            process.send_signal(signal.SIGSTOP)
            state = Path(f"/proc/{process.pid}/stat")
            wait_for(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "T", "the stop")
        output = clear_host(run_dir, capfd)
        assert process.wait(WAIT_S) == -signal.SIGKILL
    how = "stopped by a signal" if stopped else "running"
    assert output == f"its process {process.pid} on node1 still existed ({how}) and was killed\n"


def test_a_reused_pid_in_the_lock_is_not_killed(run_dir: RunDir) -> None:
    """The dead agent wrote the PID, so the process that holds the lock now is unknown."""
    other = subprocess.Popen(["sleep", "600"])
    lock = run_dir.agent_lock("node1")
    lock.write_text(str(other.pid))
    try:
        assert pid_in(lock) is None
        with lock.open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            main([f"--run-dir={run_dir.path}", "--host=node1"], TurnedClock())
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(WAIT_S)


def test_ranks_that_do_not_exit_are_an_error(
    run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    fd = os.open(run_dir.ranks_lock("node1"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    code = main([f"--run-dir={run_dir.path}", "--host=node1"], TurnedClock())
    os.close(fd)
    assert code == exit_codes.FAILED
    output = capfd.readouterr().err
    assert output.startswith("failed to clear node1: rank processes of this job are still running")
