"""Real processes, as cheap as they come: `sh` and `sleep` around the keeper."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.contract.messages.events import RankExited
from tests.agent.kept import Host, listening
from tests.agent.world import WAIT_S, is_gone, kill, wait_for

pytestmark = pytest.mark.process


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with listening(tmp_path) as host:
        yield host


@pytest.mark.parametrize(
    ("script", "code", "number", "left_with"),
    [
        ("exit 0", 0, None, 0),
        ("exit 78", 78, None, 78),
        ("kill -SEGV $$", None, signal.SIGSEGV, 128 + signal.SIGSEGV),
    ],
)
def test_tells_how_the_rank_ended_and_passes_it_on(
    host: Host, script: str, code: int | None, number: int | None, left_with: int
) -> None:
    assert host.run("sh", "-c", script) == left_with
    host.hear_start()
    assert host.hear() == RankExited(attempt=4, rank=2, exit_code=code, signal=number)


def test_output_goes_to_the_ranks_own_log(host: Host) -> None:
    for word in ("first", "second"):
        host.run("sh", "-c", f"echo {word}; echo {word} error >&2")
    assert host.log.read_text() == "first\nfirst error\nsecond\nsecond error\n"


def test_a_command_that_does_not_exist_is_told_as_127(host: Host) -> None:
    assert host.run("no-such-program-here") == 127
    host.hear_start()
    assert host.hear() == RankExited(attempt=4, rank=2, exit_code=127, signal=None)
    assert "failed to start no-such-program-here" in host.log.read_text()


def test_nobody_listening_is_no_error(host: Host) -> None:
    host.ears.close()
    assert host.run("sh", "-c", "exit 5") == 5
    assert "failed to send a message to the agent" in host.log.read_text()


def test_the_rank_gets_the_groups_sigterm_and_its_keeper_outlives_it(host: Host) -> None:
    keeper = subprocess.Popen(host.rank("sleep", "600"), env=host.environ, start_new_session=True)
    host.hear_start()
    # At once: the rank may not even have begun, and must get it all the same.
    os.killpg(keeper.pid, signal.SIGTERM)
    assert host.hear() == RankExited(attempt=4, rank=2, exit_code=None, signal=signal.SIGTERM)
    assert keeper.wait(WAIT_S) == 128 + signal.SIGTERM


def test_being_asked_for_stacks_does_not_kill_a_rank_that_cannot_answer_yet(host: Host) -> None:
    keeper = subprocess.Popen(host.rank("sleep", "600"), env=host.environ)
    child = host.hear_start().pid
    wait_for(lambda: Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"), "sleep")
    os.kill(child, signal.SIGUSR2)
    time.sleep(0.05)
    assert not is_gone(child)
    kill(child)
    keeper.wait(WAIT_S)
    assert host.hear() == RankExited(attempt=4, rank=2, exit_code=None, signal=9)


def test_a_rank_is_not_started_when_its_torchrun_has_gone(host: Host) -> None:
    mark = host.folder / "mark"
    orphan = {**host.environ, "NDCTL_TORCHRUN_PID": "1"}
    done = subprocess.run(host.rank("touch", str(mark)), env=orphan, timeout=WAIT_S, check=False)
    assert done.returncode == 137
    assert not mark.exists()
