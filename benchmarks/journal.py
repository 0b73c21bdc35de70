"""How long a new leader of a long job takes to read the job's journal.

    python -m benchmarks.journal [ATTEMPTS] [HOSTS]

The real `step` handles the events of a job with 8 ranks per host and so many attempts of three
hours. Most attempts end because a rank is killed, some because an agent is lost, and a few because
the leader is. The journal is written, then folded as a new leader does it, from the beginning and
from the last snapshot. The commands that read a journal are timed as well.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from benchmarks.measure.timing import machine
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CheckpointSaved,
    Event,
    HostStopped,
    LeaderStarted,
    StepReached,
    Tick,
    TrainingResumed,
)
from orchestrator.detect.heartbeat_monitor import RECORD_EVERY_S
from orchestrator.job.stage import IDLE, OUTSIDE
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal import snapshot
from orchestrator.journal.journal import Entry, Journal, Place, to_line
from orchestrator.journal.supervisor import NOTHING, Folded, Supervisor, is_journalled
from orchestrator.leader.records.snapshot_writer import CALM, EVERY_LINES
from orchestrator.system import SystemClock
from tests.job.job_driver import START, exited, host, raised, submitted

ATTEMPTS = 419
"""What 16,384 GPUs did in 54 days (Llama 3)."""
HOSTS = 2_048
EACH = 8
SPARES = 8
LASTS_S = 3 * 3600.0
"""An attempt."""
SAVES_S = 900.0
LOSES_EVERY = 10
"""So many attempts, one ends because an agent is lost …"""
LEADS_EVERY = 50
"""… and one because the leader is."""
RAISE = 16
"""Peers of a rank that is killed which raise before they are stopped …"""
STOPPED = 256
"""… and those of which the journal is told that they are: more change nothing."""
SWITCH = 32
"""Hosts under a leaf."""
LOG_TAIL = tuple(f"2026-11-22 12:00:00 step {n} loss 2.345 tokens/s 12345" for n in range(20))


class Story:
    """The job's events one after the other; each is made when what is before it was decided on."""

    def __init__(self, hosts: int) -> None:
        self.at, self.run, self.number = START, Run(), 0
        self.names = tuple(host(n) for n in range(hosts + SPARES))
        self.hosts = hosts

    def write(self, file: BinaryIO, attempts: int) -> Folded:
        """The journal; and what the leader's last snapshot would have known."""
        kept, size = NOTHING, 0
        for event in self._events(attempts):
            before = self.run
            self.run, actions = step(before, event)
            if is_journalled(event, before, self.run):
                self.number += 1
                size += file.write(to_line(Entry(seq=self.number, event=event, actions=actions)))
            if self.number >= kept.place.lines + EVERY_LINES and isinstance(self.run.stage, CALM):
                kept = Folded(run=self.run, place=Place(lines=self.number, offset=size))
        return kept

    def _events(self, attempts: int) -> Iterator[Event]:
        yield submitted(self.hosts, EACH, SPARES, at=self.at, max_restarts=16)
        yield from self._leads(0)
        for number in range(1, attempts + 1):
            yield from self._trains()
            if number % LEADS_EVERY == 0:
                yield from self._leads(number)
            else:
                yield from self._breaks(number)
            while isinstance(self.run.stage, IDLE):
                self.at += 10
                yield Tick(at=self.at)
            assert not isinstance(self.run.stage, OUTSIDE), self.run.stage.reason

    def _leads(self, number: int) -> Iterator[Event]:
        switches = {name: ("spine", f"leaf-{n // SWITCH}") for n, name in enumerate(self.names)}
        given = Allocation(id="7", restarts=number, hosts=self.names, switches=switches)
        yield LeaderStarted(at=self.at, host=self.names[0], pid=number, allocation=given)
        for name in self.names:
            yield self._comes(name, number)

    def _comes(self, name: str, number: int) -> AgentRegistered:
        at, address = self._soon(), f"{name}.cluster"
        drawn = f"{number:016x}"
        return AgentRegistered(
            at=at, host=name, address=address, devices=EACH, pid=number, incarnation=drawn
        )

    def _soon(self) -> float:
        self.at += 0.001
        return self.at

    def _trains(self) -> Iterator[Event]:
        attempt, first, begun = self.run.attempt.number, self.run.progress.saved, self.at
        yield TrainingResumed(at=self.at, attempt=attempt, step=first)
        step, saved_at = first, begun
        while self.at < begun + LASTS_S:
            self.at, step = self.at + RECORD_EVERY_S, step + 10
            yield StepReached(
                at=self.at, attempt=attempt, step=step, loss=2.345, tokens_per_second=12345.6
            )
            if self.at >= saved_at + SAVES_S:
                saved_at = self.at
                yield CheckpointSaved(at=self.at, attempt=attempt, step=step)

    def _breaks(self, number: int) -> Iterator[Event]:
        run = self.run
        culprit = run.attempt.placement[number * 7919 % len(run.attempt.placement)]
        if lost := number % LOSES_EVERY == 0:
            yield AgentLost(at=self._soon(), host=culprit, why="it said nothing", silent_s=12.0)
        else:
            rank = run.attempt.placement.index(culprit) * EACH
            yield exited(rank, run.attempt.number, at=self._soon(), host=culprit, log_tail=LOG_TAIL)
        words = "NCCL error: remote process exited or there was a network error"
        for place, name in enumerate(run.attempt.placement[: (RAISE + STOPPED) // EACH]):
            for rank in range(place * EACH, (place + 1) * EACH):
                more = {"host": name, "log_tail": LOG_TAIL, "stopped": rank >= RAISE}
                if name != culprit:
                    yield raised(rank, words, run.attempt.number, at=self._soon(), **more)
        for name in run.attempt.placement:
            if name != culprit or not lost:
                yield HostStopped(
                    at=self._soon(), attempt=run.attempt.number, host=name, finished=False
                )
        if lost:
            yield self._comes(culprit, number)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def fold(run_dir: RunDir, story: Story, what: str) -> None:
    begun, cpu = time.perf_counter(), time.process_time()
    with Journal(run_dir.journal, SystemClock()) as journal:
        known = snapshot.load(run_dir)
        supervisor = Supervisor(journal, known=known)
    took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    assert supervisor.run == story.run
    rest = story.number - known.place.lines
    print(f"    a new leader {what} has folded {rest:,} lines in {took:.2f} s ({cpu:.2f} s of CPU)")


def typed(run_dir: RunDir, command: str) -> None:
    """How long a person waits for an answer."""
    job = [] if command == "list" else [run_dir.path.name]
    argv = [sys.executable, "-m", "orchestrator", command, *job]
    begun = time.perf_counter()
    subprocess.run(
        [*argv, "--run-root", run_dir.path.parent], check=True, stdout=subprocess.DEVNULL
    )
    print(f"    `ndctl {command}` has answered after {time.perf_counter() - begun:.2f} s")


def main(attempts: int, hosts: int) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        run_dir, story = RunDir(Path(folder) / "weeks"), Story(hosts)
        run_dir.path.mkdir()
        with run_dir.journal.open("wb") as file:
            kept = story.write(file, attempts)
        size = run_dir.journal.stat().st_size
        print(f"{attempts} attempts of {hosts * EACH} ranks on {hosts} hosts")
        print(f"    {story.number:,} lines, {size:,} bytes")
        fold(run_dir, story, "without a snapshot")
        begun = time.process_time()
        snapshot.write(run_dir, kept, lambda: None)
        took, size = time.process_time() - begun, run_dir.state.stat().st_size
        print(f"    a snapshot of {size:,} bytes is written in {took:.2f} s of CPU")
        fold(run_dir, story, "with the last one")
        for words in ("status", "describe", "list", "diagnose"):
            typed(run_dir, words)
        print(f"    {peak_gib():.2f} GiB at the most")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    main(numbers[0] if numbers else ATTEMPTS, numbers[1] if len(numbers) > 1 else HOSTS)
