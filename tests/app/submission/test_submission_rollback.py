"""A refused submission changes nothing on disk."""

import os
from errno import ENOSPC
from pathlib import Path

import pytest

from orchestrator.app.submission import submit_job
from orchestrator.app.submission.submission_lock import submission_lock
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import CancelRequested
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, JobError, NdctlError, Refused, Unanswered
from tests.agent.world import TurnedClock
from tests.jobs_on_disk import JOB, NoCluster, cluster, lead, submission

__all__ = ["cluster"]


class RefusingScheduler(NoCluster):
    """A scheduler that receives the whole submission and refuses it."""

    error: Exception = Refused("Memory specification can not be satisfied")
    written: tuple[str, ...] = ()

    def submit(self, handover: Handover) -> None:
        folder = RunDir(Path(handover.launch.run_dir)).slurm / f"launch-{handover.launch.launch}"
        folder.mkdir(parents=True)
        (folder / "submission.sh").write_text("#!/bin/sh\n")
        self.written = tuple(path.name for path in Path(handover.launch.run_dir).iterdir())
        raise self.error


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> RefusingScheduler:
    found = RefusingScheduler()
    monkeypatch.setattr("orchestrator.backends.by_name.implementation_named", lambda *_: found)
    return found


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def submit(root: Path, expected: type[NdctlError] = Refused, **how: bool) -> None:
    with pytest.raises(expected):
        submit_job.submit(submission(root, **how), {}, TurnedClock())


def ended_job(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.backends.by_name.implementation_named", lambda *_: NoCluster())
        submit_job.submit(submission(root), {}, TurnedClock())
    lead(root, CancelRequested(at=1.0, by="me"))


def test_a_refused_first_submission_leaves_no_name_and_no_file(
    refusing: RefusingScheduler, tmp_path: Path
) -> None:
    submit(tmp_path)
    assert {"journal.jsonl", "token", "slurm", "launch.json"} <= {*refusing.written}
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("how", ["resume", "new"])
def test_a_refused_resume_does_not_change_the_job(
    refusing: RefusingScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ended_job(tmp_path, monkeypatch)
    (tmp_path / JOB / "slurm" / "launch-1").mkdir(parents=True)
    before = tree(tmp_path)
    submit(tmp_path, resume=how == "resume", new=how == "new")
    after = tree(tmp_path)
    after.pop(".archive", None)
    assert after == before


def test_a_folder_that_existed_before_the_submission_stays(
    refusing: RefusingScheduler, tmp_path: Path
) -> None:
    """Its owner may have set its group and permissions."""
    (tmp_path / JOB).mkdir(mode=0o750)
    submit(tmp_path)
    assert tree(tmp_path / JOB) == {}
    assert (tmp_path / JOB).stat().st_mode & 0o777 == 0o750


def test_on_a_full_disk_no_name_and_no_file_are_left(
    refusing: RefusingScheduler, tmp_path: Path
) -> None:
    refusing.error = OSError(28, "No space left on device")
    submit(tmp_path, BackendError)
    assert tree(tmp_path) == {}


def test_files_of_a_possibly_accepted_job_stay(refusing: RefusingScheduler, tmp_path: Path) -> None:
    refusing.error = Unanswered("whether Slurm has taken it is not known")
    submit(tmp_path, Unanswered)
    assert (tmp_path / JOB / "journal.jsonl").stat().st_size > 0


def test_a_resume_of_an_unknown_job_leaves_no_file(
    refusing: RefusingScheduler, tmp_path: Path
) -> None:
    submit(tmp_path, JobError, resume=True)
    assert tree(tmp_path) == {}


def test_a_submission_lock_holds_after_its_file_was_removed(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path / JOB)
    with submission_lock(run_dir):
        with pytest.raises(JobError, match="is being submitted"), submission_lock(run_dir):
            raise AssertionError("two hold it")
        assert (tmp_path / f".{JOB}.submitting").exists()
    assert tree(tmp_path) == {}
    with submission_lock(run_dir):
        run_dir.make()
    assert (tmp_path / f".{JOB}.submitting").exists(), "as long as there is a run directory"


def test_a_full_file_system_is_named_with_the_folder(
    refusing: RefusingScheduler, tmp_path: Path
) -> None:
    folder = str(tmp_path / JOB)
    refusing.error = OSError(ENOSPC, os.strerror(ENOSPC), folder)
    with pytest.raises(BackendError) as full:
        submit_job.submit(submission(tmp_path), {}, TurnedClock())
    said = f"cannot write the run directory {folder}: No space left on device ("
    assert full.value.message.startswith(said)
    assert full.value.message.endswith(" MiB free)")
    assert full.value.fix.startswith("free space there, or set --run-root to a directory")
