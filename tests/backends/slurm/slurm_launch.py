"""A launch, and a fake Slurm with the answers of a real Slurm 22.05."""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from orchestrator import run_module
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.seams import Completed

INVALID = Completed(1, "", "slurm_load_jobs error: Invalid job id specified\n")
DOWN = Completed(
    1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
)
LATER = Completed(
    1, "", "Job update not available right now, the DB index is being set, try again in a bit\n"
)


def a_launch(
    run_dir: Path | str = "/runs/job", hosts: int = 2, slurm: SlurmSpec | None = None
) -> LaunchPlan:
    return LaunchPlan(
        job="job",
        run_dir=str(run_dir),
        launch=1,
        hosts=tuple(f"node-{i}" for i in range(hosts)),
        devices_per_host=2,
        agent_timeout=10.0,
        slurm=slurm or SlurmSpec(),
    )


def portable(script: str, cwd: Path) -> str:
    """The script without paths of this machine and without the embedded payload, which
    `test_embedded.py` tests."""
    text = script.replace(run_module.__file__, "/ndctl/orchestrator/run_module.py")
    text = text.replace(shlex.quote(sys.executable), "python").replace(str(cwd), "/home/me")
    return re.sub(
        r"(?<=packed \(base64 -d \| gunzip\)\.\n)[A-Za-z0-9+/=\n]+?(?=END_OF_JOB)", "…\n", text
    )


@dataclass
class FakeJob:
    id: str
    command: str
    comment: str
    state: str = "RUNNING"
    reason: str = "None"
    exit_code: str = "0:0"
    restarts: int = 0
    excluded: str = "(null)"
    nodes: str = "node[1-2]"
    name: str = "ndctl-job"
    batch: int = 1
    requeue: int = 1
    ends: float | None = None
    """Unix seconds."""
    suspended: float | None = None
    """Unix seconds."""

    @property
    def line(self) -> str:
        ends = "Unknown" if self.ends is None else _local_time(self.ends)
        suspended = "None" if self.suspended is None else _local_time(self.suspended)
        return (
            f"{_ids(self.id)} JobName={self.name} JobState={self.state} Reason={self.reason}"
            f" Requeue={self.requeue} BatchFlag={self.batch} Restarts={self.restarts}"
            f" ExitCode={self.exit_code} TimeLimit=UNLIMITED"
            f" StartTime=2026-11-22T02:04:01 EndTime={ends} SuspendTime={suspended}"
            f" ExcNodeList={self.excluded}"
            f" NodeList={self.nodes} Command={self.command} Comment={self.comment} \n"
        )


def _ids(job_id: str) -> str:
    """The IDs as scontrol prints them. A task of an array also has a job ID of its own."""
    array, _, task = job_id.partition("_")
    return f"JobId=9{array} ArrayJobId={array} ArrayTaskId={task}" if task else f"JobId={array}"


def _rows(jobs: Sequence["FakeJob"]) -> Completed:
    rows = (
        f"{job.id}|{job.state}|{job.reason}|{job.excluded}|N/A|N/A|{job.command}|{job.comment}\n"
        for job in jobs
    )
    return Completed(0, "".join(rows), "")


def _local_time(at: float) -> str:
    """The time as Slurm prints it, in the time zone of the machine."""
    return datetime.fromtimestamp(at, UTC).astimezone().replace(tzinfo=None).isoformat()


