"""A host that receives the messages of rank watchers, for tests of the processes below an agent."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.messages.rank_messages import Datagram, RankStarted, from_bytes
from tests.agent.world import WAIT_S

WATCHER = [sys.executable, "-m", "orchestrator.agent.processes.rank_watcher"]


@dataclass
class Host:
    """A folder with a lock and logs, and the socket of the agent."""

    folder: Path
    inbox: socket.socket

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / "rank-2.log"

    @property
    def environ(self) -> dict[str, str]:
        values = {"RANK": "2", "LOCAL_RANK": "0", "NDCTL_ATTEMPT": "4"}
        return {**os.environ, **values, "NDCTL_HEARTBEAT_SOCKET": str(self.folder / "sock")}

    def rank(self, *command: str) -> list[str]:
        place = ["--lock", str(self.lock), "--log-dir", str(self.folder / "logs")]
        return [*WATCHER, *place, "--", *command]

    def receive(self) -> Datagram:
        return from_bytes(self.inbox.recv(65_536))

    def receive_start(self) -> RankStarted:
        started = self.receive()
        assert isinstance(started, RankStarted)
        assert (started.attempt, started.rank, started.local_rank) == (4, 2, 0)
        return started

    def run(self, *command: str) -> int:
        """Run one command below a rank watcher to its end; returns the watcher's exit code."""
        argv = self.rank(*command)
        return subprocess.run(argv, env=self.environ, timeout=WAIT_S, check=False).returncode


@contextmanager
def listening_host(folder: Path) -> Iterator[Host]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.settimeout(WAIT_S)
        inbox.bind(str(folder / "sock"))
        yield Host(folder, inbox)
