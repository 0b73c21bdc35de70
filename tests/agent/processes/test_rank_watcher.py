"""The rank watcher with real, cheap processes: `sh` and `sleep` instead of a rank."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.contract.files.env import STACKS_IN_C, STACKS_SIGNAL
from orchestrator.contract.messages.events import RankExited
from tests.agent.watched_host import Host, listening_host
from tests.agent.world import WAIT_S, is_gone, kill, wait_for

pytestmark = pytest.mark.process


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with listening_host(tmp_path) as host:
        yield host


@pytest.mark.parametrize(
    ("script", "code", "number", "watcher_code"),
    [
        ("exit 0", 0, None, 0),
        ("exit 78", 78, None, 78),
        ("kill -SEGV $$", None, signal.SIGSEGV, 128 + signal.SIGSEGV),
    ],
)
def test_the_watcher_reports_the_exit_of_the_rank_and_exits_alike(
    host: Host, script: str, code: int | None, number: int | None, watcher_code: int
) -> None:
    assert host.run("sh", "-c", script) == watcher_code
    host.receive_start()
    assert host.receive() == RankExited(attempt=4, rank=2, exit_code=code, signal=number)


def test_output_goes_to_the_ranks_own_log(host: Host) -> None:
    for word in ("first", "second"):
        host.run("sh", "-c", f"echo {word}; echo {word} error >&2")
    assert host.log.read_text() == "first\nfirst error\nsecond\nsecond error\n"


def test_a_command_that_does_not_exist_exits_with_127(host: Host) -> None:
    assert host.run("no-such-program-here") == 127
    host.receive_start()
    assert host.receive() == RankExited(attempt=4, rank=2, exit_code=127, signal=None)
    assert "failed to start no-such-program-here" in host.log.read_text()


def test_a_missing_agent_is_no_error(host: Host) -> None:
    host.inbox.close()
    assert host.run("sh", "-c", "exit 5") == 5
    assert "failed to send a message to the agent" in host.log.read_text()


def test_a_sigterm_to_the_group_ends_the_rank_and_then_its_watcher(host: Host) -> None:
    watcher = subprocess.Popen(host.rank("sleep", "600"), env=host.environ, start_new_session=True)
    host.receive_start()
    # The signal comes at once. A rank that has not started yet must get it too.
    os.killpg(watcher.pid, signal.SIGTERM)
    assert host.receive() == RankExited(attempt=4, rank=2, exit_code=None, signal=signal.SIGTERM)
    assert watcher.wait(WAIT_S) == 128 + signal.SIGTERM


def test_a_request_for_stacks_does_not_kill_a_rank_that_cannot_answer_yet(host: Host) -> None:
    watcher = subprocess.Popen(host.rank("sleep", "600"), env=host.environ)
    child = host.receive_start().pid
    wait_for(lambda: Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"), "sleep")
    os.kill(child, STACKS_SIGNAL)
    os.kill(child, STACKS_IN_C)
    time.sleep(0.05)
    assert not is_gone(child)
    kill(child)
    watcher.wait(WAIT_S)
    assert host.receive() == RankExited(attempt=4, rank=2, exit_code=None, signal=9)


def test_no_rank_starts_if_its_torchrun_has_exited(host: Host) -> None:
    mark = host.folder / "mark"
    orphan = {**host.environ, "NDCTL_TORCHRUN_PID": "1"}
    done = subprocess.run(host.rank("touch", str(mark)), env=orphan, timeout=WAIT_S, check=False)
    assert done.returncode == 137
    assert not mark.exists()
