"""The job of `tests/e2e` on real Slurm daemons, through the command line."""

import grp
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.posix.locks import is_free
from tests.e2e.job import TP, CommandResult, Ndctl, processes_of, submit_args, wait_for
from tests.slurm.testbed import SlurmTestbed

ACTIVE_STATES = ("RUNNING", "COMPLETING")
LIMIT_S = 240.0
"""Time limit for steps that take seconds on an idle machine."""
LOG_CHARS = 6000
"""Number of characters of each agent's log in a failure report."""
DAEMONS = re.compile(r"munged|slurmctld|slurmdbd|mariadbd|slurmd|slurmd-node\d+")
RENDERED, SCRIPT, RECORD = "rendered", "slurm-script", "slurm-job.json"
STEPS = range(1, 25)
"""Steps that the job trains."""
SITE = {
    "cluster__slurm__env": '{"OMP_NUM_THREADS": "1", "SITE_SAYS": "it is $HOME"}',
    "cluster__slurm__partition": '["train"]',
    "cluster__slurm__group": next(
        (one.gr_name for one in grp.getgrall() if one.gr_gid not in (os.getegid(), 0)), "none"
    ),
    "cluster__slurm__mode": "0750",
    "cluster__slurm__hooks__before": 'echo "$SITE_SAYS"',
}
"""Keys of a site, which the uninterrupted job has."""
ENVIRON = "rank-environ.json"


@dataclass(frozen=True)
class SlurmNdctl(Ndctl):
    """`ndctl` on the login node of a testbed."""

    testbed: SlurmTestbed

    @property
    def environ(self) -> dict[str, str]:
        return {**super().environ, **self.testbed.environ, "NDCTL_RUN_ROOT": str(self.run_root)}

    def submit(self, *words: str, **options: str) -> CommandResult:
        return super().submit("--backend", "slurm", *words, **{**TP, **options})

    # The job's state in Slurm

    @property
    def job_id(self) -> str:
        """Id of the Slurm job that `ndctl status` shows."""
        job_id: str = self.status()["scheduler"].removeprefix("Slurm job ").split()[0]
        return job_id

    def slurm_job(self) -> dict[str, str]:
        """Fields of `scontrol show job`, for example {"JobState": "RUNNING", "Restarts": "0"}."""
        words = self.testbed.output_of("scontrol", "show", "job", "-o", self.job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def save_slurm_records(self) -> None:
        """Saves Slurm's record of the job, which Slurm deletes minutes after its end, and the
        output of `render`, which depends on the state of the hosts."""
        rendered = self("render", *submit_args("--backend", "slurm", **TP, **SITE)[1:]).out
        (self.run_root / RENDERED).write_text(rendered)
        script = self.testbed.output_of("scontrol", "write", "batch_script", self.job_id, "-")
        (self.run_root / SCRIPT).write_text(script)
        (self.run_root / RECORD).write_text(json.dumps(self.slurm_job()))

    def read_slurm_records(self) -> tuple[str, str, dict[str, str]]:
        """The output of `render`, Slurm's copy of the batch script, and the fields of the job."""
        record: dict[str, str] = json.loads((self.run_root / RECORD).read_text())
        texts = [(self.run_root / name).read_text() for name in (RENDERED, SCRIPT)]
        return texts[0], texts[1], record

    def save_rank_environ(self) -> None:
        """Saves the environment variables of each rank, as `NAME=value`, while the job trains."""
        environs = [Path(f"/proc/{pid}/environ").read_bytes() for pid in self.ranks().values()]
        texts = [environ.decode(errors="replace").split("\0") for environ in environs]
        (self.run_root / ENVIRON).write_text(json.dumps(texts))

    def read_rank_environ(self) -> list[list[str]]:
        found: list[list[str]] = json.loads((self.run_root / ENVIRON).read_text())
        return found

    # The job's state in its run directory

    def state(self) -> str:
        state: str = self.status()["state"]
        return state

    def reached(self, step: int, attempt: int = 1) -> bool:
        """Whether `step` or a later step was trained in `attempt` or a later attempt."""
        lines = self.metrics()
        return any(line["step"] >= step and line["attempt"] >= attempt for line in lines)

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        wait_for(lambda: self.reached(step, attempt), f"step {step} in attempt {attempt}", LIMIT_S)

    def wait_for_end(self, state: str = "SUCCEEDED", limit: float = LIMIT_S) -> None:
        try:
            wait_for(self.has_ended, "the end", limit)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.failure_report()}") from exc
        assert self.state() == state, self.failure_report()
        wait_for(
            lambda: self.slurm_job()["JobState"] not in ACTIVE_STATES,
            "the Slurm job to end",
            LIMIT_S,
        )

    def failure_report(self) -> str:
        """Status, queue, nodes and logs that explain why a test failed."""
        queue = self.testbed(["squeue", "-a", "-t", "all", "-o", "%A_%T_%r_%N"]).out
        nodes = self.testbed(["sinfo", "-N", "-o", "%N_%T_%E"]).out
        return f"{self('describe', 'e2e').out}\n{queue}\n{nodes}\n{self.agent_logs()}"

    def agent_logs(self) -> str:
        """The end of each agent's log."""
        logs = sorted((self.run_dir / "logs").glob("agent-*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-LOG_CHARS:]}" for log in logs)

    def allocated(self) -> list[str]:
        """Hosts of the current allocation, including spares."""
        hosts: list[str] = self.events("LeaderStarted")[-1]["allocation"]["hosts"]
        return hosts

    def leaders(self) -> list[str]:
        """The host of each leader so far."""
        return [event["host"] for event in self.events("LeaderStarted")]

    def losses_of(self, attempt: int) -> dict[int, float]:
        return {m["step"]: m["loss"] for m in self.metrics() if m["attempt"] == attempt}

    # The job's processes

    def ranks_on(self, hosts: Iterable[str]) -> list[str]:
        """Those of `hosts` on which a rank or another process of an attempt runs."""
        return [host for host in hosts if not is_free(RunDir(self.run_dir).ranks_lock(host))]

    def assert_nothing_left(self) -> None:
        """Waits until no node has a process of the job or a step of Slurm."""

        def left() -> dict[int, str] | list[str]:
            return processes_of(self.run_dir) or self._steps()

        wait_for(lambda: not left(), f"the end of {left()}", LIMIT_S)

    def _steps(self) -> list[str]:
        """Processes of job steps: Slurm's step daemons and their children."""
        lines = [line for line in self.testbed.leftovers() if line.startswith("process ")]
        return [line for line in lines if not DAEMONS.fullmatch(line.split()[-1].strip("()"))]


def incidents(ndctl: Ndctl) -> list[tuple[str, str | None, int | None]]:
    """Kind, culprit host and culprit rank of each incident, in order."""
    return [
        (one["kind"], one["culprit"]["host"], one["culprit"]["rank"])
        for one in ndctl.status()["incidents"]
    ]


def hosts_of(ndctl: Ndctl) -> list[str]:
    """Hosts of the current attempt in rank order."""
    hosts: list[str] = _starts(ndctl)[-1]["hosts"]
    return hosts


def _starts(ndctl: Ndctl) -> list[dict[str, Any]]:
    return [action for action in ndctl.actions() if action["kind"] == "StartAttempt"]
