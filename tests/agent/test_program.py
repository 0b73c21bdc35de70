"""Output and metrics that an agent reads from the logs of the user's own program."""

from pathlib import Path

import pytest

from orchestrator.agent.program import LARGE_BYTES, MOST_BYTES, LogWatch
from orchestrator.contract.spec.run_spec import MetricPatterns

PATTERNS = MetricPatterns(step=r"step (\S+)", loss=r"loss=(\S+)")


def watch(folder: Path, patterns: MetricPatterns | None = PATTERNS) -> LogWatch:
    return LogWatch(folder, patterns)


def printed(folder: Path, rank: int, text: str) -> None:
    with (folder / f"rank-{rank}.log").open("a") as log:
        log.write(text)


def test_ranks_that_print_are_alive(tmp_path: Path) -> None:
    seen = watch(tmp_path, None)
    assert seen.look().grown == ()
    printed(tmp_path, 0, "a\n")
    printed(tmp_path, 3, "b\n")
    assert seen.look().grown == (0, 3)
    printed(tmp_path, 3, "c\n")
    assert seen.look().grown == (3,)
    assert seen.look().grown == ()


def test_the_last_complete_line_of_rank_0_counts(tmp_path: Path) -> None:
    seen = watch(tmp_path)
    printed(tmp_path, 0, "step 1 loss=3.5\nstep 2 loss=2.5\nstep 3 lo")
    printed(tmp_path, 1, "step 9 loss=9\n")
    found = seen.look()
    assert (found.step, found.loss) == (2, 2.5)
    printed(tmp_path, 0, "ss=1e-1\n")
    found = seen.look()
    assert (found.step, found.loss) == (3, 0.1)


def test_a_large_log_is_reported_each_time_it_has_doubled(tmp_path: Path) -> None:
    seen = watch(tmp_path, None)
    found = []
    for gib in (0.5, 1.0, 1.5, 2.5, 3.9, 4.0, 9.0):
        with (tmp_path / "rank-3.log").open("a") as log:
            log.truncate(int(gib * LARGE_BYTES))  # sparse: it needs no disk
        found += [
            (rank, size / LARGE_BYTES, new / LARGE_BYTES) for rank, size, new in seen.look().large
        ]
    assert found == [(3, 1.0, 0.5), (3, 2.5, 1.0), (3, 4.0, pytest.approx(0.1)), (3, 9.0, 5.0)]


@pytest.mark.parametrize("text", ["step nan loss=inf", "step x loss=", "other words", "step 1e999"])
def test_what_is_no_number_is_ignored(tmp_path: Path, text: str) -> None:
    printed(tmp_path, 0, f"{text}\n")
    found = watch(tmp_path).look()
    assert (found.step, found.loss) == (None, None)


def test_of_much_output_the_end_is_read(tmp_path: Path) -> None:
    printed(tmp_path, 0, f"{'x' * (3 * MOST_BYTES)}\nstep 1,200 loss=4\n")
    assert watch(tmp_path).look().step == 1200
