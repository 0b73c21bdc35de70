"""A file is there whole or not at all, and what could not be written leaves nothing behind."""

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
    """As a full disk: the kernel takes no more of a file than that."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("durable", [False, True])
def test_it_takes_the_place_of_what_was_there(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "leader.json"
    write_whole(path, b"first", durable)
    write_whole(path, b"second", durable)
    assert path.read_bytes() == b"second"
    assert names(tmp_path) == ["leader.json"]


def test_a_full_disk_leaves_the_former_one_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, b"first")
    with limited(1024), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write_whole(path, b"x" * 4096, durable=True)
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["state.json"]


def test_nothing_is_written_through_a_link_that_another_put_there(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "state.json", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"of another")
    with written_beside(path, b"x") as fresh:
        name = fresh.name
    (tmp_path / name).symlink_to(elsewhere)
    write_whole(path, b"ours")
    assert (path.read_bytes(), path.is_symlink()) == (b"ours", False)
    assert elsewhere.read_bytes() == b"of another"


def test_one_that_may_not_take_the_place_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "state.json"

    def guard() -> None:
        raise PermissionError("another leader has taken over")

    with pytest.raises(PermissionError), written_beside(path, b"late"):
        guard()
    assert names(tmp_path) == []
