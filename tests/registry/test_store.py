"""Entries written by several users and processes at once, and entries that nobody should trust."""

import multiprocessing
import os
from pathlib import Path

import pytest

from orchestrator.contract.files import env
from orchestrator.errors import JobError
from orchestrator.registry.entry import Entry, from_bytes, to_bytes
from orchestrator.registry.store import forget, own_entries, register, shared_entries

HERE = os.uname().nodename


def entry(name: str = "llama", root: str = "/runs", **more: object) -> Entry:
    known = {
        "user": "alice",
        "machine": HERE,
        "backend": "local",
        "at": 1.0,
        "hosts": 2,
        "gpus": 16,
    }
    return Entry(name=name, run_dir=f"{root}/{name}", **(known | more))  # type: ignore[arg-type]


def environ(tmp_path: Path) -> dict[str, str]:
    index = tmp_path / "index"
    index.mkdir(exist_ok=True)
    index.chmod(0o1777)
    return {"XDG_STATE_HOME": str(tmp_path / "state"), env.INDEX: str(index)}


def test_a_job_is_registered_for_its_user_and_for_the_site(tmp_path: Path) -> None:
    told = environ(tmp_path)
    assert register(entry(), told) == ()
    assert [one.entry for one in own_entries(told)] == [entry()]
    assert [one.entry for one in shared_entries(told)] == [entry()]
    assert [one.owner for one in shared_entries(told)] == [os.geteuid()]
    assert list(shared_entries(told, "bob")) == []
    assert (tmp_path / "state" / "ndctl" / "jobs").stat().st_mode & 0o777 == 0o700
    (file,) = (tmp_path / "index" / "alice").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_second_submission_replaces_the_entry(tmp_path: Path) -> None:
    told = environ(tmp_path)
    for at in (1.0, 2.0):
        register(entry(at=at), told)
    assert [one.entry.at for one in own_entries(told)] == [2.0]
    register(entry(machine="login-2"), told)  # the same path there may be another folder
    assert len(list(own_entries(told))) == 2


def _register_many(told: dict[str, str], first: int) -> None:
    for number in range(first, first + 40):
        register(entry(f"job-{number}", at=float(first)), told)


def test_two_writers_at_once_lose_nothing_and_no_reader_sees_a_part(tmp_path: Path) -> None:
    told = environ(tmp_path)
    method = multiprocessing.get_context("fork")
    # The second half of one range is the first half of the other: both replace the same files.
    writers = [method.Process(target=_register_many, args=(told, first)) for first in (0, 20)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        for one in shared_entries(told):
            assert one.entry.run_dir == f"/runs/{one.entry.name}"
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    names = {one.entry.name for one in shared_entries(told)}
    assert names == {f"job-{number}" for number in range(60)}
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"v":1',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"name":"x"}',
        to_bytes(entry(at=1e300)),
        to_bytes(entry(root="relative")),
        to_bytes(entry()).replace(b"/runs/llama", b"/runs/other"),
        to_bytes(entry()).replace(b"/runs/", b"/r\\u0000/"),
        b" " * (1 << 20) + to_bytes(entry()),
    ],
    ids=range(10),
)
def test_a_damaged_entry_is_skipped(tmp_path: Path, data: bytes) -> None:
    told = environ(tmp_path)
    register(entry("good"), told)
    (tmp_path / "state" / "ndctl" / "jobs" / "bad.json").write_bytes(data)
    assert [one.entry.name for one in own_entries(told)] == ["good"]


def test_pipes_links_and_folders_are_skipped_and_do_not_block(tmp_path: Path) -> None:
    told = environ(tmp_path)
    register(entry("good"), told)
    folder = tmp_path / "index" / "alice"
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    (folder / "link.json").symlink_to(next(folder.glob("[0-9a-f]*.json")))
    (tmp_path / "index" / "README").write_text("not a folder")
    assert [one.entry.name for one in shared_entries(told)] == ["good"]


def test_keys_of_a_newer_ndctl_are_ignored() -> None:
    newer = to_bytes(entry()).replace(b'{"v":1', b'{"v":2,"partition":"a100"')
    assert from_bytes(newer).name == "llama"


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = {"XDG_STATE_HOME": str(tmp_path / "file"), env.INDEX: str(tmp_path / "missing")}
    own, shared = register(entry(), told)
    assert own.startswith("the job is not registered: ")
    assert "mkdir -m 1777" in shared
    assert not (tmp_path / "missing").exists()  # a typo creates no folders
    assert "not an absolute path" in register(entry(), {env.INDEX: "index"})[0]
    with pytest.raises(JobError, match="not an absolute path"):
        list(shared_entries({env.INDEX: "index"}))
    assert register(entry(), {}) == ()  # neither a home nor an index


def test_the_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a folder of another user")
    told = environ(tmp_path)
    (tmp_path / "index" / "alice").mkdir()
    os.chown(tmp_path / "index" / "alice", 65534, 65534)
    (warning,) = register(entry(), told)
    assert "belongs to another user" in warning


def test_a_job_is_forgotten(tmp_path: Path) -> None:
    told = environ(tmp_path)
    register(entry(), told)
    register(entry("other"), told)
    forget(Path("/runs/llama"), told)
    assert [one.entry.name for one in own_entries(told)] == ["other"]
    assert [one.entry.name for one in shared_entries(told)] == ["other"]
