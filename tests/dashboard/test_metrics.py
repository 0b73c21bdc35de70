from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.dashboard import metrics as module
from orchestrator.dashboard.metrics import (
    MAX_POINTS,
    NO_PROGRESS,
    MetricTail,
    fold_metrics,
    lines_backwards,
    parse_metric,
    read_ends,
)
from tests.dashboard.dashboard_story import metric, metrics
from trainer.measure.metrics import StepMetrics, to_line


def line(step: int, attempt: int = 1, loss: float = 2.5) -> bytes:
    return to_line(
        StepMetrics(
            attempt=attempt,
            step=step,
            loss=loss,
            grad_norm=1.0,
            lr=1e-4,
            tokens_per_second=100.0,
            step_s=0.5,
            time=1000.0 + step,
        )
    )


def test_lines_of_the_trainer_are_read() -> None:
    found = parse_metric(line(7, attempt=2, loss=1 / 3))
    assert found is not None
    assert (found.attempt, found.step, found.loss, found.time) == (2, 7, 1 / 3, 1007.0)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_read_as_none(loss: float) -> None:
    found = parse_metric(line(7, loss=loss))
    assert found is not None
    assert found.loss is None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"null", b'{"step": 1}', b'{"step": []}'])
def test_a_line_that_is_not_a_metric_is_ignored(text: bytes) -> None:
    assert parse_metric(text) is None


def test_an_incomplete_last_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricTail(path)
    assert tail.more() == ()
    path.write_bytes(line(1) + line(2)[:20])
    assert [m.step for m in tail.more()] == [1]
    last = read_ends(path).last
    assert last is not None
    assert last.step == 1
    path.write_bytes(line(1) + line(2))
    assert [m.step for m in tail.more()] == [2]
    assert tail.more() == ()


def test_a_line_truncated_by_a_crash_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2)[:20] + b"\n")
    last = read_ends(path).last
    assert last is not None
    assert last.step == 1


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("text", [b"", b"\n", b"ab", b"ab\n", b"ab\n\ncde\nf", b"a\nb\nc\n"])
def test_lines_are_read_backwards_with_any_chunk_size(
    tmp_path: Path, text: bytes, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    path = tmp_path / "lines"
    path.write_bytes(text)
    assert list(lines_backwards(path)) == text.split(b"\n")[-2::-1]


def test_without_a_file_there_are_no_metrics(tmp_path: Path) -> None:
    assert read_ends(tmp_path / "none") == NO_PROGRESS


def test_a_quick_read_returns_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step) for step in range(1, 2001)))
    progress = read_ends(path)
    assert progress.first is not None
    assert progress.last is not None
    assert (progress.first.step, progress.last.step, progress.step_s) == (1, 2000, 1.0)


def test_the_later_line_of_a_repeated_step_is_used() -> None:
    again = metric(21, attempt=2)
    progress = fold_metrics(NO_PROGRESS, [*metrics(1, 24), again])
    assert progress.points[-1] == (21, again.loss)
    assert [step for step, _ in progress.points] == list(range(1, 22))


def test_the_step_time_is_that_of_the_current_attempt() -> None:
    before = fold_metrics(NO_PROGRESS, metrics(1, 24))
    assert before.step_s == pytest.approx(0.8)
    after = fold_metrics(before, [metric(21, 2, 5000.0), metric(22, 2, 5003.0)])
    assert after.step_s == pytest.approx(3.0)


def test_the_rate_is_measured_over_the_same_steps_as_the_step_time() -> None:
    """The last step was three times as fast as the usual one; each has 900 tokens."""
    usual = [replace(one, tokens_per_second=1_500.0, step_s=0.6) for one in metrics(1, 9)]
    fast = replace(metric(10), tokens_per_second=4_500.0, step_s=0.2)
    progress = fold_metrics(NO_PROGRESS, [*usual, fast])
    assert progress.step_s == pytest.approx(0.8)  # with the time between the steps
    assert progress.tokens_per_second == pytest.approx(900 / 0.8)
    alone = fold_metrics(NO_PROGRESS, [replace(fast, step_s=None)])
    assert alone.tokens_per_second == 4_500.0


def test_a_long_series_stays_bounded_and_keeps_its_end() -> None:
    progress = fold_metrics(NO_PROGRESS, metrics(1, 20_000))
    assert len(progress.points) <= MAX_POINTS
    assert progress.points[-1][0] == 20_000
    steps = [step for step, _ in progress.points]
    assert steps == sorted(set(steps))


def test_folding_in_parts_gives_the_same_as_folding_at_once() -> None:
    lines = metrics(1, 1500)
    at_once = fold_metrics(NO_PROGRESS, lines)
    parts = NO_PROGRESS
    for start in range(0, len(lines), 7):
        parts = fold_metrics(parts, lines[start : start + 7])
    assert parts == at_once
