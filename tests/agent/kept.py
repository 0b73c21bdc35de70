"""A host with ears, for tests of the processes between agent and rank."""

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

KEEPER = [sys.executable, "-m", "orchestrator.agent.processes.rank_watcher"]


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
        return [*KEEPER, *place, "--", *command]

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


@contextmanager
def listening(folder: Path) -> Iterator[Host]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ears:
        ears.settimeout(WAIT_S)
        ears.bind(str(folder / "sock"))
        yield Host(folder, ears)
