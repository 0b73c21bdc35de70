"""The planner against published training runs, and the ranges that a plan shows."""

import csv
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.planner_accuracy import LIMITS, TABLES, broken_limits, report
from benchmarks.published.compared import Compared, compare
from benchmarks.published.ranges import INSIDE, groups_of, left_out, ranges_of, ranges_text
from benchmarks.published.runs import FOLDER, all_runs, runs, sources
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.inventory.profiles import CALIBRATIONS
from orchestrator.plan.accuracy import speed_range
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.memory.peak_memory import memory_of
from orchestrator.plan.memory.peak_range import BASIS, CONTEXTS, SLACKS, TRACED, fits_share
from orchestrator.plan.memory.reserve import CONTEXT_BYTES
from orchestrator.plan.model.flops import flops_per_token
from tests.plan.cost.setups import H100, fabric, setup
from tests.plan.cost.test_experts import MIXTRAL

ROOT = Path(__file__).parents[2]


@cache
def compared() -> list[Compared]:
    return compare(runs())


def test_every_source_says_where_it_is_from_and_has_rows() -> None:
    used = {one.source.name for one in all_runs()}
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
        for run in all_runs()
        if run.setup.mesh.world_size != run.fabric.hosts * run.fabric.devices_per_host
    ]
    assert not wrong


def test_a_published_speed_does_not_exceed_the_peak() -> None:
    """A wrong unit or a wrong number of devices would."""
    for one in compare(all_runs()):
        run = one.run
        flops = run.fabric.profile.flops
        peak = flops["float8"] / flops["bfloat16"] if run.setup.float8 else 1
        # The causal mask takes half of all pairs away.
        shape, tokens = run.setup.shape, run.setup.tokens
        masked = flops_per_token(shape, tokens // 2) / flops_per_token(shape, tokens)
        mfu = step_time(run.setup, run.fabric).mfu * masked * one.ratio / peak
        assert 0.01 < mfu < 0.75, (run.source.name, run.model, mfu)


def test_superseded_software_has_runs_of_a_later_version() -> None:
    replaced = [one for one in sources().values() if one.superseded_by]
    assert replaced
    for one in replaced:
        later = sources()[str(one.superseded_by)]
        assert later.date > one.date
        assert later.name in {run.source.name for run in runs()}


def test_speeds_are_within_their_limits() -> None:
    assert list(broken_limits(compared())) == []


def test_the_ranges_that_a_plan_shows_are_those_of_the_published_runs() -> None:
    """If not: `python -m benchmarks.planner_accuracy --write`."""
    assert (CALIBRATIONS / "ranges.toml").read_text() == ranges_text(compared())


def test_the_report_names_each_source_and_each_run() -> None:
    text = report(compared(), rows=True)
    assert all(name in text for name in left_out(compared()))
    assert text.count("| llm_foundry |") == 216 + 2


def test_every_limit_is_that_of_a_group() -> None:
    groups = {key(one) for key in TABLES.values() for one in compared()}
    assert set(LIMITS) <= groups


def test_published_speeds_of_a_source_are_inside_ranges_that_never_saw_it() -> None:
    inside = left_out(compared())
    runs_inside = [one for source in inside.values() for one in source]
    by_source = [sum(source) / len(source) for source in inside.values()]
    assert sum(runs_inside) / len(runs_inside) >= INSIDE
    assert sum(by_source) / len(by_source) >= 0.85


def test_sources_count_equally_in_a_range() -> None:
    many = [one for one in compared() if one.source == "llm_foundry"]
    few = [one for one in compared() if one.source == "llama3_paper"]
    # The paper's runs are faster than planned. One of three sources has them, one of two alone.
    center = groups_of([*many, *few])["any", "any", 0].center
    own = groups_of(few)["any", "any", 0].center
    assert center == pytest.approx(2 / 3 * own, abs=0.02)


def test_a_range_is_wider_if_it_has_a_source_that_differs() -> None:
    alike = [one for one in compared() if one.source in ("llm_foundry", "fms_fsdp", "tinyllama")]
    mixed = [one for one in compared() if one.source in ("llm_foundry", "fms_fsdp", "internevo")]
    last, wide = ranges_of(alike)[-1], ranges_of(mixed)[-1]
    assert wide.high / wide.low > last.high / last.low


def test_a_range_rests_on_comparable_runs_or_says_that_there_are_none() -> None:
    plain = speed_range(setup(), H100.profile.calibration)
    assert "comparable published runs (hopper, data parallelism only" in plain.basis
    assert plain.low < 1 < plain.high
    cp = speed_range(setup(mesh=Mesh(cp=8)), H100.profile.calibration)
    assert "no run like this is published" in cp.basis
    guessed = speed_range(setup(), fabric("l40s-48gb").profile.calibration)
    assert guessed.high - guessed.low > plain.high - plain.low
    assert "guesses" in guessed.basis


def test_models_with_experts_or_adapters_are_not_called_comparable() -> None:
    calibration = H100.profile.calibration
    plain = speed_range(setup(), calibration)
    experts = speed_range(setup(shape=MIXTRAL), calibration)
    adapters = speed_range(setup(lora=LoraSpec()), calibration)
    assert "no run of a model with experts is published" in experts.basis
    assert "no run with adapters is published" in adapters.basis
    widths = [one.high - one.low for one in (plain, adapters, experts)]
    assert widths == sorted(widths)


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
    assert pytest.approx((slacks[5], slacks[-5]), abs=5e-4) == SLACKS


def test_the_likelihood_to_fit_is_that_of_the_published_allocators() -> None:
    rows = csv.DictReader((FOLDER / "kernels" / "allocator.csv").read_text().splitlines())
    slacks = [float(row["reserved_mib"]) / float(row["allocated_mib"]) - 1 for row in rows]
    reserve = {"communication": 0, "context": CONTEXT_BYTES, "slack": 1}
    device = H100.profile.memory_bytes
    context = sum(CONTEXTS) / 2
    for room in (0.01, 0.024, 0.035, 0.05, 0.07, 0.1):
        tensors = int((device - context) / (1 + room))
        share = sum(slack <= room for slack in slacks) / len(slacks)
        assert fits_share(tensors, reserve, device) == pytest.approx(share, abs=0.06)


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
