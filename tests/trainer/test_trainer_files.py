"""Appending metrics to a plain file."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.metrics import MetricsFile, StepMetrics

METRICS = StepMetrics(
    attempt=1, step=1, loss=0.1 + 0.2, grad_norm=1.0, lr=1e-3, tokens_per_second=9, step_s=1, time=0
)


def test_a_line_torn_by_a_crash_is_closed_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    for tail in ("", '{"attempt":1,"st'):
        file = MetricsFile(path)
        file.append(METRICS)
        file.close()
        with path.open("a") as torn:
            torn.write(tail)
    MetricsFile(path).append(METRICS)
    lines = path.read_text().splitlines()
    assert lines[2] == '{"attempt":1,"st'
    assert [json.loads(line)["loss"] for line in (lines[0], lines[1], lines[3])] == [0.1 + 0.2] * 3


def test_a_loss_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(replace(METRICS, loss=float("nan")))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None


def test_a_full_disk_costs_metrics_and_not_the_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)
    MetricsFile(Path("/dev/full")).append(METRICS)
    assert "No space left on device" in caplog.text
