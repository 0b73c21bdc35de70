"""Under plain torchrun a second job cannot write into the folder of a running one."""

import errno
import fcntl
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import TrainingError
from orchestrator.posix.locks import is_free
from tests.agent.world import is_gone, wait_for
from tests.nfs_locks import byte_ranges
from tests.trainer.launch.tiny_runs import (
    LIMIT_S,
    RankProcess,
    finish,
    metrics_of,
    start_torchrun,
    tiny,
    train,
)
from trainer.rank.fence import lock_file

PROGRAM = """
import runpy, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
runpy.run_module("trainer", run_name="__main__", alter_sys=True)
"""
"""The trainer in ranks that torchrun forks. Unlike those that it starts as programs, torch has them
interrupted when torchrun ends. They must end without that."""


@pytest.mark.parametrize("on_nfs", [False, True])
def test_the_second_holder_is_told_who_the_first_is(
    on_nfs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_nfs:
        monkeypatch.setattr(fcntl, "flock", byte_ranges.flock)
    lock = tmp_path / "out" / "trainer.lock"
    first = lock_file(lock)
    with pytest.raises(
        TrainingError, match=f"process {os.getpid()} on {os.uname().nodename}"
    ) as it:
        lock_file(lock)
    assert it.value.message.startswith(f"another job trains in out={lock.parent}")
    assert "set out to another folder" in it.value.fix
    os.close(first)
    os.close(lock_file(lock))


def test_a_holder_that_has_not_written_its_name_yet_still_counts(tmp_path: Path) -> None:
    lock = tmp_path / "trainer.lock"
    first = lock_file(lock)
    lock.write_text("")
    with pytest.raises(TrainingError, match="another process holds"):
        lock_file(lock)
    os.close(first)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="failed to write to out="):
        lock_file(tmp_path / "file" / "trainer.lock")


def test_a_file_system_without_flock_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(fd: int, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    os.close(lock_file(tmp_path / "trainer.lock"))
    assert "a second job with the same out is not noticed" in caplog.text


@pytest.mark.process
def test_under_ndctl_the_fence_is_the_only_safeguard(tmp_path: Path) -> None:
    lock = lock_file(tmp_path / "out" / "trainer.lock")
    config = tiny(tmp_path / "out", steps=1)
    (refused,) = ranks = train(config, 1)
    assert finish(ranks) == [TrainingError.exit_code]
    assert "another job trains in out=" in refused.output
    fence = tmp_path / "out" / "fence.json"
    fence.write_text(json.dumps({"leader": "a", "attempt": 1}))
    assert finish(train(config, 1, NDCTL_HEARTBEAT_SOCKET=str(tmp_path / "none"))) == [0]
    os.close(lock)


@pytest.mark.process
def test_ranks_end_with_a_torchrun_that_was_killed_and_free_the_lock(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = tiny(out, steps=1_000_000, checkpoint={"every_steps": 1_000_000})
    with torchrun(tmp_path / "first.json", config) as job:
        wait_for(lambda: (out / "metrics.jsonl").exists() and metrics_of(out), "the first step")
        holder = json.loads((out / "trainer.lock").read_text())
        assert job.process.pid is not None
        ranks = children(job.process.pid)
        assert holder["pid"] in ranks
        assert len(ranks) == 2
        for rank in ranks:
            os.kill(
                rank, signal.SIGSTOP
            )  # a stopped process holds its lock, and needs no processor
        with torchrun(tmp_path / "second.json", config, "--nproc-per-node=1") as second:
            assert second.wait(LIMIT_S) != 0
        assert f"another job trains in out={out}: process {holder['pid']} on" in second.output
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        assert not any(map(is_gone, ranks))
        job.kill(signal.SIGKILL)
        wait_for(lambda: all(map(is_gone, ranks)), "the ranks to end")
    # A killed process is a zombie before all of its threads have let go of the lock.
    wait_for(lambda: is_free(out / "trainer.lock"), "the lock to be free")


@contextmanager
def torchrun(path: Path, config: dict[str, Any], *options: str) -> Iterator[RankProcess]:
    path.write_text(json.dumps(config))
    program = path.with_suffix(".py")
    program.write_text(PROGRAM)
    job = start_torchrun(program, path, *options)
    try:
        yield job
    finally:
        job.process.kill()  # its ranks end with it
        job.process.join()


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
