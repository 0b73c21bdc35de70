"""Metrics go to several writers. A writer that fails does not stop the others."""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.train_spec import TrainSpec
from orchestrator.dashboard.metrics import parse_metric
from orchestrator.errors import TrainingError
from trainer.measure.metrics import MetricsFile, StepMetrics, to_line
from trainer.measure.report import Report, check_writers, open_report

METRICS = StepMetrics(
    attempt=1, step=7, loss=2.5, grad_norm=1.0, lr=1e-3, tokens_per_second=9, step_s=1, time=3
)


@pytest.fixture(autouse=True)
def _logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)


class FailingWriter:
    """A writer whose second call fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, figures: dict[str, float]) -> None:
        self.calls.append((step, figures))
        if len(self.calls) == 2:
            raise ConnectionError("ignore_progress there")

    def close(self) -> None:
        self.closed = True


def test_a_writer_that_fails_is_dropped_and_the_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fragile, sound = FailingWriter(), FailingWriter()
    sound.calls.append((0, {}))
    sound.calls.append((0, {}))
    report = Report(MetricsFile(tmp_path / "metrics.jsonl"), {"A": fragile, "B": sound})
    for _ in range(3):
        report.write(METRICS)
    report.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert (len(fragile.calls), len(sound.calls)) == (2, 5)
    assert (fragile.closed, sound.closed) == (False, True)
    assert caplog.text.count("stopped writing metrics to A: ignore_progress there") == 1


def test_writers_get_only_available_figures(tmp_path: Path) -> None:
    writer = FailingWriter()
    Report(MetricsFile(tmp_path / "metrics.jsonl"), {"A": writer}).write(METRICS)
    [(step, figures)] = writer.calls
    assert step == 7
    assert figures["loss"] == 2.5
    assert not {"step", "time", "mfu", "eval_loss"} & figures.keys()


def test_a_missing_package_is_reported_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    train = TrainSpec(steps=1, global_batch_size=1, tensorboard=True, wandb="project")
    check_writers(train)
    here = importlib.util.find_spec
    for package in ("tensorboard", "wandb"):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, gone=package: None if name == gone else here(name),
        )
        with pytest.raises(TrainingError, match=f"train.{package} is set") as caught:
            check_writers(train)
        assert caught.value.fix.startswith(f"pip install 'ndctl[{package}]'")
    check_writers(TrainSpec(steps=1, global_batch_size=1))


def test_a_writer_that_cannot_start_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file where a folder should be")
    train = TrainSpec(steps=1, global_batch_size=1, tensorboard=True)
    report = open_report(RunDir(tmp_path), train, done=0)
    report.write(METRICS)
    assert "failed to start TensorBoard, which gets no metrics" in caplog.text
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 7


def test_the_dashboard_reads_what_the_trainer_writes() -> None:
    values: dict[str, Any] = {"eval_loss": 2.25, "eval_s": 1.0, "mfu": 0.5, "skipped": 2}
    metric = parse_metric(to_line(StepMetrics(**{**METRICS.to_dict(), **values})))
    assert metric is not None
    assert (metric.step, metric.loss, metric.tokens_per_second) == (7, 2.5, 9)
