"""The start of the batch script: may this Slurm job run under this name? With a fake Slurm."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.backends.entry import slurm_before_srun
from orchestrator.backends.slurm import render
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.backends.slurm.on_nodes import embedded
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import CancelRequested, LeaderStarted
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.journal.current_launch import current_launch
from orchestrator.journal.journal import Journal
from orchestrator.journal.run_dir_init import begin
from orchestrator.journal.snapshot import replay
from orchestrator.journal.supervisor import Supervisor
from orchestrator.posix.locks import try_lock
from orchestrator.seams import Completed
from tests.agent.world import TurnedClock
from tests.backends.handover import handover_of
from tests.backends.slurm.slurm_launch import DOWN, FakeJob, FakeSlurm, a_launch


@dataclass
class Node:
    """The first node of Slurm jobs that run one script."""

    root: Path
    slurm: FakeSlurm = field(default_factory=FakeSlurm)
    spec: SlurmSpec = field(default_factory=SlurmSpec)

    @property
    def handover(self) -> Handover:
        return handover_of(a_launch(self.root / "job", slurm=self.spec))

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.root / "job")

    @property
    def script(self) -> Path:
        """Copy of the script that slurmd keeps."""
        path = self.root / "slurm_script"
        path.write_text(render.script(self.handover, "python", self.root))
        return path

    def sbatch(self) -> FakeJob:
        """A submission by hand, which writes nothing to the run directory."""
        return self.slurm.queue(str(self.script))

    def begin(self, job: FakeJob, name: str = "job", text: str = "", **environ: str) -> int:
        argv = [f"--run-dir={self.root / name}", f"--script={self.script}"]
        slurm_environ = {"SLURM_JOB_ID": job.id, "SLURM_JOB_NUM_NODES": "2", **environ}
        carried = text or embedded.to_text(self.handover)
        return slurm_before_srun.main(argv, carried, slurm_environ, TurnedClock(), self.slurm)

    def recorded(self, name: str = "job") -> str:
        record = self.root / name / "slurm" / "launch-1.json"
        job_id: str = json.loads(record.read_text())["job_id"]
        return job_id


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def cancel_job(run_dir: RunDir) -> None:
    with Journal(run_dir.journal, TurnedClock()) as journal:
        supervisor = Supervisor(journal)
        supervisor.feed(LeaderStarted(at=1.0, host="node1", pid=1))
        supervisor.feed(CancelRequested(at=2.0, by="me"))


def test_a_script_submitted_by_hand_creates_what_submit_creates(node: Node) -> None:
    assert node.begin(node.sbatch()) == exit_codes.OK
    run = replay(node.run_dir)
    assert run.job is not None
    assert (run.job.at, run.job.launch) == (TurnedClock().now(), node.handover.launch)
    assert node.run_dir.token.stat().st_mode & 0o777 == 0o600
    assert node.run_dir.path.stat().st_mode & 0o777 == 0o700
    assert node.run_dir.spec.read_text() == "name: job\n"
    assert node.recorded() == "1"
    kept = render.script_path(node.handover.launch)
    assert kept.read_text() == node.script.read_text()
    backend = SlurmBackend({}, TurnedClock(), node.slurm)
    assert backend.standing(node.handover.launch) == "Slurm job 1 is RUNNING"


def test_the_secret_is_in_no_script(node: Node) -> None:
    node.begin(node.sbatch())
    secret = node.run_dir.token.read_text()
    assert secret.splitlines()[0] not in node.script.read_text()
    assert secret.splitlines()[0] not in str(embedded.from_text(embedded.to_text(node.handover)))


def test_a_requeued_job_keeps_its_journal_and_token(node: Node) -> None:
    job = node.sbatch()
    node.begin(job)
    before = node.run_dir.journal.read_bytes(), node.run_dir.token.read_text()
    assert node.begin(job, SLURM_RESTART_COUNT="1") == exit_codes.OK
    assert (node.run_dir.journal.read_bytes(), node.run_dir.token.read_text()) == before


def test_a_job_of_submit_starts_without_asking_slurm(node: Node) -> None:
    SlurmBackend({}, TurnedClock(), node.slurm).submit(node.handover)
    begin(node.run_dir, node.handover, TurnedClock(), token=True)
    (job,) = node.slurm.jobs.values()
    node.slurm.calls.clear()
    assert node.begin(job) == exit_codes.OK
    assert node.recorded() == "1"
    assert not node.slurm.calls, "Slurm must not be asked, because slurmctld may be down"


def test_a_job_that_starts_before_sbatch_answers_is_recorded(node: Node) -> None:
    """The same holds if the answer of sbatch was lost."""
    SlurmBackend({}, TurnedClock(), node.slurm).submit(node.handover)
    begin(node.run_dir, node.handover, TurnedClock(), token=True)
    (job,) = node.slurm.jobs.values()
    (node.run_dir.slurm / "launch-1.json").unlink()
    assert node.begin(job) == exit_codes.OK
    assert node.recorded() == "1"


def test_a_name_in_use_is_refused_with_the_fix(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.begin(node.sbatch())
    before = node.run_dir.journal.read_bytes()
    assert node.begin(node.sbatch()) == exit_codes.BAD_JOB_STATE
    message = capsys.readouterr().err
    assert f"job job already exists in {node.run_dir.path}: Slurm job 1 is RUNNING" in message
    assert f"`ndctl cancel job --run-root {node.root}`" in message
    assert node.recorded() == "1"
    assert node.run_dir.journal.read_bytes() == before


def test_a_job_that_has_ended_is_not_run_again(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.begin(node.sbatch())
    node.slurm.jobs["1"].state = "COMPLETED"
    cancel_job(node.run_dir)
    assert node.begin(node.sbatch()) == exit_codes.BAD_JOB_STATE
    message = capsys.readouterr().err
    assert "CANCELLED, cancelled by me" in message
    assert f"`ndctl submit {node.run_dir.spec} --resume --run-root {node.root}`" in message


def test_a_job_that_lost_its_node_continues_when_its_script_is_submitted_again(node: Node) -> None:
    node.begin(node.sbatch())
    node.slurm.jobs["1"].state = "NODE_FAIL"
    assert node.begin(node.sbatch()) == exit_codes.OK
    assert node.recorded() == "2"


def test_another_spec_of_the_same_name_does_not_continue_the_job(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.begin(node.sbatch())
    node.slurm.jobs["1"].state = "NODE_FAIL"
    other = replace(node.handover, spec="name: job\ntrain: {steps: 5}\n")
    assert node.begin(node.sbatch(), text=embedded.to_text(other)) == exit_codes.BAD_JOB_STATE
    assert "job job already exists" in capsys.readouterr().err
    assert node.recorded() == "1"


def test_a_script_is_refused_after_a_later_submission(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    later = replace(node.handover.launch, launch=2)
    job = replace(node.handover.job, launch=later)
    begin(node.run_dir, replace(node.handover, job=job), TurnedClock(), token=True)
    assert node.begin(node.sbatch()) == exit_codes.BAD_JOB_STATE
    assert "launch 2 exists already" in capsys.readouterr().err


def test_a_submission_in_progress_is_awaited(node: Node) -> None:
    node.run_dir.path.parent.mkdir(exist_ok=True)
    with node.run_dir.submission_lock.open("w") as file:
        assert try_lock(file.fileno())
        assert node.begin(node.sbatch()) == exit_codes.BAD_JOB_STATE
    assert not node.run_dir.path.exists()
    assert node.begin(node.slurm.jobs["1"]) == exit_codes.OK


def test_an_element_of_an_array_is_a_job_of_its_own(node: Node) -> None:
    base = node.sbatch()
    jobs = [dataclasses.replace(base, id=f"1_{task}") for task in (0, 7)]
    node.slurm.jobs = {job.id: job for job in jobs}
    for job in jobs:
        array, task = job.id.split("_")
        array_environ = {
            "SLURM_ARRAY_JOB_ID": array,
            "SLURM_ARRAY_TASK_ID": task,
            "SLURM_JOB_ID": "91",
        }
        assert node.begin(job, f"job-{task}", **array_environ) == exit_codes.OK
    assert [node.recorded(f"job-{task}") for task in (0, 7)] == ["1_0", "1_7"]
    assert jobs[1].comment == f"ndctl launch 1 of {node.root}/job-7"
    spec = (node.root / "job-7" / "spec.yaml").read_text()
    assert spec == "name: 'job-7'\n"
    counts = current_launch(RunDir(node.root / "job-7"))
    assert counts is not None
    backend = SlurmBackend({}, TurnedClock(), node.slurm)
    assert backend.standing(counts.launch) == "Slurm job 1_7 is RUNNING"
    assert [one.words for one in backend.glance([counts.launch])] == ["Slurm job 1_7 is RUNNING"]
    backend.clear(counts.launch)
    assert [job.state for job in node.slurm.jobs.values()] == ["RUNNING", "CANCELLED"]


def test_the_users_comment_follows_that_of_ndctl(node: Node) -> None:
    job = node.sbatch()
    job.comment = "mine"
    assert node.begin(job) == exit_codes.OK
    assert job.comment == f"ndctl launch 1 of {node.run_dir.path}; mine"


def not_a_batch_job(node: Node, job: FakeJob) -> dict[str, str]:
    job.batch = 0
    return {}


def without_slurm(node: Node, job: FakeJob) -> dict[str, str]:
    return {"SLURM_JOB_ID": ""}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (not_a_batch_job, "Slurm job 1 is not a batch job"),
        (without_slurm, "this batch script must run in a Slurm job"),
        (lambda node, job: {"SLURM_JOB_NUM_NODES": "1"}, "has 1 nodes, but the plan needs 2"),
    ],
)
def test_an_allocation_that_does_not_fit_the_job_changes_nothing(
    node: Node,
    change: Callable[[Node, FakeJob], dict[str, str]],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = node.sbatch()
    assert node.begin(job, **change(node, job)) == exit_codes.BAD_JOB_STATE
    assert message in capsys.readouterr().err
    assert not node.run_dir.path.exists()


@pytest.mark.parametrize("name", ["-x", "a..b", "x" * 70])
def test_an_invalid_job_name_is_refused(
    node: Node, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node.begin(node.sbatch(), name) == exit_codes.BAD_JOB_STATE
    assert "1 to 63 letters" in capsys.readouterr().err


def test_a_run_root_with_a_percent_sign_is_refused(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node.begin(node.sbatch(), "50%/job") == exit_codes.BAD_JOB_STATE
    assert "replaces % in file names" in capsys.readouterr().err


def test_the_script_waits_for_slurmctld_to_mark_the_job(node: Node) -> None:
    job = node.sbatch()
    node.slurm.intercept = lambda argv, before: DOWN if before < 5 else None
    assert node.begin(job) == exit_codes.OK


def test_a_refusal_of_slurm_ends_the_script(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    job = node.sbatch()
    job.comment = "mine"
    refused = Completed(1, "", "slurm_update error: Access/permission denied")
    node.slurm.intercept = lambda argv, before: refused if "update" in argv else None
    assert node.begin(job) == exit_codes.BACKEND
    assert "permission denied" in capsys.readouterr().err
    assert not node.run_dir.path.exists()


def test_the_code_is_copied_if_the_spec_asks_for_a_snapshot(tmp_path: Path) -> None:
    node = Node(tmp_path, spec=SlurmSpec(snapshot=True))
    assert node.begin(node.sbatch()) == exit_codes.OK
    assert (node.run_dir.path / "snapshot" / "orchestrator" / "run_module.py").exists()


def with_program(node: Node, home: Path) -> str:
    """The text in a rendered script of the user's own program in `home`."""
    run = RunSpec(script="train.py", workdir=str(home))
    launch = replace(node.handover.launch, capture=str(home))
    return embedded.to_text(handover_of(launch, run=run))


def test_the_users_program_is_copied_when_the_script_starts_and_kept_at_a_requeue(
    node: Node, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "train.py").write_text("one")
    job, text = node.sbatch(), with_program(node, home)
    assert node.begin(job, text=text) == exit_codes.OK
    (home / "train.py").write_text("two")
    assert node.begin(job, text=text, SLURM_RESTART_COUNT="1") == exit_codes.OK
    assert (node.run_dir.path / "capture-1" / "train.py").read_text() == "one"


def test_a_program_that_cannot_be_copied_ends_the_script_before_it_writes_anything(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "train.py").touch()
    (home / ".gitignore").write_text("train.py\n")
    assert node.begin(node.sbatch(), text=with_program(node, home)) == exit_codes.BACKEND
    assert f"the copy of {home} would be without train.py" in capsys.readouterr().err
    assert not node.run_dir.path.exists()
