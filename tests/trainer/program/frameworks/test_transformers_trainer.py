"""A real Trainer in one rank, with a socket in place of its agent."""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import ROOT

pytestmark = [pytest.mark.process, pytest.mark.slow]
SCRIPT = ROOT / "examples" / "scripts" / "transformers_trainer.py"


class Agent:
    """What a rank sends, and how to start it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "agent.sock"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.setblocking(False)
        (folder / "fence.json").write_text('{"leader": "one", "attempt": 1}')

    def run(self, *args: str) -> tuple[int, list[dict[str, Any]]]:
        """Exit code and messages of a rank that trains. Beats are left out."""
        words = (sys.executable, "-m", "trainer.program", str(self.folder), str(SCRIPT), *args)
        ndctl = {"NDCTL_RUN_DIR": str(self.folder), "NDCTL_HEARTBEAT_SOCKET": str(self.path)}
        with (self.folder / "log").open("w") as log:
            process = subprocess.Popen(words, env={**os.environ, **ndctl}, stdout=log, stderr=log)
            told = []
            while process.poll() is None:
                select.select([self.socket], [], [], 0.1)
                told += list(self._messages())
        return process.returncode, [*told, *self._messages()]

    def _messages(self) -> Iterator[dict[str, Any]]:
        try:
            while True:
                message = json.loads(self.socket.recv(1 << 16))
                if message["kind"] != "Beat":
                    yield message
        except BlockingIOError:
            return


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    one = Agent(tmp_path)
    yield one
    one.socket.close()


def steps(told: list[dict[str, Any]], kind: str) -> list[int]:
    return [message["step"] for message in told if message["kind"] == kind]


def test_a_trainer_resumes_before_a_checkpoint_that_has_lost_a_file(agent: Agent) -> None:
    code, told = agent.run("--steps", "6", "--save-every", "2")
    assert code == 0, (agent.folder / "log").read_text()
    assert steps(told, "TrainingResumed") == [0]
    assert steps(told, "CheckpointSaved") == [2, 4, 6]
    out = agent.folder / "trainer_output"
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    (out / "checkpoint-6" / "optimizer.pt").unlink()

    code, told = agent.run("--steps", "8", "--save-every", "2")
    assert code == 0, (agent.folder / "log").read_text()
    (resumed,) = (message for message in told if message["kind"] == "TrainingResumed")
    assert resumed["step"] == 4
    assert resumed["passed_over"] == [{"name": "checkpoint-6", "why": "optimizer.pt is missing"}]
    assert steps(told, "CheckpointSaved") == [6, 8]
