"""How srun ended, which the leader of the next run reads from a note."""

from pathlib import Path

import pytest

from orchestrator.backends.slurm.on_nodes.srun_end import (
    breakdown,
    last_errors,
    note,
    step_end,
    write_down,
)
from orchestrator.contract.files import exit_codes
from tests.backends.slurm.slurm_launch import a_launch


def test_a_killed_srun_is_reported_to_the_next_run_only(tmp_path: Path) -> None:
    launch = a_launch(tmp_path)
    note(tmp_path, launch=1, restarts=2).parent.mkdir(parents=True)
    write_down(note(tmp_path, launch=1, restarts=2), "node3", 137, 5.0)
    found = breakdown(launch, 2)
    assert found is not None
    assert found.what == "SIGKILL ended srun on node3 and with it all agents (code 137)"
    assert found.at == 5.0
    assert breakdown(launch, 1) is None
    assert breakdown(launch, -1) is None, "the first run has no earlier run"


def test_with_one_host_a_killed_srun_and_a_killed_agent_look_alike(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, hosts=1)
    path = note(tmp_path, launch=1, restarts=0)
    path.parent.mkdir(parents=True)
    write_down(path, "node3", 139, 5.0)
    found = breakdown(launch, 0)
    assert found is not None
    words = "SIGSEGV ended srun on node3 or its only agent (code 139)"
    assert found.what == words


@pytest.mark.parametrize(
    "code", [1, exit_codes.LEADER_LOST, exit_codes.REQUEUED, exit_codes.CHECKPOINTED]
)
def test_agents_that_exit_themselves_are_no_evidence_against_srun(
    tmp_path: Path, code: int
) -> None:
    path = note(tmp_path, launch=1, restarts=0)
    path.parent.mkdir(parents=True)
    write_down(path, "node3", code, 5.0)
    assert breakdown(a_launch(tmp_path), 0) is None


def test_a_note_that_cannot_be_written_or_read_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = note(tmp_path, launch=1, restarts=0)
    write_down(path, "node3", 137, 5.0)
    assert "failed to record the end of srun" in caplog.text
    path.parent.mkdir(parents=True)
    for torn in ('{"code": 137', '{"code": 137}', "[]", '{"code": null, "host": 1, "at": 2}'):
        path.write_text(torn)
        assert breakdown(a_launch(tmp_path), 0) is None


def test_the_last_errors_of_srun_are_named_with_their_file(tmp_path: Path) -> None:
    """Also of a long output, which has lines of ndctl and of earlier allocations."""
    file = tmp_path / "7_batch.out"
    errors = "srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types\n"
    file.write_text("srun: old\n" + "a line\n" * 20_000 + f"{errors}INFO the job is queued\n" * 2)
    assert last_errors(file) == f": {errors.strip()} (from {file})"
    file.write_text("no error\n")
    assert last_errors(file) == last_errors(tmp_path / "pipe:[7]") == ""


# Output of Slurm 22.05

ABORTED = "srun: Job step aborted: Waiting up to 4 seconds for job step to finish.\n"
KILLED = "srun: error: node1: task 0: Killed\nsrun: error: node2: task 1: Killed\n"
CANCELLED = (
    "slurmstepd-node1: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-30T20:43:44{} ***\n"
)
REQUEUED = (
    "slurmstepd-node1: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-30T20:43:47 DUE TO JOB"
    " REQUEUE ***\nsrun: cluster configuration lacks support for cpu binding\n"
)
LOST = "srun: error: Aborting, io error and missing step on node 1\n"
SHELL = "/spool/job00007/slurm_script: line 92:  2428 Killed                  srun --unbuffered\n"


@pytest.mark.parametrize(
    ("srun", "step", "said"),
    [
        (ABORTED + KILLED, CANCELLED.format(""), "step 7.0 was cancelled (by scancel or Slurm)"),
        (KILLED, CANCELLED.format(" DUE TO NODE FAILURE"), "7.0 was cancelled DUE TO NODE FAILURE"),
        (LOST + ABORTED + KILLED, CANCELLED.format(""), "missing step on node 1; srun counts"),
        (KILLED, "", ""),
        (SHELL, CANCELLED.format(""), ""),
        (KILLED + SHELL, CANCELLED.format(""), ""),
        (LOST + ABORTED + KILLED + REQUEUED, "", ""),
    ],
)
def test_how_the_step_ended_is_known_only_if_srun_lived(
    tmp_path: Path, srun: str, step: str, said: str
) -> None:
    folder = note(tmp_path, launch=1, restarts=1).parent
    folder.mkdir(parents=True)
    (folder / "7_batch.out").write_text(ABORTED + KILLED + REQUEUED + srun)
    (folder / "7-0_0_log.err").write_text(CANCELLED.format(" DUE TO AN EARLIER FAULT"))
    (folder / "7-1_0_log.err").write_text(step)
    found = step_end(tmp_path, 1, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
    assert said in found
    assert bool(found) == bool(said)


def test_a_cancelled_step_is_not_taken_for_a_killed_srun(tmp_path: Path) -> None:
    path = note(tmp_path, launch=1, restarts=0)
    path.parent.mkdir(parents=True)
    write_down(path, "node1", 137, 5.0, "step 7.0 was cancelled (by scancel or Slurm)")
    found = breakdown(a_launch(tmp_path), 0)
    assert found is not None
    assert found.what == "step 7.0 was cancelled (by scancel or Slurm)"
