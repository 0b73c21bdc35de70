"""Which steps of a job count as steady, from the lines that the trainer writes."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.dashboard.measured.steady import LINES, WARM_UP, attempts_of_plan, read_steady
from orchestrator.job.plans import JobPlan
from tests.job.job_driver import Job
from trainer.measure.metrics import StepMetrics, to_line


def line(step: int, step_s: float = 1.0, attempt: int = 1, **more: float | None) -> StepMetrics:
    return StepMetrics(
        attempt=attempt,
        step=step,
        loss=2.0,
        grad_norm=1.0,
        lr=1e-4,
        tokens_per_second=100.0,
        step_s=step_s,
        time=1000.0 + step,
        **more,  # type: ignore[arg-type]
    )


def written(folder: Path, lines: Iterable[StepMetrics]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(map(to_line, lines)))
    return path


def test_the_first_steps_of_each_attempt_and_steps_after_a_save_do_not_count(
    tmp_path: Path,
) -> None:
    first = [line(n, step_s=60.0 if n <= WARM_UP else 1.0) for n in range(1, 21)]
    first[10] = line(11, step_s=9.0, checkpoint_s=0.5)
    second = [line(n, step_s=60.0 if n <= 15 else 2.0, attempt=2) for n in range(11, 31)]
    path = written(tmp_path, [*first, *second])
    found = read_steady(path, None)
    assert found is not None
    assert found.steps == 14 + 15
    assert found.step_s_range == (1.0, 2.0)
    assert found.step_s == 2.0


def test_only_attempts_of_the_present_plan_count(tmp_path: Path) -> None:
    lines = [line(n) for n in range(1, 41)] + [line(n, 3.0, attempt=2) for n in range(21, 41)]
    path = written(tmp_path, lines)
    found = read_steady(path, (2,))
    assert found is not None
    assert (found.steps, found.step_s) == (15, 3.0)


def test_a_file_of_weeks_is_read_from_its_end_without_a_second_warm_up(tmp_path: Path) -> None:
    path = written(tmp_path, [line(n) for n in range(1, 3 * LINES)])
    found = read_steady(path, None)
    assert found is not None
    assert found.steps == LINES


def test_too_few_steps_torn_lines_and_foreign_text_give_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, [line(n) for n in range(1, WARM_UP + 5)])
    assert read_steady(path, None) is None
    assert read_steady(tmp_path / "absent.jsonl", None) is None
    with path.open("ab") as file:
        file.write(b'{"attempt": 1, "step": 10, "step_s": "x"}\n\xff\xfe\n[1]\n{"attempt": 1')
    assert read_steady(path, None) is None


def test_memory_is_that_of_the_fullest_rank_in_any_attempt(tmp_path: Path) -> None:
    lines = [line(n, fullest_memory_bytes=900, fullest_rank=3) for n in range(1, 21)]
    lines += [line(n, attempt=2, fullest_memory_bytes=500, fullest_rank=1) for n in range(11, 31)]
    found = read_steady(written(tmp_path, lines), None)
    assert found is not None
    assert (found.memory_bytes, found.memory_rank) == (900, 3)


def test_waiting_for_data_is_a_share_of_a_step(tmp_path: Path) -> None:
    path = written(tmp_path, [line(n, step_s=2.0, data_s=0.5) for n in range(1, 21)])
    found = read_steady(path, None)
    assert found is not None
    assert found.data_share == pytest.approx(0.25)


def test_after_a_new_plan_or_a_resumed_submission_only_the_present_attempt_counts() -> None:
    run = Job().running().run
    assert attempts_of_plan(run) is None
    assert run.job is not None
    resumed = replace(run, job=replace(run.job, resume=True))
    smaller = JobPlan(plan=run.plan, number=2)
    replanned = replace(run, plans=replace(run.plans, replanned=smaller))
    grown = replace(run, plans=replace(run.plans, grown_at=5.0))
    for other in (resumed, replanned, grown):
        assert attempts_of_plan(other) == (run.attempt.number,)
