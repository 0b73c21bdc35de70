"""`ndctl prune`: what it removes, and what it must never touch."""

import fcntl
import os
from pathlib import Path

import pytest

from orchestrator.app.fleet.pruning import size_of
from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.events import CancelRequested
from orchestrator.registry.store import own_entries
from tests.agent.world import TurnedClock
from tests.app.fleet.test_known_jobs import elsewhere, names
from tests.cli.test_verbs import ndctl, ndctl_json
from tests.jobs_on_disk import JOB, SPEC, NoCluster, cluster, lead

__all__ = ["cluster", "elsewhere"]
ALL = ("prune", "--older-than", "0h", "--yes")


@pytest.fixture
def ended(elsewhere: Path) -> Path:
    """The run directory of a job that was cancelled, with 5,000 bytes of logs."""
    lead(elsewhere, CancelRequested(at=TurnedClock().now(), by="alice"))
    run_dir = elsewhere / JOB
    log = run_dir / "logs" / "attempt-1" / "host-0" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("x" * 5_000)
    return run_dir


def save(run_dir: Path) -> Path:
    saved = run_dir / "checkpoints" / "step-20"
    saved.mkdir(parents=True)
    (saved / "COMPLETE").write_text("")
    return saved


def test_it_shows_bytes_and_removes_nothing_without_a_yes(ended: Path) -> None:
    done = ndctl("prune", "--older-than", "0h")
    assert done.exit_code == 0, done.output
    assert str(ended) in done.output
    size = f"{size_of(ended) / 2**10:,.0f} KiB"
    assert size in done.output
    assert f"nothing was removed; to remove {size} of 1 run, add --yes" in done.output
    assert ended.is_dir()


def test_a_run_without_checkpoints_is_removed_and_forgotten(ended: Path) -> None:
    assert f"removed {JOB}: {ended}" in ndctl(*ALL).output
    assert not ended.exists()
    assert list(ended.parent.iterdir()) == []
    assert list(own_entries(os.environ)) == []
    assert names() == []
    assert ndctl("submit", str(SPEC), "--run-root", str(ended.parent)).exit_code == 0


def test_checkpoints_stay_and_the_run_can_be_resumed(ended: Path) -> None:
    saved = save(ended)
    done = ndctl(*ALL)
    assert "kept: 1 checkpoint" in done.output
    assert saved.is_dir()
    assert not (ended / "logs").exists()
    assert names() == [JOB]
    assert ndctl("status", JOB).exit_code == 0
    assert ndctl(*ALL).output == "nothing to remove\n"
    resumed = ndctl("submit", str(SPEC), "--run-root", str(ended.parent), "--resume")
    assert "step-20" in resumed.output or resumed.exit_code == 0, resumed.output


def test_checkpoints_are_removed_if_asked_for(ended: Path) -> None:
    save(ended)
    assert ndctl(*ALL, "--checkpoints").exit_code == 0
    assert not ended.exists()


def test_files_of_the_users_program_stay(ended: Path) -> None:
    (ended / "final.pt").write_text("weights")
    assert "what ndctl did not write: final.pt" in ndctl(*ALL).output
    assert (ended / "final.pt").read_text() == "weights"


def test_links_are_not_followed(ended: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("x")
    (ended / "logs" / "link").symlink_to(precious)
    (ended / "traces").symlink_to(precious)
    assert ndctl(*ALL).exit_code == 0
    assert (precious / "data").exists()
    assert not ended.exists()


def test_a_live_job_stays(elsewhere: Path, ended: Path) -> None:
    with (ended / "logs" / "ranks-host-0.lock").open("w") as rank:
        fcntl.flock(rank, fcntl.LOCK_SH)  # a rank that outlived its agent
        assert ndctl(*ALL).output == "nothing to remove\n"
    with (ended / "journal.jsonl").open("a") as leader:
        fcntl.flock(leader, fcntl.LOCK_EX)
        assert ndctl(*ALL).output == "nothing to remove\n"
    with (elsewhere / f".{JOB}.submitting").open("w") as submitter:
        fcntl.flock(submitter, fcntl.LOCK_EX)
        done = ndctl(*ALL)
        assert done.exit_code == exit_codes.BAD_JOB_STATE
        assert "is being submitted by another process" in done.stderr
    assert ended.is_dir()


def test_a_job_that_did_not_end_stays(elsewhere: Path) -> None:
    assert ndctl(*ALL).output == "nothing to remove\n"
    assert names() == [JOB]


def test_only_old_runs_in_the_given_state_go(ended: Path) -> None:
    assert ndctl("prune", "--yes").output == "nothing to remove\n"
    assert ndctl(*ALL, "--state", "FAILED").output == "nothing to remove\n"
    assert ndctl(*ALL, "other-*").exit_code == exit_codes.BAD_JOB_STATE
    assert ndctl("prune", "--older-than", "soon").exit_code == exit_codes.USAGE
    assert ended.is_dir()
    assert ndctl(*ALL, "--state", "CANCELLED", "e2*").exit_code == 0
    assert not ended.exists()


def test_an_archived_run_goes_and_its_successor_stays(ended: Path, elsewhere: Path) -> None:
    assert ndctl("submit", str(SPEC), "--run-root", str(elsewhere), "--new").exit_code == 0
    assert ".archive" in ndctl(*ALL).output
    assert [row["archived"] for row in ndctl_json("list", "--all")["jobs"]] == [False]


def test_an_entry_without_a_run_directory_is_forgotten(ended: Path) -> None:
    ended.rename(ended.with_name("moved"))
    assert "its entry, because" in ndctl(*ALL).output
    assert list(own_entries(os.environ)) == []


def test_runs_of_others_stay(ended: Path, cluster: NoCluster) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    os.chown(ended / "journal.jsonl", 65534, 65534)
    (own,) = own_entries(os.environ)
    own.path.unlink()
    assert ndctl(*ALL, "--run-root", str(ended.parent)).output == "nothing to remove\n"
