"""Atomic writes: a reader sees the old or the new file, and a failed write leaves nothing
behind."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.contract.files.atomic_write import write_whole, written_beside


@contextmanager
def limited(most_bytes: int) -> Iterator[None]:
    """Simulates a full disk: the kernel accepts only this many bytes of a file."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("durable", [False, True])
def test_an_atomic_write_replaces_the_old_file(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "leader.json"
    write_whole(path, b"first", durable)
    write_whole(path, b"second", durable)
    assert path.read_bytes() == b"second"
    assert names(tmp_path) == ["leader.json"]


def test_a_full_disk_leaves_the_old_file_and_no_partial_one(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, b"first")
    with limited(1024), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write_whole(path, b"x" * 4096, durable=True)
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["state.json"]


def test_a_write_does_not_follow_a_symbolic_link(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "state.json", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"of another")
    with written_beside(path, b"x") as fresh:
        name = fresh.name
    (tmp_path / name).symlink_to(elsewhere)
    write_whole(path, b"ours")
    assert (path.read_bytes(), path.is_symlink()) == (b"ours", False)
    assert elsewhere.read_bytes() == b"of another"


def test_a_new_file_that_is_not_moved_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "state.json"

    def guard() -> None:
        raise PermissionError("another leader has taken over")

    with pytest.raises(PermissionError), written_beside(path, b"late"):
        guard()
    assert names(tmp_path) == []
