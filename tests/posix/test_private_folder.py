"""A private folder that no other user can create first. Root simulates other users with chown."""

import errno
import fcntl
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.posix.private_folder import (
    NAME,
    PATH_BYTES,
    SOCKET,
    NoPrivateFolder,
    base_for,
    private_folder,
    remove_abandoned,
)
from tests.nfs_locks import byte_ranges

NOBODY = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to play another user")


@pytest.fixture
def short() -> Iterator[Path]:
    """A short folder, because the path of a socket has at most 107 bytes, and `tmp_path` may be
    long."""
    with tempfile.TemporaryDirectory(prefix="nd-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(params=["local", "nfs"])
def scratch(short: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A temporary directory that all users share, like /tmp."""
    if request.param == "nfs":
        monkeypatch.setattr(fcntl, "flock", byte_ranges.flock)
        monkeypatch.setenv("PYTHONPATH", str(Path(byte_ranges.__file__).parent))
    folder = short / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def runtime(short: Path) -> Path:
    folder = short / "runtime"
    folder.mkdir(mode=0o700)
    return folder


def test_the_folder_is_private_and_removed_with_its_process(scratch: Path) -> None:
    with private_folder({}) as first, private_folder({}) as second:
        assert first != second
        for folder in (first, second):
            found = os.lstat(folder)
            assert folder.parent == scratch
            assert stat.S_IMODE(found.st_mode) == 0o700
            assert found.st_uid == os.geteuid()
    assert list(scratch.iterdir()) == []


def test_a_socket_fits_into_the_longest_accepted_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = len(f"/ndctl-agent-12345678/{SOCKET}")
    deep = Path("/tmp") / f"ndctl-test-{os.getpid()}".ljust(PATH_BYTES - name - len("/tmp/"), "x")
    deep.mkdir()
    try:
        monkeypatch.setattr("tempfile.tempdir", str(deep))
        with private_folder({}) as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            assert len(os.fsencode(folder / SOCKET)) == PATH_BYTES
            sock.bind(str(folder / SOCKET))
    finally:
        deep.rmdir()
    monkeypatch.setattr("tempfile.tempdir", f"{deep}x")
    with pytest.raises(NoPrivateFolder, match="No such file"):
        base_for({})


def test_the_runtime_folder_of_xdg_is_preferred(scratch: Path, runtime: Path) -> None:
    assert base_for({"XDG_RUNTIME_DIR": str(runtime)}) == runtime
    assert base_for({"XDG_RUNTIME_DIR": ""}) == scratch
    assert base_for({}) == scratch


def test_a_runtime_folder_that_is_not_private_is_not_used(
    scratch: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = runtime.with_name("link")
    link.symlink_to(runtime)
    monkeypatch.chdir(runtime.parent)
    for wrong in (link, "runtime", runtime / "none", runtime / ".." / "tmp"):
        assert base_for({"XDG_RUNTIME_DIR": str(wrong)}) == scratch
    for mode in (0o755, 0o770, 0o1777):
        runtime.chmod(mode)
        assert base_for({"XDG_RUNTIME_DIR": str(runtime)}) == scratch


@as_root
def test_a_runtime_folder_of_another_user_is_not_used(scratch: Path, runtime: Path) -> None:
    os.chown(runtime, NOBODY, NOBODY)
    assert base_for({"XDG_RUNTIME_DIR": str(runtime)}) == scratch


def test_the_folder_of_logind_is_used_only_for_users_with_lingering(
    scratch: Path, runtime: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders below /run/user belong to the machine, so another folder replaces it."""
    monkeypatch.setattr("orchestrator.posix.private_folder.LOGIN_FOLDERS", short)
    linger = short / "linger"
    assert base_for({"XDG_RUNTIME_DIR": str(runtime)}, linger) == scratch
    linger.mkdir()
    (linger / pwd.getpwuid(os.geteuid()).pw_name).touch()
    assert base_for({"XDG_RUNTIME_DIR": str(runtime)}, linger) == runtime


def test_a_shared_place_without_a_sticky_bit_is_refused(scratch: Path) -> None:
    scratch.chmod(0o777)
    with pytest.raises(NoPrivateFolder, match=r"sticky bit"), private_folder({}):
        pass


@as_root
def test_folders_of_another_user_are_neither_used_nor_removed(
    scratch: Path, tmp_path: Path
) -> None:
    taken = [scratch / f"ndctl-{os.getuid()}-0123456789abcdef", scratch / "ndctl-agent-abcd1234"]
    for folder in taken:
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
        folder.chmod(0o777)
    ours = tmp_path / "ours"
    (ours / "deep").mkdir(parents=True)
    (scratch / "ndctl-agent-linked00").symlink_to(ours)
    with private_folder({}) as folder:
        assert folder not in taken
    assert all(folder.is_dir() for folder in taken)
    assert (ours / "deep").is_dir()


HOLDS = """
import sys
import tempfile
from orchestrator.posix.private_folder import private_folder
with private_folder({}) as folder:
    (folder / "attempt-1").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(scratch: Path) -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    environ = {**os.environ, "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=pipe, stdout=pipe, text=True, env=environ
    )
    with process:
        yield process
        process.kill()


@pytest.mark.process
def test_folders_of_killed_processes_are_removed_and_live_ones_kept(
    scratch: Path, holder: "subprocess.Popen[str]"
) -> None:
    assert holder.stdout is not None
    left = Path(holder.stdout.readline().strip())
    others = scratch / "ndctl-agent-data-of-a-user"
    others.mkdir()
    with private_folder({}) as mine:
        assert NAME.fullmatch(left.name)
        assert left.is_dir()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        remove_abandoned(scratch)
        assert not left.exists()
        assert mine.is_dir()
    assert others.is_dir()


def test_without_working_locks_no_folder_is_removed(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise agents of other jobs lose the sockets to their ranks."""
    with private_folder({}) as lives:
        monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
        remove_abandoned(scratch)
        assert lives.exists()


def test_where_nothing_can_be_locked_the_error_says_why_and_nothing_is_left(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        # NFS without its lock service
        why = errno.EBADF if stat.S_ISDIR(os.fstat(fd).st_mode) else errno.ENOLCK
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(fcntl, "flock", refuse)
    why = r"tmp: a new folder could not be locked \(No locks available\); set TMPDIR"
    with pytest.raises(NoPrivateFolder, match=why), private_folder({}):
        pass
    assert list(scratch.iterdir()) == []
