"""Committing and removing checkpoints, and appending metrics, on plain files."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.contract.checkpoints import MARKER, newest_complete, partial_name
from trainer.checkpoint.commit import commit, remove_old
from trainer.metrics import MetricsFile, StepMetrics

METRICS = StepMetrics(
    attempt=1, step=1, loss=0.1 + 0.2, grad_norm=1.0, lr=1e-3, tokens_per_second=9, step_s=1, time=0
)


def save(checkpoints: Path, step: int, text: str = "shard", attempt: int = 1) -> None:
    partial = checkpoints / partial_name(step, attempt)
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_text(text)
    commit(partial, step=step, attempt=attempt, world_size=1)


def names(checkpoints: Path) -> set[str]:
    return {path.name for path in checkpoints.iterdir()}


def test_a_committed_checkpoint_is_complete(tmp_path: Path) -> None:
    save(tmp_path, 5)
    assert newest_complete(tmp_path) == (tmp_path / "step-5", ())
    marker = json.loads((tmp_path / "step-5" / MARKER).read_text())
    assert marker == {"step": 5, "attempt": 1, "world_size": 1, "files": {"__0_0.distcp": 5}}


def test_a_torn_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "__7_0.distcp").write_text("torn")
    save(tmp_path, 5)
    assert newest_complete(tmp_path)[0] == tmp_path / "step-5"
    assert not (tmp_path / "step-5" / "__7_0.distcp").exists()


def test_the_newest_complete_ones_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "step-15").mkdir()
    (tmp_path / "step-40").mkdir()
    (tmp_path / partial_name(35, 1)).mkdir()
    (tmp_path / "notes").mkdir()
    remove_old(tmp_path, keep=2)
    assert names(tmp_path) == {"step-20", "step-30", "step-40", "notes"}


def test_nothing_complete_means_nothing_is_removed_but_leftovers(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    remove_old(tmp_path, keep=1)
    assert names(tmp_path) == {"step-3"}


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
