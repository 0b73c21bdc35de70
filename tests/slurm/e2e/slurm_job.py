"""The job of `tests/e2e` on real Slurm daemons, through the command line."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.posix.locks import is_free
from tests.e2e.job import CommandResult, Ndctl, processes_of, wait_for
from tests.slurm.testbed import SlurmTestbed

ACTIVE_STATES = ("RUNNING", "COMPLETING")
LIMIT_S = 240.0
"""For what takes seconds on a quiet machine."""
LOG_CHARS = 6000
"""Of the end of each agent's log, in the story of a failure."""
DAEMONS = re.compile(r"munged|slurmctld|slurmdbd|mariadbd|slurmd|slurmd-node\d+")
RENDERED, SCRIPT, RECORD = "rendered", "slurm-script", "slurm-job.json"
STEPS = range(1, 25)
"""That the job trains."""


@dataclass(frozen=True)
class SlurmNdctl(Ndctl):
    """`ndctl` on the login node of a testbed."""

    testbed: SlurmTestbed

    @property
    def environ(self) -> dict[str, str]:
        return {**super().environ, **self.testbed.environ, "NDCTL_RUN_ROOT": str(self.run_root)}

    def submit(self, *words: str, **options: str) -> CommandResult:
        return super().submit("--backend", "slurm", *words, **options)

    # What Slurm says of it

    @property
    def job_id(self) -> str:
        """As `ndctl status` shows it."""
        job_id: str = self.status()["scheduler"].removeprefix("Slurm job ").split()[0]
        return job_id

    def slurm_job(self) -> dict[str, str]:
        """`scontrol show job`, as in {"JobState": "RUNNING", "Restarts": "0", ...}."""
        words = self.testbed.output_of("scontrol", "show", "job", "-o", self.job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def save_slurm_records(self) -> None:
        """Write down what Slurm forgets of a job some minutes after its end, and what `render`
        prints with the hosts as they are now."""
        rendered = self("render", "tests/e2e/job.yaml", "--backend", "slurm").out
        (self.run_root / RENDERED).write_text(rendered)
        script = self.testbed.output_of("scontrol", "write", "batch_script", self.job_id, "-")
        (self.run_root / SCRIPT).write_text(script)
        (self.run_root / RECORD).write_text(json.dumps(self.slurm_job()))

    def read_slurm_records(self) -> tuple[str, str, dict[str, str]]:
        """What `render` printed, the batch script as Slurm had it, and what `slurm_job` said."""
        record: dict[str, str] = json.loads((self.run_root / RECORD).read_text())
        texts = [(self.run_root / name).read_text() for name in (RENDERED, SCRIPT)]
        return texts[0], texts[1], record

    # What the job says of itself

    def state(self) -> str:
        state: str = self.status()["state"]
        return state

    def reached(self, step: int, attempt: int = 1) -> bool:
        """Whether `attempt`, or a later one, has trained `step` or a later one."""
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
        wait_for(lambda: self.slurm_job()["JobState"] not in ACTIVE_STATES, "Slurm's word", LIMIT_S)

    def failure_report(self) -> str:
        """What a person needs to find out why a test failed."""
        queue = self.testbed(["squeue", "-a", "-t", "all", "-o", "%A_%T_%r_%N"]).out
        nodes = self.testbed(["sinfo", "-N", "-o", "%N_%T_%E"]).out
        return f"{self('describe', 'e2e').out}\n{queue}\n{nodes}\n{self.agent_logs()}"

    def agent_logs(self) -> str:
        """The end of each."""
        logs = sorted((self.run_dir / "logs").glob("agent-*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-LOG_CHARS:]}" for log in logs)

    def allocated(self) -> list[str]:
        """The hosts of the present allocation, spares among them."""
        hosts: list[str] = self.events("LeaderStarted")[-1]["allocation"]["hosts"]
        return hosts

    def leaders(self) -> list[str]:
        """The host of each leader so far."""
        return [event["host"] for event in self.events("LeaderStarted")]

    def losses_of(self, attempt: int) -> dict[int, float]:
        return {m["step"]: m["loss"] for m in self.metrics() if m["attempt"] == attempt}

    # What runs

    def ranks_on(self, hosts: Iterable[str]) -> list[str]:
        """Those of `hosts` on which a rank runs, or anything else that an attempt started."""
        return [host for host in hosts if not is_free(RunDir(self.run_dir).ranks_lock(host))]

    def assert_nothing_left(self) -> None:
        """No process of the job on any node, and no step of any: Slurm is done with it."""

        def left() -> dict[int, str] | list[str]:
            return processes_of(self.run_dir) or self._steps()

        wait_for(lambda: not left(), f"the end of {left()}", LIMIT_S)

    def _steps(self) -> list[str]:
        """Slurm's processes that serve a job, and what these started."""
        lines = [line for line in self.testbed.leftovers() if line.startswith("process ")]
        return [line for line in lines if not DAEMONS.fullmatch(line.split()[-1].strip("()"))]


def incidents(ndctl: Ndctl) -> list[tuple[str, str | None, int | None]]:
    """Kind, host and rank to blame, in order."""
    return [
        (one["kind"], one["culprit"]["host"], one["culprit"]["rank"])
        for one in ndctl.status()["incidents"]
    ]


def hosts_of(ndctl: Ndctl) -> list[str]:
    """The hosts of the present attempt, in the order of their ranks."""
    hosts: list[str] = _starts(ndctl)[-1]["hosts"]
    return hosts


def _starts(ndctl: Ndctl) -> list[dict[str, Any]]:
    return [action for action in ndctl.actions() if action["kind"] == "StartAttempt"]
