"""The same training on a Slurm testbed, under ndctl and as a plain batch job."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs.local import BIN, SPEC, metrics_of, sets
from tests.slurm.testbed import SlurmTestbed

OPTIONS = (
    *sets(
        cluster__hosts=2,
        cluster__gpus_per_host=2,
        data__sequence_length=128,
        train__steps=100_000,
        checkpoint__every_steps=10,
    ),
    "--backend=slurm",
)
SMALL = tuple(sets(cluster__gpus_per_host=1, parallel__tp=1))
"""One rank a host, for a machine of few cores."""
LOSS = {"TB_KILL_WAIT": "30"}
"""Slurm's default. A requeued job waits 6 s here (`cred_expire`), by Slurm's default 121 s: with
that, both figures would be 115 s longer, and their ratio nearer to 1."""
POLL_S = 0.02
LIMIT_S = 400.0
REQUEUED = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node={gpus} --exclusive --requeue
#SBATCH --job-name=plain --output={out}/slurm.log --open-mode=append
export OMP_NUM_THREADS=1
export MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c 'exec {torchrun} --nnodes=2 --nproc-per-node={gpus} \\
  --node-rank=$SLURM_NODEID --master-addr=$MASTER --master-port=29511 \\
  -m trainer {out}/config.json' || {{ sleep {patience_s}; scontrol requeue "$SLURM_JOB_ID"; }}
"""
NODE_FAIL_S = 60
"""For Slurm to see by itself that a node was lost, and to queue the job again: to ask for it before
that costs Slurm 22.05 the count of the job's GPUs, so that no step can begin in its next run."""


@dataclass(frozen=True)
class Job:
    folder: Path
    """With metrics.jsonl and checkpoints."""
    id: str
    begun: float
    """When the submitting command was typed, by time.perf_counter."""

    @property
    def steps(self) -> int:
        return len(metrics_of(self.folder))

    def await_step(self, more: int = 1, since: int = 0) -> float:
        """When as many `more` steps as that were done; `since` lines of metrics.jsonl."""
        return wait_for(lambda: self.steps >= since + more)

    def await_checkpoint(self) -> None:
        """A new one, which there is every ten steps."""
        done = self.steps
        wait_for(lambda: self.steps >= done + 12)

    def journal(self) -> list[dict[str, Any]]:
        """As far as it is on disk."""
        lines = (self.folder / "journal.jsonl").read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line["event"] for line in self.journal() if line["event"]["kind"] == kind]

    def placement(self) -> list[str]:
        """The hosts of the newest attempt."""
        actions = [action for line in self.journal() for action in line["actions"]]
        hosts: list[str] = [a for a in actions if a["kind"] == "StartAttempt"][-1]["hosts"]
        return hosts

    def await_event(self, kind: str, known: int) -> float:
        return wait_for(lambda: len(self.events(kind)) > known)


@contextmanager
def under_ndctl(testbed: SlurmTestbed, root: Path, *options: str) -> Iterator[Job]:
    def ndctl(*words: str) -> str:
        command = (sys.executable, "-m", "orchestrator", *words, f"--run-root={root}")
        return run(testbed, command)

    begun = time.perf_counter()
    ndctl("submit", str(SPEC), *OPTIONS, *options)
    folder = root / "quickstart"
    try:
        record = json.loads((folder / "slurm" / "launch-1.json").read_text())
        yield Job(folder, record["job_id"], begun)
    finally:
        ndctl("cancel", "quickstart")


@contextmanager
def requeued_by_slurm(
    testbed: SlurmTestbed, root: Path, *options: str, gpus: int = 2, patience_s: int = 0
) -> Iterator[Job]:
    """A batch job that asks for a requeue when its torchrun fails."""
    out = root / "plain"
    out.mkdir(parents=True)
    shown = run(
        testbed,
        (
            sys.executable,
            "-m",
            "orchestrator",
            "submit",
            str(SPEC),
            "--dry-run",
            *OPTIONS,
            *options,
        ),
    )
    config, _ = json.JSONDecoder().raw_decode(shown, shown.index("{"))
    (out / "config.json").write_text(json.dumps({**config, "out": str(out)}))
    script = out / "job.sh"
    text = REQUEUED.format(out=out, gpus=gpus, torchrun=BIN / "torchrun", patience_s=patience_s)
    script.write_text(text)
    begun = time.perf_counter()
    job = run(testbed, ("sbatch", "--parsable", str(script))).strip()
    try:
        yield Job(out, job, begun)
    finally:
        run(testbed, ("scancel", job))
        wait_for(lambda: not run(testbed, ("squeue", "-h", "-j", job)))


def run(testbed: SlurmTestbed, argv: Sequence[str]) -> str:
    done = subprocess.run(
        argv, env=testbed.environ, capture_output=True, text=True, timeout=200, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr or done.stdout}")
    return done.stdout


def state_of(testbed: SlurmTestbed, job: Job) -> str:
    return run(testbed, ("squeue", "-h", "-j", job.id, "-o", "%T")).strip()


def nodes_of(testbed: SlurmTestbed, job: Job) -> list[str]:
    """The first is that of the batch script, and of ndctl's leader."""
    given = run(testbed, ("squeue", "-h", "-j", job.id, "-o", "%N")).strip()
    return run(testbed, ("scontrol", "show", "hostnames", given)).split()


def wait_for(condition: Callable[[], object]) -> float:
    """When it held first, by time.perf_counter."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing happened")
        time.sleep(POLL_S)
    return time.perf_counter()
