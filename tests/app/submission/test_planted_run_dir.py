"""What another user put into a run root is not used by a submission."""

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.app.submission import submit_job
from orchestrator.contract.messages.events import CancelRequested
from orchestrator.errors import JobError
from orchestrator.job_secret import draw, secret_from
from orchestrator.posix import owners
from tests.agent.world import TurnedClock
from tests.jobs_on_disk import JOB, cluster, lead, submission

__all__ = ["cluster"]

ANOTHER = 65_534

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user"),
]


def submit(root: Path, **how: bool) -> str:
    """The job's secret."""
    submit_job.submit(submission(root, **how), {}, TurnedClock())
    return (root / JOB / "token").read_text()


def folder(root: Path) -> None:
    (root / JOB).mkdir()
    (root / JOB).chmod(0o777)
    (root / JOB / "token").write_text(draw())
    os.chown(root / JOB, ANOTHER, ANOTHER)


def link(root: Path) -> None:
    (root / "mine").mkdir()
    (root / JOB).symlink_to(root / "mine")
    os.chown(root / JOB, ANOTHER, ANOTHER, follow_symlinks=False)


def link_to_theirs(root: Path) -> None:
    (root / "theirs").mkdir()
    os.chown(root / "theirs", ANOTHER, ANOTHER)
    (root / JOB).symlink_to(root / "theirs")


@pytest.mark.parametrize("plant", [folder, link, link_to_theirs])
@pytest.mark.parametrize("how", [{}, {"new": True}, {"resume": True}], ids=str)
def test_a_run_directory_of_another_user_is_refused(
    tmp_path: Path, plant: Callable[[Path], None], how: dict[str, bool]
) -> None:
    plant(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(JobError, match=rf"{tmp_path / JOB} .*of user nobody.*") as caught:
        submit(tmp_path, **how)
    assert "--set name=" in str(caught.value)
    lock = tmp_path / f".{JOB}.submitting"
    assert sorted(path for path in tmp_path.rglob("*") if path != lock) == before


def test_new_moves_a_run_of_another_user_away_where_the_run_root_lets_it(tmp_path: Path) -> None:
    submit(tmp_path)
    lead(tmp_path, CancelRequested(at=1.0, by="me"))
    os.chown(tmp_path / JOB, ANOTHER, ANOTHER)
    with pytest.raises(JobError, match="of user nobody"):
        submit(tmp_path, resume=True)
    submit(tmp_path, new=True)
    assert (tmp_path / JOB).stat().st_uid == os.geteuid()


def test_a_link_of_the_user_to_a_folder_of_the_user_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / JOB).symlink_to(tmp_path / "disk")
    submit(tmp_path)
    assert (tmp_path / "disk/journal.jsonl").exists()


def test_a_file_server_may_show_all_files_as_those_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does with root's files."""
    folder(tmp_path)

    def squashed(fd: int) -> os.stat_result:
        found = list(os.stat(fd))
        found[stat.ST_UID] = ANOTHER
        return os.stat_result(found)

    monkeypatch.setattr(owners, "file_status", squashed)
    (tmp_path / JOB / "token").unlink()
    submit(tmp_path)


def malformed(token: Path) -> None:
    token.write_text("ndctl-job-key abc\n")


def empty(token: Path) -> None:
    token.write_text("")


def of_another(token: Path) -> None:
    os.chown(token, ANOTHER, ANOTHER)


def readable(token: Path) -> None:
    token.chmod(0o640)


def linked(token: Path) -> None:
    token.symlink_to(token.rename(token.with_name("elsewhere")))


@pytest.mark.parametrize("spoil", [malformed, empty, of_another, readable, linked])
def test_a_secret_that_others_may_know_is_replaced(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / JOB).mkdir()
    token = tmp_path / JOB / "token"
    token.write_text(former := draw())
    token.chmod(0o600)
    spoil(token)
    assert submit(tmp_path) != former
    secret_from(token.read_text())
    found = token.lstat()
    assert stat.S_ISREG(found.st_mode)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o600)
    assert str(token) in caplog.text


def test_a_job_keeps_its_secret(tmp_path: Path) -> None:
    former = submit(tmp_path)
    lead(tmp_path, CancelRequested(at=1.0, by="me"))
    assert submit(tmp_path, resume=True) == former


def test_a_submission_lock_of_another_user_is_named(tmp_path: Path) -> None:
    lock = tmp_path / f".{JOB}.submitting"
    lock.touch()
    with lock.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(JobError) as caught:
            submit(tmp_path)
        assert str(lock) not in str(caught.value)
        os.chown(lock, ANOTHER, ANOTHER)
        with pytest.raises(JobError, match=f"it holds {lock} of user nobody") as caught:
            submit(tmp_path)
        assert "another name" in str(caught.value)
