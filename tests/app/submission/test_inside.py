"""`srun ndctl agent` in a user's batch script: the tasks of a step start a job together."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator import run_module
from orchestrator.app.submission import inside
from orchestrator.app.submission.inside import (
    AgentCommand,
    Task,
    Wanted,
    agent_command,
    devices_in,
    end_step,
)
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.events import CancelRequested, Event, LeaderStarted
from orchestrator.errors import BackendError, JobError, NdctlError, PlanError
from orchestrator.journal.journal import Journal
from orchestrator.journal.snapshot import replay
from orchestrator.journal.supervisor import Supervisor
from orchestrator.seams import Completed
from tests.agent.world import TurnedClock
from tests.backends.slurm.slurm_launch import FakeJob, FakeSlurm
from tests.jobs_on_disk import SPEC


@dataclass
class Step:
    """A step of a batch job on two nodes, whose script a user wrote."""

    root: Path
    slurm: FakeSlurm = field(default_factory=FakeSlurm)
    job: FakeJob = field(
        default_factory=lambda: FakeJob(id="7", command="/home/me/own.sh", comment="(null)")
    )

    resume: bool = False

    def __post_init__(self) -> None:
        self.job.name = "mine"
        self.slurm.jobs[self.job.id] = self.job

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.root / "e2e")

    def environ(self, rank: int = 0, **more: str) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank),
            "SLURM_GPUS_ON_NODE": "2",
            **more,
        }

    def command(self, rank: int = 0, *overrides: str, **more: str) -> AgentCommand:
        root = str(self.root)
        typed = Wanted(spec=SPEC, overrides=overrides, run_root=root, resume=self.resume)
        return agent_command(typed, self.environ(rank, **more), TurnedClock(), self.slurm)

    def task(self, rank: int = 0, *overrides: str, **more: str) -> list[str]:
        return self.command(rank, *overrides, **more).argv

    def lead(self, *events: Event, restarts: int = 0) -> None:
        hosts = ("node1", "node2")
        granted = Allocation(id="7", restarts=restarts, hosts=hosts)
        started = LeaderStarted(at=5.0, host="node1", pid=1, allocation=granted)
        with Journal(self.run_dir.journal, TurnedClock()) as journal:
            supervisor = Supervisor(journal)
            for event in (started, *events):
                supervisor.feed(event)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    found = Step(tmp_path, FakeSlurm(gres="gpu:fake:2"))
    # The planner and the queries of the job's state use this Slurm too.
    monkeypatch.setattr("orchestrator.system.run_command", found.slurm)
    return found


def test_the_first_task_starts_the_job_and_each_task_becomes_an_agent(step: Step) -> None:
    command = step.task(0)
    assert command == [
        *(
            sys.executable,
            "-P",
            "-u",
            run_module.__file__,
            "orchestrator.backends.entry.slurm_task",
        ),
        *(f"--run-dir={step.run_dir.path}", "--launch=1", "--devices=2", "--agent-timeout=5.0"),
        "--first-leads",
    ]
    assert step.task(1) == command
    run = replay(step.run_dir)
    assert run.job is not None
    assert run.plan.hosts == ("node1", "node2")
    assert run.job.backend == "slurm"
    assert step.run_dir.token.stat().st_mode & 0o777 == 0o600
    assert step.job.comment == f"ndctl launch 1 of {step.run_dir.path}"
    assert (step.run_dir.slurm / "launch-1").is_dir()
    assert step.job.name == "mine"


def test_variables_hooks_and_permissions_of_the_spec_apply(step: Step) -> None:
    said = ("env.NCCL_DEBUG=INFO", "mode=750", "hooks.before=ls /scratch", "hooks.timeout=60")
    overrides = tuple(f"cluster.slurm.{one}" for one in said)
    for rank in (0, 1):
        command = step.command(rank, *overrides)
        assert command.environ["NCCL_DEBUG"] == "INFO"
        assert command.umask == 0o027
        assert command.argv[-2:] == ["--before=ls /scratch", "--before-limit=60"]
    assert step.run_dir.path.stat().st_mode & 0o7777 == 0o2750
    assert step.run_dir.journal.stat().st_mode & 0o777 == 0o640
    assert (step.run_dir.slurm / "launch-1").stat().st_mode & 0o777 == 0o750
    assert step.run_dir.token.stat().st_mode & 0o777 == 0o600


def test_without_hosts_in_the_spec_the_allocation_gives_them(step: Step, tmp_path: Path) -> None:
    text = SPEC.read_text().replace(
        "cluster: {backend: local, hosts: 2, gpus_per_host: 2}", "cluster: {}"
    )
    spec = tmp_path / "job.yaml"
    spec.write_text(text)
    wanted = Wanted(spec=spec, overrides=("parallel.tp=1",), run_root=str(tmp_path))
    agent_command(wanted, step.environ(), TurnedClock(), step.slurm)
    plan = replay(step.run_dir).plan
    assert (len(plan.hosts), plan.ranks_per_host) == (2, 2)


def test_nodes_that_the_plan_does_not_need_are_spares(step: Step) -> None:
    step.task(0, "cluster.hosts=1")
    run = replay(step.run_dir)
    assert run.job is not None
    assert (len(run.plan.hosts), len(run.job.launch.hosts)) == (1, 2)


def test_more_hosts_than_the_allocation_has_are_refused(step: Step) -> None:
    with pytest.raises(PlanError, match="is 3, but the allocation has 2 nodes") as refused:
        step.task(0, "cluster.hosts=3")
    assert "--set cluster.hosts=2" in refused.value.fix
    assert not step.run_dir.path.exists()


def test_a_job_that_slurm_requeued_keeps_its_plan(step: Step) -> None:
    step.task(0)
    step.lead()
    before = step.run_dir.journal.read_bytes()
    assert "--launch=1" in step.task(0, "train.steps=99", SLURM_RESTART_COUNT="1")
    assert "--launch=1" in step.task(1, SLURM_RESTART_COUNT="1")
    assert step.run_dir.journal.read_bytes() == before


def test_other_tasks_wait_for_the_first_task_of_their_own_run(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ignore what the first task of an earlier run or another step has written."""
    monkeypatch.setattr(inside, "WAIT_S", 5.0)
    step.task(0)
    others = [("SLURM_RESTART_COUNT", "1"), ("SLURM_STEP_ID", "1"), ("SLURM_JOB_ID", "8")]
    for name, said in others:
        with pytest.raises(BackendError, match="did not start the job"):
            step.task(1, **{name: said})


