"""`ndctl submit --here`: what is refused, what is written, and when a new Slurm step starts."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator import host_strikes
from orchestrator.app.commands import commands_of
from orchestrator.app.submission import here as module
from orchestrator.app.submission.here import Here, Starter, run_here, submit_here
from orchestrator.app.submission.inside import Wanted
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.events import CancelRequested, Event, LeaderStarted
from orchestrator.errors import JobError, PlanError
from orchestrator.journal.journal import Journal
from orchestrator.journal.snapshot import replay
from orchestrator.journal.supervisor import Supervisor
from orchestrator.posix.locks import is_held_alone
from tests.agent.world import TurnedClock
from tests.backends.slurm.slurm_launch import FakeJob, FakeSlurm
from tests.jobs_on_disk import SPEC

TWO = ("cluster.gpus_per_host=1", "parallel.tp=1")


@dataclass
class Shell:
    """A shell in an allocation of three nodes."""

    root: Path
    slurm: FakeSlurm = field(default_factory=lambda: FakeSlurm(gres="gpu:fake:2"))
    clock: TurnedClock = field(default_factory=TurnedClock)
    told: list[str] = field(default_factory=list)
    resume: bool = False

    def __post_init__(self) -> None:
        self.slurm.nodes = {f"node{number}": "ALLOCATED" for number in (1, 2, 3)}
        self.job = FakeJob(id="7", command="(null)", comment="(null)", nodes="node[1-3]", batch=0)
        self.job.name = "interactive"
        self.slurm.jobs["7"] = self.job
        bin = self.root / "bin"
        bin.mkdir(parents=True)
        self.srun = bin / "srun"
        self.set_srun(f"echo srun was here >> {self.root}/starts")

    def set_srun(self, script: str) -> None:
        """Replace srun by `script`."""
        self.srun.write_text(f"#!/bin/sh\n{script}\n")
        self.srun.chmod(0o755)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.root / "e2e")

    @property
    def environ(self) -> dict[str, str]:
        path = f"{self.srun.parent}:/usr/bin:/bin"
        return {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "2", "PATH": path}

    def submit(self, *overrides: str, **more: str) -> Here:
        root = str(self.root)
        typed = Wanted(spec=SPEC, overrides=overrides, run_root=root, resume=self.resume)
        environ = {**self.environ, **more}
        return submit_here(typed, (), environ, self.clock, self.slurm)

    def run(self, job: Here) -> int:
        return run_here(job, self.environ, self.clock, self.slurm, self.told.append)

    def starts(self) -> int:
        path = self.root / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def lead(self, *events: Event, restarts: int = 0) -> None:
        granted = Allocation(id="7", restarts=restarts, hosts=("node1", "node2"))
        with Journal(self.run_dir.journal, self.clock) as journal:
            supervisor = Supervisor(journal)
            started = LeaderStarted(at=5.0, host="node1", pid=1, allocation=granted)
            for event in (started, *events):
                supervisor.feed(event)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    found = Shell(tmp_path / "x")
    monkeypatch.setattr("orchestrator.system.run_command", found.slurm)
    return found


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Assert that a test restores the signal handlers."""
    before = {number: signal.getsignal(number) for number in (*module.END, *module.NOTICE)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_plan_is_for_the_nodes_of_the_allocation_and_the_journal_has_it(
    shell: Shell,
) -> None:
    job = shell.submit(*TWO)
    assert job.hosts == ("node1", "node2", "node3")
    run = replay(shell.run_dir)
    assert run.job is not None
    assert run.job.backend == "slurm-here"
    assert (len(run.plan.hosts), len(run.job.launch.hosts)) == (2, 3)
    record = json.loads((shell.run_dir.slurm / "launch-1.json").read_text())
    assert record == {"job_id": "7"}
    assert " --here --resume " in f"{commands_of(shell.run_dir, {}).submit()} "
    assert shell.job.comment == "(null)", "the allocation is not ours"


@pytest.mark.parametrize(
    ("more", "told", "fix"),
    [
        ({"SLURM_JOB_ID": ""}, "--here needs a Slurm allocation", "`salloc --nodes=N --exclusive`"),
        ({"SLURM_PROCID": "1"}, "srun started several", "run it without srun"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun started several", "srun ndctl agent"),
        ({"SLURM_JOB_ID": "9"}, "Slurm job 9 is not running", "unset SLURM_JOB_ID"),
    ],
)
def test_outside_an_allocation_the_command_is_refused_with_a_fix(
    shell: Shell, more: dict[str, str], told: str, fix: str
) -> None:
    with pytest.raises(JobError, match=told) as refused:
        shell.submit(*TWO, **more)
    assert fix in refused.value.fix
    assert not shell.run_dir.path.exists()


def test_an_allocation_with_too_little_time_left_is_refused(shell: Shell) -> None:
    shell.job.ends = shell.clock.now() + 80
    with pytest.raises(JobError, match=r"ends in \d+ s, but the job is told to stop 90 s"):
        shell.submit(*TWO)
    assert not shell.run_dir.path.exists()
    shell.submit(*TWO, "cluster.slurm.notice_s=30")


def test_unusable_nodes_are_not_in_the_plan(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    shell.slurm.nodes["node2"] = "DOWN"
    for attempt in (1, 2):
        strike = host_strikes.Strike(
            at=shell.clock.now(), host="node3", job="x", attempt=attempt, kind="hang", cause="y"
        )
        path = host_strikes.path_of(shell.root, "tb")
        path.parent.mkdir(exist_ok=True)
        host_strikes.record(path, strike)
    more = {"SLURM_CLUSTER_NAME": "tb"}
    with pytest.raises(PlanError, match="is 2, but the allocation has 1 nodes: node1"):
        shell.submit(*TWO, **more)
    assert "node3 is excluded" in caplog.text
    assert shell.submit("cluster.hosts=1", *TWO, **more).hosts == ("node1",)
    shell.slurm.nodes["node1"] = "DOWN"
    with pytest.raises(JobError, match="no node of the allocation \\(Slurm job 7\\) is usable"):
        shell.submit(*TWO, **more)


def test_a_job_that_never_starts_is_tried_three_times(shell: Shell) -> None:
    job = shell.submit(*TWO)
    assert shell.run(job) == exit_codes.FAILED
    assert shell.starts() == 3
    assert "3 steps in a row made no progress" in replay(shell.run_dir).stage.reason
    assert not is_held_alone(shell.run_dir.starter_lock)


def test_a_step_that_scancel_ended_cancels_the_job(shell: Shell) -> None:
    job = shell.submit(*TWO)
    text = "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-23T19:09:01 ***"
    shell.set_srun(f"echo '{text}' > {shell.run_dir.slurm}/launch-1/7.0_0_log.err; exit 137")
    assert shell.run(job) == exit_codes.CANCELLED
    assert replay(shell.run_dir).ending == "CANCELLED"


@pytest.mark.parametrize(
    "said", ["DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***", "DUE TO TIME LIMIT ***"]
)
def test_after_any_other_end_of_a_step_a_new_step_starts(shell: Shell, said: str) -> None:
    job = shell.submit(*TWO)
    text = f"*** STEP 7.0 ON node1 CANCELLED AT 2026-11-23T19:09:01 {said}"
    folder = f"{shell.run_dir.slurm}/launch-1"
    shell.set_srun(f"echo x >> {shell.root}/starts; echo '{text}' > {folder}/7.$$_0_log.err")
    assert shell.run(job) == exit_codes.FAILED
    assert shell.starts() == 3


def test_a_killed_srun_does_not_cancel_the_job(shell: Shell) -> None:
    job = shell.submit(*TWO)
    text = "*** STEP 7.0 ON node1 CANCELLED AT 2026-11-23T19:09:01 ***"
    folder = f"{shell.run_dir.slurm}/launch-1"
    shell.set_srun(
        f"echo x >> {shell.root}/starts; echo '{text}' > {folder}/7.$$_0_log.err; kill -9 $$"
    )
    assert shell.run(job) == exit_codes.FAILED
    assert shell.starts() == 3


def test_after_the_end_of_the_allocation_no_step_starts(shell: Shell) -> None:
    job = shell.submit(*TWO)
    shell.job.state = "TIMEOUT"
    assert shell.run(job) == exit_codes.FAILED
    assert shell.starts() == 1
    reason = replay(shell.run_dir).stage.reason
    assert reason.startswith(
        "the job cannot continue in this allocation: its allocation, Slurm job 7, is over"
    )


def test_the_exit_code_is_that_of_the_ended_job(shell: Shell) -> None:
    job = shell.submit(*TWO)
    shell.lead(CancelRequested(at=6.0, by="me"))
    assert shell.run(job) == exit_codes.CANCELLED
    assert shell.starts() == 1
    with pytest.raises(JobError, match="ended CANCELLED"):
        shell.submit(*TWO)
    shell.resume = True
    assert shell.submit(*TWO).launch.launch == 2


def test_the_next_step_excludes_nodes_that_are_gone(shell: Shell) -> None:
    job = shell.submit(*TWO)
    starter = Starter(job, shell.environ, shell.clock, shell.slurm, shell.told.append)
    shell.slurm.nodes["node2"] = "DOWN"
    assert starter._hosts(replay(shell.run_dir)) == ("node1", "node3")
    assert starter._why_not(replay(shell.run_dir)) == ""


def test_the_ranks_are_warned_before_the_allocation_ends(shell: Shell) -> None:
    job = shell.submit(*TWO)
    shell.slurm.steps = {"7.0": "ndctl-e2e", "7.1": "bash"}
    starter = Starter(job, shell.environ, shell.clock, shell.slurm, shell.told.append)
    shell.job.ends = shell.clock.now() + 3600
    warned = ["scancel", "--signal=USR2", "7.0"]
    for seconds, times in ((20, 0), (3500, 1), (20, 1)):
        shell.clock.sleep(seconds)
        starter._check_end_of_allocation()
        assert shell.slurm.calls.count(warned) == times


def test_slurms_signal_to_the_batch_script_reaches_the_agents(shell: Shell) -> None:
    job = shell.submit(*TWO)
    shell.slurm.steps = {"7.0": "ndctl-e2e"}
    starter = Starter(job, shell.environ, shell.clock, shell.slurm, shell.told.append)
    starter._notice(signal.SIGUSR2, None)
    starter._check_end_of_allocation()
    assert ["scancel", "--signal=USR2", "7.0"] in shell.slurm.calls


def test_a_second_signal_ends_the_command_at_once(shell: Shell) -> None:
    job = shell.submit(*TWO)
    shell.slurm.steps = {"7.0": "ndctl-e2e"}
    starter = Starter(job, shell.environ, shell.clock, shell.slurm, shell.told.append)
    starter._end(signal.SIGINT, None)
    starter._end(signal.SIGINT, None)
    starter._handle_end()
    assert ["scancel", "7.0"] in shell.slurm.calls
    assert shell.told == ["ending the job now"]
