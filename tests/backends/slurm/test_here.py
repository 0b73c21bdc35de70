"""A job that runs as steps in an existing allocation of the user, with a fake Slurm."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.backends.by_name import HERE, backend_named, submitter_named
from orchestrator.backends.slurm import job_lookup, render
from orchestrator.backends.slurm.here import HereBackend
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import HooksSpec, SlurmSpec
from orchestrator.errors import BackendError, Ended
from orchestrator.journal.run_dir_init import begin
from orchestrator.posix.locks import try_lock
from orchestrator.seams import LaunchStatus
from tests.agent.world import TurnedClock
from tests.backends.handover import handover_of
from tests.backends.slurm.slurm_launch import DOWN, FakeJob, FakeSlurm, a_launch

ENVIRON = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_RESTART_COUNT": "2",
}


@dataclass
class AllocatedJob:
    root: Path
    slurm: FakeSlurm = field(default_factory=FakeSlurm)
    clock: TurnedClock = field(default_factory=TurnedClock)

    def __post_init__(self) -> None:
        self.slurm.nodes = {f"node{number}": "ALLOCATED" for number in (1, 2, 3)}
        self.job = FakeJob(id="7", command="(null)", comment="(null)", nodes="node[1-3]")
        self.job.name, self.job.batch = "interactive", 0
        self.slurm.jobs["7"] = self.job
        begin(self.run_dir, handover_of(self.launch), self.clock, token=True)
        (self.run_dir.path / "slurm").mkdir()
        job_lookup.record(self.launch, "7")
        self.slurm.steps = {"7.0": "bash", "7.4": "ndctl-job", "7.batch": "batch"}
        self.slurm.calls.clear()

    @property
    def launch(self) -> LaunchPlan:
        return a_launch(self.root / "job")

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.root / "job")

    @property
    def backend(self) -> HereBackend:
        found = backend_named(HERE, ENVIRON, self.clock, self.slurm)
        assert isinstance(found, HereBackend)
        return found


@pytest.fixture
def allocated(tmp_path: Path) -> AllocatedJob:
    return AllocatedJob(tmp_path)


@pytest.fixture
def starter(allocated: AllocatedJob) -> Iterator[None]:
    """The `ndctl` process that starts the steps is alive."""
    with allocated.run_dir.starter_lock.open("w") as file:
        assert try_lock(file.fileno())
        yield


def test_the_status_of_a_job_is_that_of_its_step(allocated: AllocatedJob) -> None:
    assert (
        allocated.backend.standing(allocated.launch)
        == "step 7.4 of `ndctl submit --here` is running"
    )
    held = LaunchStatus("step 7.4 of `ndctl submit --here` is running", held=True)
    assert allocated.backend.glance([allocated.launch]) == [held]
    allocated.slurm.steps = {}
    assert allocated.backend.standing(allocated.launch) is None
    (seen,) = allocated.backend.glance([allocated.launch])
    assert (seen.held, seen.words) == (False, "`ndctl submit --here` in Slurm job 7 has ended")


def test_between_two_steps_the_status_is_that_of_the_starter(
    allocated: AllocatedJob, starter: None
) -> None:
    allocated.slurm.steps = {}
    assert (
        allocated.backend.standing(allocated.launch)
        == "`ndctl submit --here` is starting it in Slurm job 7"
    )


def test_an_allocation_that_is_over_has_no_step(allocated: AllocatedJob) -> None:
    del allocated.slurm.jobs["7"]
    assert allocated.backend.standing(allocated.launch) is None
    allocated.backend.clear(allocated.launch)


def test_a_slurmctld_that_is_down_counts_as_no_answer(allocated: AllocatedJob) -> None:
    allocated.slurm.intercept = lambda argv, before: DOWN
    with pytest.raises(BackendError, match="does not answer"):
        allocated.backend.standing(allocated.launch)
    assert allocated.backend.glance([allocated.launch])[0].held


def test_only_steps_of_the_job_are_ended(allocated: AllocatedJob) -> None:
    allocated.slurm.steps["7.5"] = "ndctl-job"
    allocated.backend.clear(allocated.launch)
    assert sorted(allocated.slurm.steps) == ["7.0", "7.batch"]
    assert allocated.job.state == "RUNNING"
    assert allocated.slurm.count("scancel", "7") == 0


def test_a_step_that_does_not_end_is_an_error(allocated: AllocatedJob) -> None:
    allocated.slurm.steps = StepsThatStay({"7.4": "ndctl-job"})
    with pytest.raises(BackendError, match=r"step 7\.4 was cancelled 120 s ago") as failed:
        allocated.backend.clear(allocated.launch)
    assert "`squeue -s -j 7`" in failed.value.fix
    assert allocated.slurm.count("scancel", "7.4") == 1


class StepsThatStay(dict[str, str]):
    def pop(self, *_: object) -> str:
        return ""


def test_the_leader_uses_only_the_nodes_of_its_step(allocated: AllocatedJob) -> None:
    granted = allocated.backend.allocation(allocated.launch)
    assert granted is not None
    assert (granted.id, granted.restarts, granted.hosts) == ("7", 2, ("node1", "node2"))
    assert set(granted.switches) == {"node1", "node2"}
    own = allocated.backend.own_run(allocated.launch, ["node1", "node2"])
    assert (own.phase, own.hosts) == ("running", ("node1", "node2"))


def test_a_signal_before_the_end_of_the_allocation_is_a_cancel(allocated: AllocatedJob) -> None:
    assert allocated.backend.why_ending(allocated.launch) == "cancelled"
    allocated.job.ends = allocated.clock.now() + 60
    assert allocated.backend.why_ending(allocated.launch) == "time-limit"
    allocated.job.state = "TIMEOUT"
    assert allocated.backend.why_ending(allocated.launch) == "time-limit"


def test_another_step_is_left_to_the_starter(allocated: AllocatedJob, starter: None) -> None:
    allocated.backend.requeue(allocated.launch, ("node2",))
    assert allocated.slurm.count("scontrol", "requeue") == 0
    assert allocated.slurm.count("scontrol", "update") == 0


def test_without_a_starter_the_job_ends(allocated: AllocatedJob) -> None:
    with pytest.raises(Ended, match="which starts its steps, has exited"):
        allocated.backend.requeue(allocated.launch, ())


@pytest.mark.parametrize(
    ("state", "nodes", "ends_in", "dead", "exclude", "why"),
    [
        ("RUNNING", "node[1-3]", None, (), (), ""),
        ("RUNNING", "node[1-3]", 3600.0, ("node3",), (), ""),
        ("RUNNING", "node[1-3]", 90.0, (), (), "its allocation, Slurm job 7, ends at 20"),
        ("COMPLETING", "", None, (), (), "its allocation, Slurm job 7, is over: COMPLETING"),
        ("RUNNING", "node[1-3]", None, ("node3",), ("node1",), "has only 1 of 2 needed nodes"),
        ("RUNNING", "node1", None, (), (), "has only 1 of 2 needed nodes left"),
    ],
)
def test_reasons_why_no_further_step_can_start(
    allocated: AllocatedJob,
    starter: None,
    state: str,
    nodes: str,
    ends_in: float | None,
    dead: tuple[str, ...],
    exclude: tuple[str, ...],
    why: str,
) -> None:
    allocated.job.state, allocated.job.nodes = state, nodes
    allocated.job.ends = None if ends_in is None else allocated.clock.now() + ends_in
    allocated.slurm.nodes |= dict.fromkeys(dead, "DOWN")
    assert why in allocated.backend.why_not(allocated.launch, exclude)
    assert bool(allocated.backend.why_not(allocated.launch, exclude)) == bool(why)
    if why:
        backend = allocated.backend
        with pytest.raises(Ended, match="its allocation, Slurm job 7,"):
            backend.requeue(allocated.launch, exclude)
        if state == "RUNNING":
            assert backend.why_ending(allocated.launch) != "cancelled", (
                "no user has cancelled the job"
            )


def test_agents_of_another_allocation_leave(allocated: AllocatedJob) -> None:
    assert allocated.backend.rival(allocated.launch) is None
    other = HereBackend({**ENVIRON, "SLURM_JOB_ID": "8"}, allocated.clock, allocated.slurm)
    assert other.rival(allocated.launch) == "it runs in Slurm job 7"


def test_a_job_in_an_allocation_is_not_started_by_the_scheduler(allocated: AllocatedJob) -> None:
    with pytest.raises(BackendError):
        submitter_named(HERE, ENVIRON, allocated.clock, allocated.slurm)


def test_the_step_overlaps_other_steps_and_has_the_jobs_name() -> None:
    launch = replace(a_launch("/runs/job"), hosts=("node1", "node2", "node4"))
    argv = render.step_here(launch, launch.hosts, "/venv/bin/python")
    assert {"--overlap", "--job-name=ndctl-job", "--nodelist=node[1-2,4]"} <= {*argv}
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--no-kill"} <= {*argv}
    assert argv[-1] == "--first-leads"
    hooked = replace(launch, slurm=SlurmSpec(hooks=HooksSpec(after="rm -rf /scratch/x")))
    argv = render.step_here(hooked, launch.hosts, "/venv/bin/python")
    assert argv[-2:] == ["--after=rm -rf /scratch/x", "--after-limit=30"]
    again = render.replacement(launch, "7", "node2", "/venv/bin/python")
    assert "--job-name=ndctl-job" in again, "steps are ended by the job's name"
