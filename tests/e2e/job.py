"""A job that is run through the command line, with real agents, torchrun and ranks."""

import contextlib
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.mesh import AXES
from tests.trainer.launch.tiny_runs import finish, losses_of, train

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "tests" / "e2e" / "job.yaml"
WAIT_S = 600.0
MESH: Mapping[str, str] = {"parallel.tp": "1"}
"""dp_shard=4. With tp=2 a rank takes twice the processor time."""
TP: Mapping[str, str] = {"parallel__tp": "2"}
"""For tests that act between two steps: a step takes twice as long."""
LONG_TIMEOUTS: Mapping[str, str] = {
    "resilience__hang_timeout": "300",
    "resilience__stop_grace": "60",
}
"""Timeouts for tests that pause ranks."""


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str


def submit_args(*words: str, **options: str) -> tuple[str, ...]:
    """Arguments of `ndctl submit`. Two underscores in a key of `options` mean a dot."""
    edits = {**MESH, **{key.replace("__", "."): value for key, value in options.items()}}
    return ("submit", str(SPEC), *(f"--set={key}={value}" for key, value in edits.items()), *words)


@dataclass(frozen=True)
class Ndctl:
    """The `ndctl` command with its own run root."""

    run_root: Path

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "NDCTL_RUN_ROOT": str(self.run_root), "COLUMNS": "100"}

    def __call__(
        self, *words: str, timeout: float = WAIT_S, given: str | None = None
    ) -> CommandResult:
        """Run a command to its end. `given` is its standard input; None: that of the tests."""
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *words],
            env=self.environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            input=given,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *words],
            env=self.environ,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def submit(self, *words: str, **options: str) -> CommandResult:
        return self(*submit_args(*words, **options))

    def status(self) -> dict[str, Any]:
        done = self("status", "e2e", "--json")
        assert done.code == 0, done.err
        body: dict[str, Any] = json.loads(done.out)
        return body

    @property
    def run_dir(self) -> Path:
        return self.run_root / "e2e"

    def journal(self) -> list[dict[str, Any]]:
        """All events of the journal so far."""
        lines = (self.run_dir / "journal.jsonl").read_text().split("\n")[:-1]
        return [json.loads(line)["event"] for line in lines]

    def has_ended(self) -> bool:
        """Whether the job has ended as often as it was submitted. Reads the journal, because
        starting ndctl needs much CPU."""
        if not (self.run_dir / "journal.jsonl").exists():
            return False
        ends = [action for action in self.actions() if action["kind"] == "EndJob"]
        return len(ends) >= len(self.events("JobSubmitted")) > 0

    def actions(self) -> list[dict[str, Any]]:
        """All actions of the leader so far."""
        lines = (self.run_dir / "journal.jsonl").read_text().split("\n")[:-1]
        return [action for line in lines for action in json.loads(line)["actions"]]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.journal() if event["kind"] == kind]

    def losses(self) -> dict[int, float]:
        """Step to loss. If a step was trained twice, both losses must be equal bit by bit."""
        losses: dict[int, float] = {}
        for metric in self.metrics():
            assert losses.setdefault(metric["step"], metric["loss"]) == metric["loss"], metric
        return losses

    def metrics(self) -> list[dict[str, Any]]:
        """Complete lines of metrics.jsonl so far."""
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def num_steps(self) -> int:
        """Number of lines of metrics.jsonl."""
        return len(self.metrics())

    def ranks(self) -> dict[int, int]:
        """Rank to the pid of its process, not that of torchrun or of the rank watcher."""
        found = {}
        for pid, command in processes_of(self.run_dir).items():
            if rank := re.search(r"\(rank (\d+)\)$", command.rstrip()):
                found[int(rank[1])] = pid
        return found

    def rank_pid(self, rank: int) -> int:
        ranks = self.ranks()
        assert rank in ranks, f"no process of rank {rank}"
        return ranks[rank]

    @contextlib.contextmanager
    def paused_ranks(self) -> Iterator[None]:
        """Pauses all ranks, so that they train no step meanwhile. Submit with `LONG_TIMEOUTS`."""
        pids = wait_for(self.ranks, "ranks").values()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def uninterrupted(factory: pytest.TempPathFactory) -> Ndctl:
    """The finished job without a fault. It is trained once for all pytest workers."""
    with _once(factory, "uninterrupted") as (folder, is_done):
        command = Ndctl(folder)
        if not is_done:
            done = command.submit("--follow")
            assert done.code == 0, done.out + done.err
    return command


def losses_without_ndctl(factory: pytest.TempPathFactory, **options: str) -> dict[int, float]:
    """Losses of the same spec without ndctl. It is trained once for all pytest workers."""
    with _once(factory, "-".join(("alone", *options.values()))) as (folder, is_done):
        return losses_of(folder / "out") if is_done else train_alone(folder, **options)


def train_alone(folder: Path, **options: str) -> dict[int, float]:
    """The losses of ranks of the trainer that have the configuration which `submit` would give
    them. It costs a fraction of a job, because these ranks import nothing again."""
    shown = Ndctl(folder).submit("--dry-run", **options)
    assert shown.code == 0, shown.out + shown.err
    config, _ = json.JSONDecoder().raw_decode(shown.out, shown.out.index("{"))
    count = math.prod(config["parallel"][axis] for axis in AXES)
    ranks = train({**config, "out": str(folder / "out")}, count)
    assert finish(ranks) == [0] * count, ranks[0].output
    return losses_of(folder / "out")


@contextlib.contextmanager
def _once(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """A folder of all pytest workers, and whether one of them has filled it. The others wait."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    done = base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield base / name, done.exists()
        done.touch()


def wait_for(condition: Callable[[], Any], what: str, limit: float = WAIT_S) -> Any:
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {limit:.0f} s for {what}"
        time.sleep(0.05)
    return found


def processes_of(run_dir: Path) -> dict[int, str]:
    """Processes that have the run directory in their command line or environment."""
    found = {}
    mark = str(run_dir).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            if mark in command or mark in (folder / "environ").read_bytes():
                found[int(folder.name)] = command.replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def assert_nothing_left(run_dir: Path, limit: float = 120.0) -> None:
    wait_for(lambda: not processes_of(run_dir), f"the end of {processes_of(run_dir)}", limit)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
