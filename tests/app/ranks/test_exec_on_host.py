"""`ndctl exec`: which host, with which variables, and whose exit code."""

from pathlib import Path

import pytest

from orchestrator.app.ranks.exec_on_host import exec_on_host, srun_command
from orchestrator.app.remote import Found
from orchestrator.app.submission import submit_job
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import CancelRequested
from orchestrator.errors import JobError
from tests.agent.world import TurnedClock
from tests.jobs_on_disk import JOB, NoCluster, cluster, lead, on_slurm, submission

__all__ = ["cluster"]
ENVIRON = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def found(tmp_path: Path, cluster: NoCluster) -> Found:
    submit_job.submit(submission(tmp_path), {}, TurnedClock())
    lead(tmp_path)
    return Found(RunDir(tmp_path / JOB))


def test_the_command_knows_its_job_and_its_exit_code_is_passed_on(
    found: Found, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["sh", "-c", "echo $NDCTL_HOST $NDCTL_RUN_DIR; echo wrong >&2; exit 7"]
    assert exec_on_host(found, "host-1", words, ENVIRON, TurnedClock()) == 7
    told = capfd.readouterr()
    assert told.out == f"host-1 {found.run_dir.path}\n"
    assert told.err == "wrong\n"


def test_a_signal_and_a_missing_program_are_exit_codes_as_in_a_shell(
    found: Found, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        exec_on_host(found, "host-0", ["sh", "-c", "kill -TERM $$"], ENVIRON, TurnedClock())
        == 128 + 15
    )
    assert exec_on_host(found, "host-0", ["no-such-program"], ENVIRON, TurnedClock()) == 127
    assert "no-such-program: No such file" in capfd.readouterr().err


def test_one_of_several_hosts_must_be_chosen(found: Found) -> None:
    with pytest.raises(JobError, match="has 2 hosts") as refused:
        exec_on_host(found, None, ["true"], ENVIRON, TurnedClock())
    assert refused.value.fix == "choose one with --host: host-0, host-1"
    with pytest.raises(JobError, match="does not use host hots-1") as refused:
        exec_on_host(found, "hots-1", ["true"], ENVIRON, TurnedClock())
    assert refused.value.fix == "did you mean host-1?"


def test_a_job_that_ended_has_no_hosts(found: Found, tmp_path: Path) -> None:
    lead(tmp_path, CancelRequested(at=5.0, by="me"))
    with pytest.raises(JobError, match="is not running: CANCELLED"):
        exec_on_host(found, "host-0", ["true"], ENVIRON, TurnedClock())


def test_a_job_that_waits_for_hosts_runs_no_command(tmp_path: Path, cluster: NoCluster) -> None:
    submit_job.submit(submission(tmp_path), {}, TurnedClock())
    on_slurm(tmp_path)
    cluster.held = "Slurm job 12 is PENDING (Resources)"
    with pytest.raises(JobError) as refused:
        exec_on_host(Found(RunDir(tmp_path / JOB)), "host-0", ["true"], ENVIRON, TurnedClock())
    assert refused.value.message == f"job {JOB} has no hosts yet: PENDING, {cluster.held}"


def test_on_slurm_the_step_shares_what_the_ranks_have() -> None:
    argv = srun_command("12", "node3", ["nvidia-smi", "-L"], terminal=False)
    assert argv[0] == "srun"
    assert {"--jobid=12", "--overlap", "--nodelist=node3", "--ntasks=1"} <= {*argv}
    assert argv[-2:] == ["nvidia-smi", "-L"]
    assert "--pty" in srun_command("12", "node3", ["bash"], terminal=True)
