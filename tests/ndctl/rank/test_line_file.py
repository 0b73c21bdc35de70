"""Appending metrics to a plain file."""

import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ndctl.rank.fence import GivenUp
from trainer.measure.metrics import MetricsFile, StepMetrics

METRICS = StepMetrics(
    attempt=1, step=1, loss=0.1 + 0.2, grad_norm=1.0, lr=1e-3, tokens_per_second=9, step_s=1, time=0
)


@pytest.mark.parametrize("torn", ["", '{"attempt":1,"st', "\0" * 9])
def test_a_partial_line_left_by_a_crash_is_removed_before_the_next(
    tmp_path: Path, torn: str
) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    for step in (1, 2):
        file = MetricsFile(path)
        file.append(replace(METRICS, step=step))
        file.close()
        with path.open("a") as crashing:
            crashing.write(torn)
    MetricsFile(path).append(replace(METRICS, step=3))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_fenced_attempt_does_not_truncate_lines_of_a_later_attempt(tmp_path: Path) -> None:
    def refuse() -> None:
        raise GivenUp("attempt 2 has begun")

    path = tmp_path / "metrics.jsonl"
    path.write_text("half a li")
    with pytest.raises(GivenUp):
        MetricsFile(path, refuse).append(METRICS)
    assert path.read_text() == "half a li"


def test_a_loss_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(replace(METRICS, loss=float("nan")))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None


def test_a_line_cut_off_by_a_full_disk_is_completed_once_space_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [10, 0, 0]
    write = os.write

    def on_a_small_disk(fd: int, data: bytes) -> int:
        if not room:
            return write(fd, data)
        if not (fits := room.pop(0)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:fits])

    file = MetricsFile(tmp_path / "metrics.jsonl")
    monkeypatch.setattr("ndctl.rank.line_file.os.write", on_a_small_disk)
    for step in (1, 2):
        file.append(replace(METRICS, step=step))
    assert len((tmp_path / "metrics.jsonl").read_bytes()) == 10
    file.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_lines_kept_for_a_full_disk_are_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)
    monkeypatch.setattr("ndctl.rank.line_file.MAX_WAITING_BYTES", 10)
    file = MetricsFile(Path("/dev/full"))
    for _ in range(3):
        file.append(METRICS)
    assert caplog.text.count("dropped a line of") == 2


def test_a_full_disk_loses_metrics_but_training_continues(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)
    MetricsFile(Path("/dev/full")).append(METRICS)
    assert "No space left on device" in caplog.text