def test_a_second_srun_of_the_same_job_must_choose_resume_or_new(step: Step) -> None:
    step.task(0)
    step.lead(CancelRequested(at=6.0, by="me"))
    with pytest.raises(JobError, match="and ended CANCELLED"):
        step.task(0, SLURM_STEP_ID="1")
    step.resume = True
    resumed = step.task(0, SLURM_STEP_ID="1")
    assert "--launch=2" in resumed
    assert step.task(1, SLURM_STEP_ID="1") == resumed
    assert step.job.comment == f"ndctl launch 2 of {step.run_dir.path}"


def test_an_interrupted_launch_of_the_same_slurm_job_is_resumed(step: Step) -> None:
    """Slurm still has the job, because it is the current one."""
    step.task(0)
    step.lead()
    with pytest.raises(JobError, match="was interrupted"):
        step.task(0, SLURM_STEP_ID="1")
    step.resume = True
    assert "--launch=2" in step.task(0, SLURM_STEP_ID="1")


def test_a_name_that_another_job_has_is_refused(step: Step) -> None:
    step.task(0)
    step.lead()
    step.slurm.jobs["8"] = FakeJob(id="8", command="/home/me/own.sh", comment="(null)")
    with pytest.raises(JobError, match="is at the scheduler: Slurm job 7 is RUNNING"):
        step.task(0, SLURM_JOB_ID="8")


def test_the_job_of_an_array_element_is_named_with_its_number(step: Step) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    step.slurm.jobs["7_3"] = FakeJob(id="7_3", command="/home/me/own.sh", comment="(null)")
    command = step.task(0, **array)
    assert f"--run-dir={step.root / 'e2e-3'}" in command
    assert step.task(1, **array) == command
    assert step.slurm.jobs["7_3"].comment == f"ndctl launch 1 of {step.root / 'e2e-3'}"
    record = json.loads((step.root / "e2e-3" / "slurm" / "launch-1.json").read_text())
    assert record["job_id"] == "7_3"
    assert f"--run-dir={step.root / 'mine'}" in step.task(0, "name=mine", **array)


def test_an_allocation_without_a_batch_script_is_refused(step: Step) -> None:
    step.job.batch = 0
    with pytest.raises(JobError, match="is not a batch job") as refused:
        step.task(0)
    assert "--here" in refused.value.fix
    assert not step.run_dir.path.exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"SLURM_STEP_ID": ""}, "must be started by srun"),
        ({"SLURM_JOB_ID": ""}, "must be started by srun"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 agents on 2 nodes"),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, "has 2 nodes"),
    ],
)
def test_required_srun_options_are_reported(step: Step, more: dict[str, str], told: str) -> None:
    with pytest.raises(JobError, match=told) as refused:
        step.task(0, **more)
    assert "srun" in refused.value.fix


def test_the_copied_code_runs(step: Step) -> None:
    place = step.task(0, "cluster.slurm.snapshot=true")[3]
    assert place == str(step.run_dir.path / "snapshot" / "orchestrator" / "run_module.py")
    assert Path(place).exists()


def test_an_error_of_the_first_task_ends_the_step(step: Step) -> None:
    step.slurm.intercept = lambda argv, before: Completed(0, "", "")
    for environ in (step.environ(0), step.environ(1), {}):
        end_step(environ, step.slurm)
    assert step.slurm.calls == [["scancel", "7.0"]]


def test_missing_options_in_the_script_are_reported(
    step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    step.job.requeue = 0
    step.task(0, SLURM_CPUS_ON_NODE="4096")
    assert "Slurm job 7 cannot be requeued" in caplog.text
    assert "of its 4096 CPUs; use `srun --cpu-bind=none`" in caplog.text


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "none"}, None),
    ],
)
def test_gpus_are_requested_in_slurms_notation(
    environ: dict[str, str], devices: int | None
) -> None:
    assert devices_in(environ) == devices


def test_every_error_is_an_ndctl_error() -> None:
    with pytest.raises(NdctlError):
        Task.from_mapping({})
