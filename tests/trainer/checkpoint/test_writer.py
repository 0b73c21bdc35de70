"""Checksums of saved files, and the error of the disk when a write fails."""

import errno
import os
import pickle
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from ndctl.rank.checkpoint_files import Written, checksum
from orchestrator.diagnosis.cause.exits import NOT_SAVED
from tests.trainer.launch.tiny_runs import ROOT
from trainer.checkpoint.save import CheckpointNotSaved
from trainer.checkpoint.writer import PIECE_BYTES, WatchedFiles, why_of

FULL_DISK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from orchestrator.contract.files.checkpoint_names import newest_complete
from orchestrator.contract.files.env import RankEnv
from trainer.checkpoint.collective import Target, write_on_all_ranks

folder = Path(sys.argv[1])
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
target = Target(folder=folder, env=RankEnv(), group=dist.new_group(backend="gloo"))
for step, size in ((1, 100_000), (2, 500_000)):
    print(write_on_all_ranks({"a": torch.randn(size)}, step, target).why)
print(newest_complete(folder)[0].name, sorted(path.name for path in folder.iterdir()))
"""


def test_a_files_checksum_is_computed_from_the_disk(tmp_path: Path) -> None:
    files = WatchedFiles()
    with files.create_stream(tmp_path / "tmp", "wb") as stream:
        stream.write(b"first ")
        stream.write(memoryview(b"second"))
        assert stream.tell() == 12
        os.fsync(stream.fileno())
    files.rename(tmp_path / "tmp", tmp_path / "final")
    assert files.written == {"final": Written(12, checksum(tmp_path / "final"))}
    with files.create_stream(tmp_path / "final", "rb") as stream:
        assert stream.read() == b"first second"


@pytest.mark.parametrize("items", [0, PIECE_BYTES // 8, PIECE_BYTES // 8 + 1, PIECE_BYTES])
def test_values_of_any_size_are_written_whole_and_in_order(tmp_path: Path, items: int) -> None:
    files, values = WatchedFiles(), array("d", range(items))
    with files.create_stream(tmp_path / "file", "wb") as stream:
        assert stream.write(memoryview(values)) == stream.tell() == 8 * items
    assert (tmp_path / "file").read_bytes() == values.tobytes()
    assert files.written == {"file": Written(8 * items, checksum(tmp_path / "file"))}


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_the_error_of_a_full_disk_is_kept_with_its_path(size: int) -> None:
    """torch hides the exception of a write and raises another one later."""
    files = WatchedFiles()
    with (
        pytest.raises(OSError, match="No space left"),
        files.create_stream(Path("/dev/full"), "wb") as stream,
    ):
        stream.write(bytes(size))
    assert files.error is not None
    assert files.error.filename == "/dev/full"
    assert files.written == {}


@pytest.mark.process
def test_a_full_disk_is_reported_and_the_previous_checkpoint_stays(tmp_path: Path) -> None:
    """On a real file system of 1 MiB, which is too small for a second checkpoint."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && exec "
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    tried = subprocess.run([*inside, f"{mount} true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"a file system cannot be mounted here: {tried.stderr.decode().strip()}")
    done = subprocess.run(
        [*inside, f'{mount} "$@"', "sh", sys.executable, "-c", FULL_DISK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    first, second, left = done.stdout.splitlines()
    assert first == ""
    shard = tmp_path / "step-2.partial-1" / "__0_0.distcp"
    assert second.startswith(f"rank 0: No space left on device: {shard} (")
    assert second.endswith(" of 1.0 MiB free)")
    # The partial second checkpoint is removed, because it filled the disk.
    assert left == "step-1 ['step-1']"


def test_the_reason_names_the_rank_the_cause_and_the_path(tmp_path: Path) -> None:
    error = pickle.loads(pickle.dumps(PermissionError(errno.EACCES, "Permission denied", "/a/b")))
    failed = CheckpointException("write", {3: (error, None), 5: (ValueError("no"), None)})  # type: ignore[dict-item]
    assert why_of(failed, tmp_path) == "rank 3: Permission denied: /a/b"
    assert why_of(OSError("told in words"), tmp_path) == "OSError: told in words"
    full = OSError(errno.ENOSPC, "No space left on device")
    told = why_of(full, tmp_path / "not" / "there")
    assert told.startswith(f"No space left on device: {tmp_path}/not/there (")
    assert told.endswith(" MiB free)")


def test_a_run_directory_that_was_moved_is_not_created_again(tmp_path: Path) -> None:
    files, run = WatchedFiles(), tmp_path / "job"
    with pytest.raises(FileNotFoundError, match=str(run)):
        files.mkdir(run / "checkpoints" / "step-2.partial-1")
    assert not run.exists()
    run.mkdir()
    files.mkdir(run / "checkpoints" / "step-2.partial-1")
    assert (run / "checkpoints" / "step-2.partial-1").is_dir()


def test_the_diagnosis_knows_the_exception_of_a_failed_save() -> None:
    assert CheckpointNotSaved.__name__ == NOT_SAVED
