"""The thread that writes what rank 0 records of each step."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ndctl.rank.fence import Admit, GivenUp, admit_all
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.fence import Fence, write_fence
from orchestrator.contract.files.run_dir import RunDir
from tests.ndctl.rank.test_line_file import METRICS
from tests.trainer.data.test_ledger import check, read, start
from trainer.data.ledger import SampleLedger
from trainer.measure.metrics import MetricsFile
from trainer.measure.records import Records, StepRecord
from trainer.measure.report import Report
from trainer.rank.fence import admit_of

WRITE = os.write


class Storage:
    """`os.write` of a file system that can be told to hang, or to be full."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.full = False
        self.writes = 0

    def write(self, fd: int, data: bytes) -> int:
        self.writes += 1
        self.answers.wait()
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return WRITE(fd, data)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    storage = Storage()
    monkeypatch.setattr("ndctl.rank.line_file.os.write", storage.write)
    yield storage
    storage.answers.set()


def opened(
    folder: Path, admit: Admit = admit_all, room: int = 8, say: Callable[[int], None] = print
) -> Records:
    ledger = SampleLedger(folder / "samples.jsonl", start(), admit)
    report = Report(MetricsFile(folder / "metrics.jsonl", admit), {})
    return Records(
        ledger, report, peak_memory_bytes=lambda: 77, log=lambda it: say(it.step), room=room
    )


def record(step: int) -> StepRecord:
    return StepRecord(metrics=replace(METRICS, step=step), read=read(step))


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().split()]


def test_training_does_not_wait_for_storage_and_no_line_is_lost(
    tmp_path: Path, storage: Storage
) -> None:
    storage.answers.clear()
    with opened(tmp_path, room=100) as records:
        for step in range(1, 51):
            records.add(record(step))
        assert steps_in(tmp_path) == []
        storage.answers.set()
    assert steps_in(tmp_path) == [*range(1, 51)]
    assert check(tmp_path / "samples.jsonl", saved=50) is None
    # Lines that have waited are written together, after one look at the fence.
    assert storage.writes < 10
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["peak_memory_bytes"] == 77


def test_the_log_has_each_step_in_order(tmp_path: Path) -> None:
    said: list[int] = []
    with opened(tmp_path, say=said.append) as records:
        for step in range(1, 31):
            records.add(record(step))
    assert said == [*range(1, 31)]


def test_if_storage_hangs_too_long_training_waits_instead_of_dropping_lines(
    tmp_path: Path, storage: Storage
) -> None:
    storage.answers.clear()
    with opened(tmp_path, room=4) as records:
        records.add(record(1))
        while storage.writes == 0:
            time.sleep(0.001)
        for step in range(2, 6):
            records.add(record(step))
        assert records.full
        waiting = threading.Thread(target=records.add, args=(record(6),))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        storage.answers.set()
        waiting.join()
    assert steps_in(tmp_path) == [*range(1, 7)]


def test_a_sync_returns_when_the_lines_before_it_are_written(
    tmp_path: Path, storage: Storage
) -> None:
    storage.answers.clear()
    with opened(tmp_path) as records:
        records.add(record(1))
        records.add(record(2))
        committing = threading.Thread(target=records.sync)
        committing.start()
        committing.join(0.05)
        assert committing.is_alive()
        storage.answers.set()
        committing.join()
        assert check(tmp_path / "samples.jsonl", saved=2) is None


def test_a_sync_writes_lines_that_a_full_disk_has_kept_waiting(
    tmp_path: Path, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.full = True
    with opened(tmp_path) as records:
        records.add(record(1))
        records.flush()
        assert "No space left on device" in caplog.text
        storage.full = False
        records.sync()
        assert check(tmp_path / "samples.jsonl", saved=1) is None
    assert steps_in(tmp_path) == [1]


def test_a_failure_after_a_write_ends_the_rank_instead_of_hanging_it(
    tmp_path: Path, storage: Storage
) -> None:
    def fail() -> None:
        raise RuntimeError("the slot is gone")

    storage.answers.clear()
    records = opened(tmp_path)
    records.add(record(1))
    records.written(fail)
    storage.answers.set()
    records._thread.join()
    with pytest.raises(RuntimeError, match="the slot is gone"):
        records.add(record(2))
    with pytest.raises(RuntimeError, match="the slot is gone"):
        records.close()


def test_a_superseded_rank_writes_nothing_and_ends_at_its_next_step(
    tmp_path: Path, storage: Storage
) -> None:
    run = RunDir(tmp_path)
    write_fence(run.fence, Fence(leader="a", attempt=1))
    admit = admit_of(run, RankEnv(attempt=1, heartbeat_socket="/tmp/ranks.sock"))
    records = opened(tmp_path, admit)
    records.add(record(1))
    records.flush()
    # A later attempt starts while lines of this one are waiting.
    write_fence(run.fence, Fence(leader="b", attempt=2))
    records.add(record(2))
    with pytest.raises(GivenUp, match="attempt 1 was given up"):
        records.sync()  # so no checkpoint of this attempt becomes complete either
    with pytest.raises(GivenUp):
        records.add(record(3))
    with pytest.raises(GivenUp):
        records.close()
    assert steps_in(tmp_path) == [1]


def test_a_rank_that_fails_writes_its_last_lines(tmp_path: Path, storage: Storage) -> None:
    storage.answers.clear()
    threading.Timer(0.05, storage.answers.set).start()
    fail(opened(tmp_path))
    assert steps_in(tmp_path) == [1]


def fail(records: Records) -> None:
    """Add a record, and fail."""

    def train() -> None:
        with records:
            records.add(record(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def test_a_rank_that_fails_does_not_wait_for_storage_for_ever(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.measure.records.LAST_WORDS_S", 0.05)
    storage.answers.clear()
    fail(opened(tmp_path))
    assert steps_in(tmp_path) == []