@dataclass
class FakeSlurm:
    """Jobs and nodes in memory. `intercept` may answer first; it gets the command and the number of
    commands before it."""

    jobs: dict[str, FakeJob] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=lambda: {"node1": "IDLE", "node2": "IDLE"})
    intercept: Callable[[list[str], int], Completed | None] = lambda argv, before: None
    calls: list[list[str]] = field(default_factory=list)
    max_timeout: float = 60.0
    """Longest timeout in seconds that a command may have."""
    gres: str = "gpu:2"
    reservations: str = ""
    """Output of `scontrol show reservations`."""
    steps: dict[str, str] = field(default_factory=dict)
    """Step ID -> name."""
    cancels_at_once: bool = True
    """A cancelled job is CANCELLED at once; if not, it stays COMPLETING."""

    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        assert 0 < timeout <= self.max_timeout
        before = len(self.calls)
        self.calls.append(list(argv))
        return self.intercept(list(argv), before) or self.answer(list(argv))

    def answer(self, argv: list[str]) -> Completed:  # noqa: C901 - one line for each command
        match argv:
            case ["sbatch", "--parsable", *_, script]:
                return Completed(0, f"{self.queue(script).id}\n", "")
            case ["squeue", "-h", "-a", name, *more, "-o", _] if name.startswith("--name="):
                over = "--states=all" in more
                names = name.partition("=")[2].split(",")
                named = [job for job in self.jobs.values() if job.name in names]
                waiting = ("PENDING", "RUNNING", "COMPLETING")
                return _rows([job for job in named if over or job.state in waiting])
            case ["squeue", "-h", "-a", "--states=all", "-j", ids, "-o", _]:
                found = [self.jobs[job] for job in ids.split(",") if job in self.jobs]
                return _rows(found) if found or "," in ids else INVALID
            case ["squeue", "-h", "-s", "-j", job, "-o", "%i|%j"]:
                rows = (f"{step}|{name}\n" for step, name in self.steps.items())
                of_job = [row for row in rows if row.startswith(f"{job}.")]
                return Completed(0, "".join(of_job), "") if job in self.jobs else INVALID
            case ["scontrol", "show", "job", "-a", "-o", job]:
                return Completed(0, self.jobs[job].line, "") if job in self.jobs else INVALID
            case ["scontrol", "show", "node", "-a", "-o", names]:
                return Completed(0, self._nodes(*expand(names)), "")
            case ["scontrol", "-o", "show", "reservations"]:
                return Completed(0, self.reservations or "No reservations in the system\n", "")
            case ["scontrol", "show", "partitions", "-a", "-o"]:
                line = "PartitionName=train Default=YES MaxNodes=UNLIMITED MaxTime=60 State=UP"
                return Completed(0, f"{line} TotalNodes=2\n", "")
            case ["scontrol", "show", "nodes", "-a", "--details", "-o"]:
                return Completed(0, self._nodes(), "")
            case ["scontrol", "show", "topology"]:
                tree = "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]\n"
                above = "SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[1-2] Switches=leaf1\n"
                return Completed(0, tree + above, "")
            case _:
                return self.change(argv)

    def change(self, argv: list[str]) -> Completed:
        match argv:
            case ["sbatch", "--test-only", script]:
                return Completed(0, "", f"sbatch: Job 9 to start at noon, {script}\n")
            case ["scontrol", "requeue", job]:
                self.jobs[job].state = "COMPLETING"
                self.jobs[job].restarts += 1
            case ["scontrol", "update", job, comment] if comment.startswith("Comment="):
                self.jobs[job.removeprefix("JobId=")].comment = comment.partition("=")[2]
            case ["scontrol", "update", job, excluded]:
                self.jobs[job.removeprefix("JobId=")].excluded = excluded.partition("=")[2]
            case ["scancel", step] if "." in step:
                self.steps.pop(step, None)
            case ["scancel", "--signal=USR2", _]:
                pass
            case ["scancel", job]:
                self.jobs[job].state = "CANCELLED" if self.cancels_at_once else "COMPLETING"
            case ["srun", _, "--overlap", host, *_]:
                dead = "DOWN" in self.nodes.get(host.removeprefix("--nodelist="), "DOWN")
                return Completed(1 if dead else 0, "", "")
            case ["git", *_]:
                return Completed(128, "", "fatal: not a git repository")
            case _:
                raise AssertionError(f"FakeSlurm has no rule for {argv}")
        return Completed(0, "", "")

    def queue(self, script: str) -> FakeJob:
        text = Path(script).read_text()
        name, comment = (
            re.search(r"--job-name=(.*)", text),
            re.search(r"--comment='?([^'\n]*)", text),
        )
        assert name is not None
        assert comment is not None
        number = str(len(self.jobs) + 1)
        job = FakeJob(id=number, command=script, comment=comment[1], name=name[1])
        self.jobs[job.id] = job
        return job

    def _nodes(self, *names: str) -> str:
        return "".join(
            f"NodeName={name} CPUTot=2 Gres={self.gres} NodeAddr={name} State={self.nodes[name]}"
            f" Partitions=train  Reason=bad fan [root@2026-11-22T02:04:00]\n"
            for name in names or self.nodes
        )

    def count(self, *begin: str) -> int:
        return sum(argv[: len(begin)] == list(begin) for argv in self.calls)
