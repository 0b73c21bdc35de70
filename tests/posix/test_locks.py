import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.posix.locks import is_free, is_held_alone, share, try_lock
from tests.nfs_locks.byte_ranges import flock


@pytest.fixture(params=["local", "nfs"])
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    if request.param == "nfs":
        monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "lock"
    path.touch()
    return path


def test_an_unused_lock_is_free(lock: Path) -> None:
    assert is_free(lock)
    assert is_free(lock.with_name("never made"))
    assert not is_held_alone(lock)
    assert not is_held_alone(lock.with_name("never made"))


def test_an_exclusive_lock_blocks_all_others_until_it_is_closed(lock: Path) -> None:
    fd, other = os.open(lock, os.O_RDWR), os.open(lock, os.O_RDWR)
    try:
        assert try_lock(fd)
        assert not try_lock(other)
        assert is_held_alone(lock)
        assert not is_free(lock)
        os.close(os.open(lock, os.O_RDWR))  # of locks of a process this would let go
        assert is_held_alone(lock)
        os.close(fd)
        assert is_free(lock)
        assert try_lock(other)
    finally:
        os.close(other)


@pytest.mark.process
def test_a_shared_lock_is_held_until_the_last_child_has_ended(lock: Path) -> None:
    fd = share(lock)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[fd]) as child:
        os.close(fd)
        os.close(os.open(lock, os.O_RDONLY))
        assert not is_free(lock)
        assert not is_held_alone(lock)
        second = share(lock)
        child.communicate()
    assert not is_free(lock)
    os.close(second)
    assert is_free(lock)


def test_locks_on_storage_that_became_read_only_are_seen(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "none", str(tmp_path)]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"a file system cannot be mounted here: {tried.stderr.strip()}")
    try:
        held, free = tmp_path / "held", tmp_path / "free"
        free.touch()
        fd = share(held)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        assert is_free(free)
        assert not is_free(held)
        os.close(fd)
        assert is_free(held)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_fifo_has_no_lock_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for ask in (is_free, is_held_alone):
        with pytest.raises(OSError, match="it is a FIFO, not a file"):
            ask(tmp_path / "fifo")
