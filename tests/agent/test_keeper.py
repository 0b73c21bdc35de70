"""Real processes, as cheap as they come: `sh` and `sleep` around the keeper."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from orchestrator.contract.datagrams import Datagram, RankEnded, RankStarted, from_bytes
from orchestrator.locks import is_free
from tests.agent.world import WAIT_S, is_gone, kill, wait_for

pytestmark = pytest.mark.process

KEEPER = [sys.executable, "-m", "orchestrator.agent.keeper"]


@dataclass
class Host:
    """A place with a lock, a log folder, and ears."""

    folder: Path
    ears: socket.socket

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / "rank-2.log"

    @property
    def environ(self) -> dict[str, str]:
        told = {"RANK": "2", "LOCAL_RANK": "0", "NDCTL_ATTEMPT": "4"}
        return {**os.environ, **told, "NDCTL_HEARTBEAT_SOCKET": str(self.folder / "sock")}

    def rank(self, *command: str) -> list[str]:
        place = ["--lock", str(self.lock), "--log-dir", str(self.folder / "logs")]
        return [*KEEPER, "rank", *place, "--", *command]

    def hear(self) -> Datagram:
        return from_bytes(self.ears.recv(65_536))

    def hear_start(self) -> RankStarted:
        started = self.hear()
        assert isinstance(started, RankStarted)
        assert (started.attempt, started.rank, started.local_rank) == (4, 2, 0)
        return started

    def run(self, *command: str) -> int:
        """Keep one command to its end; the keeper's exit code."""
        argv = self.rank(*command)
        return subprocess.run(argv, env=self.environ, timeout=WAIT_S, check=False).returncode


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ears:
        ears.settimeout(WAIT_S)
        ears.bind(str(tmp_path / "sock"))
        yield Host(tmp_path, ears)


@dataclass
class Chain:
    agent: int
    torchrun: int
    keeper: int
    child: int


@contextmanager
def chain(host: Host) -> Iterator[Chain]:
    """agent (sh) -> torchrun (sh, bound to it) -> keeper -> child (sleep)."""
    rank = shlex.join(host.rank("sleep", "60"))
    bind = shlex.join([*KEEPER, "bind", "--lock", str(host.lock)])
    torchrun = shlex.join(["sh", "-c", f"{rank} & wait"])
    agent = subprocess.Popen(
        ["sh", "-c", f"{bind} --parent $$ -- {torchrun} & wait"], env=host.environ
    )
    try:
        child = host.hear_start().pid
        keeper = parent_of(child)
        yield Chain(agent.pid, parent_of(keeper), keeper, child)
    finally:
        agent.kill()
        agent.wait(WAIT_S)


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("PPid:")[1].split()[0])


@pytest.mark.parametrize("victim", ["agent", "torchrun", "keeper", "child"])
def test_nothing_below_a_killed_process_survives_and_the_lock_is_free(
    host: Host, victim: str
) -> None:
    with chain(host) as processes:
        assert parent_of(processes.torchrun) == processes.agent
        assert not is_free(host.lock)
        kill(getattr(processes, victim))
        for name in ("torchrun", "keeper", "child"):
            pid = getattr(processes, name)
            wait_for(partial(is_gone, pid), f"the end of the {name}")
        wait_for(lambda: is_free(host.lock), "the lock")
        if victim == "child":
            assert host.hear() == RankEnded(attempt=4, rank=2, exit_code=None, signal=9)


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
    assert host.hear() == RankEnded(attempt=4, rank=2, exit_code=code, signal=number)


def test_output_goes_to_the_ranks_own_log(host: Host) -> None:
    for word in ("first", "second"):
        host.run("sh", "-c", f"echo {word}; echo {word} error >&2")
    assert host.log.read_text() == "first\nfirst error\nsecond\nsecond error\n"


def test_a_command_that_does_not_exist_is_told_as_127(host: Host) -> None:
    assert host.run("no-such-program-here") == 127
    host.hear_start()
    assert host.hear() == RankEnded(attempt=4, rank=2, exit_code=127, signal=None)
    assert "no-such-program-here could not be started" in host.log.read_text()


def test_nobody_listening_is_no_error(host: Host) -> None:
    host.ears.close()
    assert host.run("sh", "-c", "exit 5") == 5
    assert "the agent could not be told" in host.log.read_text()


def test_the_rank_gets_the_groups_sigterm_and_its_keeper_outlives_it(host: Host) -> None:
    keeper = subprocess.Popen(host.rank("sleep", "60"), env=host.environ, start_new_session=True)
    host.hear_start()
    # At once: the rank may not even have begun, and must get it all the same.
    os.killpg(keeper.pid, signal.SIGTERM)
    assert host.hear() == RankEnded(attempt=4, rank=2, exit_code=None, signal=signal.SIGTERM)
    assert keeper.wait(WAIT_S) == 128 + signal.SIGTERM


def test_being_asked_for_stacks_does_not_kill_a_rank_that_cannot_answer_yet(host: Host) -> None:
    keeper = subprocess.Popen(host.rank("sleep", "60"), env=host.environ)
    child = host.hear_start().pid
    wait_for(lambda: Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"), "sleep")
    os.kill(child, signal.SIGUSR2)
    time.sleep(0.05)
    assert not is_gone(child)
    kill(child)
    keeper.wait(WAIT_S)
    assert host.hear() == RankEnded(attempt=4, rank=2, exit_code=None, signal=9)


def test_a_bound_command_is_not_started_when_its_parent_has_gone(host: Host) -> None:
    mark = host.folder / "mark"
    argv = [*KEEPER, "bind", "--lock", str(host.lock), "--parent", "1", "--", "touch", str(mark)]
    assert subprocess.run(argv, timeout=WAIT_S, check=False).returncode == 137
    assert not mark.exists()


def test_a_rank_is_not_started_when_its_torchrun_has_gone(host: Host) -> None:
    mark = host.folder / "mark"
    orphan = {**host.environ, "NDCTL_TORCHRUN_PID": "1"}
    done = subprocess.run(host.rank("touch", str(mark)), env=orphan, timeout=WAIT_S, check=False)
    assert done.returncode == 137
    assert not mark.exists()


def ignored(status: str) -> set[int]:
    """Numbers of the signals in the mask of a /proc/PID/status."""
    line = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    mask = int(line.split()[1], 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


FROM_A_SCHEDULER = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def bound(host: Host, *command: str) -> list[str]:
    place = ["--lock", str(host.lock), "--parent", str(os.getpid())]
    return [*KEEPER, "bind", *place, "--", *command]


def test_what_a_scheduler_sends_to_all_processes_does_not_end_torchrun(host: Host) -> None:
    argv = bound(host, "cat", "/proc/self/status")
    said = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
    assert ignored(said) >= FROM_A_SCHEDULER


def test_a_rank_below_it_can_be_ended_by_sigterm_all_the_same(host: Host) -> None:
    # The shell in between is torchrun: what is ignored there, it hands down.
    script = shlex.join(host.rank("cat", "/proc/self/status"))
    environ = {**host.environ, "NDCTL_TORCHRUN_PID": ""}
    argv = bound(host, "sh", "-c", f"NDCTL_TORCHRUN_PID=$$ {script} & wait")
    subprocess.run(argv, env=environ, timeout=WAIT_S, check=True)
    found = ignored(host.log.read_text())
    assert found & FROM_A_SCHEDULER == {signal.SIGUSR1, signal.SIGUSR2}
