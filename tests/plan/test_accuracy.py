"""The planner against published training runs, and the ranges that a plan shows."""

import csv
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.planner_accuracy import (
    Compared,
    broken_limits,
    compare,
    left_out,
    percentile,
    ranges_text,
    report,
)
from benchmarks.published.runs import FOLDER, runs, sources
from orchestrator.contract.mesh import Mesh
from orchestrator.inventory.profiles import CALIBRATIONS
from orchestrator.plan.accuracy import speed_range
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.memory.peak_memory import memory_of
from orchestrator.plan.memory.peak_range import BASIS, SLACKS, TRACED
from tests.plan.cost.setups import H100, fabric, setup

ROOT = Path(__file__).parents[2]


@cache
def compared() -> list[Compared]:
    return compare(runs())


def test_every_source_says_where_it_is_from_and_has_rows() -> None:
    used = {one.source.name for one in runs()}
    kernels = {
        row["source"]
        for path in (FOLDER / "kernels").glob("*.csv")
        for row in csv.DictReader(path.read_text().splitlines())
    }
    assert used | kernels == set(sources())
    assert not [one.name for one in sources().values() if "torchtitan" in one.address]


def test_a_published_run_fills_its_hosts() -> None:
    wrong = [
        (run.source.name, run.model)
        for run in runs()
        if run.setup.mesh.world_size != run.fabric.hosts * run.fabric.devices_per_host
    ]
    assert not wrong


def test_a_published_speed_does_not_exceed_the_peak() -> None:
    """A wrong unit or a wrong number of devices would."""
    for one in compared():
        run = one.run
        mfu = step_time(run.setup, run.fabric).mfu * one.ratio
        assert 0.01 < mfu < 0.75, (run.source.name, run.model, mfu)


def test_speeds_are_within_their_limits() -> None:
    assert list(broken_limits(compared())) == []


def test_the_ranges_that_a_plan_shows_are_those_of_the_published_runs() -> None:
    """If not: `python -m benchmarks.planner_accuracy --write`."""
    assert (CALIBRATIONS / "ranges.toml").read_text() == ranges_text(compared())


def test_the_report_names_each_source_and_each_run() -> None:
    text = report(compared(), rows=True)
    assert all(name in text for name in left_out(compared()))
    assert text.count("| llm_foundry |") == 216 + 2


def test_sources_count_equally_in_a_percentile() -> None:
    many = [one for one in compared() if one.run.source.name == "llm_foundry"]
    few = [one for one in compared() if one.run.source.name == "llama3_paper"]
    # Both runs of the paper are faster than planned, and they are half of the weight.
    assert percentile([*many, *few], 0.75) == percentile(few, 0.5)


def test_a_range_rests_on_comparable_runs_or_says_that_there_are_none() -> None:
    plain = speed_range(setup(), H100.profile.calibration)
    assert "comparable published runs (hopper, data parallelism only" in plain.basis
    assert plain.low < 1 < plain.high
    tp = speed_range(setup(mesh=Mesh(tp=8)), H100.profile.calibration)
    assert "no run like this is published" in tp.basis
    guessed = speed_range(setup(), fabric("l40s-48gb").profile.calibration)
    assert guessed.high - guessed.low > plain.high - plain.low
    assert "guesses" in guessed.basis


def test_a_step_has_the_range_around_its_speed() -> None:
    one = step_time(setup(), H100)
    found = speed_range(setup(), machine_of(H100).calibration)
    assert one.tokens_per_second_per_device_range == pytest.approx(
        (
            one.tokens_per_second_per_device * found.low,
            one.tokens_per_second_per_device * found.high,
        )
    )


def test_the_slack_of_the_allocator_is_the_published_one() -> None:
    rows = csv.DictReader((FOLDER / "kernels" / "allocator.csv").read_text().splitlines())
    slacks = sorted(float(row["reserved_mib"]) / float(row["allocated_mib"]) - 1 for row in rows)
    assert pytest.approx((slacks[4], slacks[-5]), abs=5e-4) == SLACKS


def test_the_range_of_tensors_is_that_of_the_traced_cells() -> None:
    table = (ROOT / "benchmarks" / "results" / "memory.md").read_text()
    cells = re.findall(r"^\|.*\| (\d+) \| (\d+) \| [-+]\d+\.\d% \|", table, re.MULTILINE)
    ratios = sorted(int(traced) / int(planned) for planned, traced in cells)
    assert f"{len(cells)} traced steps" in BASIS
    assert pytest.approx((ratios[len(cells) // 10], ratios[-len(cells) // 10]), abs=2e-3) == TRACED


def test_memory_has_a_range_around_its_peak() -> None:
    memory = memory_of(setup(), H100)
    assert memory.peak_bytes_range is not None
    low, high = memory.peak_bytes_range
    assert 0.95 * memory.peak_bytes < low < memory.peak_bytes < high < 1.08 * memory.peak_bytes
