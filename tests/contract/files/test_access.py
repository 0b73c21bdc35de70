"""Permissions and group of a run directory and its new files."""

import os
import stat
from pathlib import Path

import pytest

from orchestrator.contract.files.access import Access, access_of, access_umask, umask_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from tests.backends.slurm.slurm_launch import a_launch


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_by_default_only_the_owner_can_read_a_run_directory(tmp_path: Path) -> None:
    launch = a_launch(tmp_path / "job")
    assert (access_of(launch), umask_of(launch)) == (None, None)
    run_dir = RunDir(tmp_path / "job")
    run_dir.make(access_of(launch))
    assert mode_of(run_dir.path) == 0o700


@pytest.mark.parametrize(
    ("mode", "folder", "file"),
    [(700, 0o700, 0o600), (750, 0o750, 0o640), (770, 0o770, 0o660), (755, 0o755, 0o644)],
)
def test_new_files_get_the_permissions_of_the_run_directory(
    tmp_path: Path, mode: int, folder: int, file: int
) -> None:
    launch = a_launch(tmp_path / "job", slurm=SlurmSpec(mode=mode))  # type: ignore[arg-type]
    access, run_dir = access_of(launch), RunDir(tmp_path / "job")
    before = os.umask(0o022)
    os.umask(before)
    with access_umask(access):
        run_dir.make(access)
        (run_dir.path / "metrics.jsonl").touch()
        (run_dir.path / "checkpoints").mkdir()
    assert mode_of(run_dir.path) & 0o777 == folder
    assert mode_of(run_dir.logs) & 0o777 == mode_of(run_dir.checkpoints) & 0o777 == folder
    assert mode_of(run_dir.path / "metrics.jsonl") == file
    after = os.umask(before)
    assert after == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files any group")
def test_new_files_get_the_group_of_the_run_directory(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "job")
    run_dir.make(Access(0o750, group=4711))
    (run_dir.path / "metrics.jsonl").touch()
    groups = {path.stat().st_gid for path in (run_dir.path, run_dir.logs, run_dir.metrics)}
    assert groups == {4711}
    assert mode_of(run_dir.path) == 0o2750


def test_a_group_that_the_host_does_not_know_is_an_error(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, slurm=SlurmSpec(group="no-such-group", mode=750))
    with pytest.raises(OSError, match="knows no Unix group no-such-group"):
        access_of(launch)
    assert umask_of(launch) == 0o027, "the script can be rendered elsewhere"
