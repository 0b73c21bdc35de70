"""A job of 2 nodes x 1 rank with slow steps, for tests in which Slurm interrupts it."""

import contextlib
import functools
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tests.e2e.job import (
    CommandResult,
    Ndctl,
    assert_nothing_left,
    processes_of,
    submit_args,
    train_alone,
    wait_for,
)
from tests.slurm.testbed import SlurmTestbed
from tests.testbeds import TestbedError

TESTBED_KNOBS: Mapping[str, str] = {
    "TB_KILL_WAIT": "30",
    "TB_EXTRA": "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE",
    "TB_PARTITIONS": "PartitionName=train Nodes=ALL Default=YES State=UP MaxTime=INFINITE"
    " PriorityTier=1 PreemptMode=REQUEUE GraceTime=60\n"
    "PartitionName=urgent Nodes=ALL State=UP MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF",
}
"""Knobs for a cluster with Slurm's default kill wait and a partition whose jobs preempt others."""
NOTHING_LEFT_S = 240.0
"""A disconnected node ends its processes only after it returns and the kill wait is over."""
NAME = "e2e"
STEPS = 32
SLOW_STEPS = {
    "model.config.hidden_size": "256",
    "model.config.intermediate_size": "704",
    "model.config.num_hidden_layers": "4",
    "train.steps": str(STEPS),
    "checkpoint.every_steps": "100",
    "cluster.gpus_per_host": "1",
    "parallel.tp": "1",
}
"""2 nodes x 1 rank. Steps are slow enough that the scheduler can interrupt the job. Ranks write a
checkpoint only when they are asked to stop."""


@dataclass(frozen=True)
class Job(Ndctl):
    """`ndctl` on a login node of a cluster."""

    slurm: SlurmTestbed
    extra_environ: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""

    @property
    def environ(self) -> dict[str, str]:
        conf = self.slurm.environ["SLURM_CONF"]
        return {**super().environ, "SLURM_CONF": conf, **self.extra_environ}

    def with_environ(self, **more: str) -> Self:
        return replace(self, extra_environ=more)

    def submit(self, *words: str, **options: str) -> CommandResult:
        return super().submit("--backend=slurm", *words, **{**SLOW_STEPS, **options})

    def submit_successfully(self, *words: str, **options: str) -> None:
        done = self.submit(*words, **options)
        assert done.code == 0, done.out + done.err

    def submit_and_follow(self) -> subprocess.Popen[str]:
        """Submits the job and follows it."""
        return self.start(*submit_args("--backend=slurm", "--follow", **SLOW_STEPS))

    # The job's state in Slurm

    @property
    def id(self) -> str:
        (found,) = self.ids()
        return found

    def ids(self) -> list[str]:
        """Ids of all Slurm jobs of this run, also of ended ones."""
        output = self.slurm.output_of("scontrol", "show", "job", "-o")
        lines = [line for line in output.splitlines() if f"{self.run_dir}/" in line]
        return [line.split()[0].removeprefix("JobId=") for line in lines]

    def slurm_job(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.slurm.output_of("scontrol", "show", "job", "-o", self.id).split()
        pairs = (word.partition("=") for word in words if "=" in word)
        return {key: value for key, _, value in pairs}

    # The job's progress

    def wait_until(self, what: str, condition: Callable[[], Any], limit: float = 300.0) -> Any:
        """Waits for a condition; fails at once if the job ends meanwhile."""

        def holds() -> Any:
            with contextlib.suppress(OSError, TestbedError):
                if found := condition():
                    return found
            assert not self.has_ended(), f"ended before {what}: {self.actions_of_kind('EndJob')}"
            return None

        return wait_for(holds, what, limit)

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        def there() -> bool:
            started = len(self.actions_of_kind("StartAttempt"))
            return started >= attempt and self.last_step() >= step

        self.wait_until(f"step {step} of attempt {attempt}", there)

    def wait_for_end(self, limit: float = 300.0) -> None:
        wait_for(self.has_ended, "the end of the job", limit)
        self.wait_until_gone()

    def wait_until_gone(self) -> None:
        """Waits until no node has a process of the job and Slurm's queue has no job of it."""
        wait_for(lambda: not self.ids_in_queue(), f"Slurm jobs {self.ids()} to end", 240.0)
        assert_nothing_left(self.run_dir, NOTHING_LEFT_S)

    def ids_in_queue(self) -> list[str]:
        mine = set(self.ids())
        return [
            job for job in self.slurm.output_of("squeue", "-h", "-o", "%A").split() if job in mine
        ]

    def last_step(self) -> int:
        return max(self.losses(), default=0) if self.num_steps() else 0

    def actions(self) -> list[dict[str, Any]]:
        lines = (self.run_dir / "journal.jsonl").read_text().split("\n")[:-1]
        return [action for line in lines for action in json.loads(line)["actions"]]

    def actions_of_kind(self, kind: str) -> list[dict[str, Any]]:
        if not (self.run_dir / "journal.jsonl").exists():
            return []
        return [action for action in self.actions() if action["kind"] == kind]

    def events_text(self) -> str:
        """Output of `ndctl events`."""
        done = self("events", NAME)
        assert done.code == 0, done.err
        return done.out

    def assert_succeeded_without_incident(self) -> None:
        """The job succeeded, and nothing that the scheduler did counts as a fault."""
        status = self.status()
        assert status["state"] == "SUCCEEDED", status
        assert (status["restarts"], status["incidents"]) == (0, [])

    def assert_resumed_without_lost_step(self, attempt: int) -> None:
        """This attempt lost no step: it resumed from the last checkpoint of the one before."""
        resumed = next(one for one in self.events("TrainingResumed") if one["attempt"] == attempt)
        step = resumed["step"]
        assert step > 0, resumed
        ends = [one["step"] for one in self.events("CheckpointSaved") if one["attempt"] < attempt]
        assert step == max(ends)


@functools.cache
def uninterrupted(**options: str) -> dict[int, float]:
    """Losses of the same mesh and spec without ndctl."""
    with tempfile.TemporaryDirectory(prefix="ndctl-uninterrupted-") as folder:
        return train_alone(Path(folder), **{**SLOW_STEPS, **options})


def fill_disk(folder: Path) -> Path:
    """Fills the file system with a file; deleting the file makes room again."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    return filler


@contextlib.contextmanager
def job_on(slurm: SlurmTestbed, run_root: Path) -> Iterator[Job]:
    """A job whose processes are ended afterwards in any case."""
    job = Job(run_root, slurm)
    try:
        yield job
    finally:
        if job.run_dir.exists() and processes_of(job.run_dir):
            slurm.restore()
            assert_nothing_left(job.run_dir, NOTHING_LEFT_S)
