"""The planner against published training runs, and the ranges that a plan shows."""

import csv
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import get_args

import pytest

from benchmarks.planner_accuracy import LIMITS, TABLES, broken_limits, report
from benchmarks.published.compared import Compared, compare
from benchmarks.published.methods import added_s
from benchmarks.published.ranges import (
    INSIDE,
    Judged,
    left_out,
    ranges_of,
    ranges_text,
    spreads_of,
    support_of,
    weight,
)
from benchmarks.published.runs import FOLDER, all_runs, runs, runs_with_adapters, sources
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.inventory.profiles import CALIBRATIONS
from orchestrator.plan.accuracy import Group, speed_range
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.memory.peak_memory import memory_of
from orchestrator.plan.memory.peak_range import (
    BASIS,
    CONTEXTS,
    SLACK_DECILES,
    SLACKS,
    TRACED,
    fits_share,
)
from orchestrator.plan.memory.reserve import CONTEXT_BYTES
from orchestrator.plan.model.flops import flops_per_token
from tests.plan.cost.setups import H100, fabric, setup
from tests.plan.cost.test_experts import MIXTRAL

ROOT = Path(__file__).parents[2]


@cache
def compared() -> list[Compared]:
    return compare(runs())


@cache
def adapters() -> list[Compared]:
    return compare(runs_with_adapters())


@cache
def judged() -> dict[str, list[Judged]]:
    return left_out(compared())


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


def test_adapters_are_planned_well_where_the_constants_are_not_guesses() -> None:
    """And on MI300X, whose constants are guesses, by what they were before any run was compared."""
    errors = {
        name: [one.error for one in adapters() if one.run.profile == name]
        for name in ("h100-sxm-80gb", "h200-sxm-141gb", "mi300x-192gb")
    }
    assert {name: len(own) for name, own in errors.items()} == {
        "h100-sxm-80gb": 10,
        "h200-sxm-141gb": 7,
        "mi300x-192gb": 11,
    }
    medians = {name: median(map(abs, own)) for name, own in errors.items()}
    assert all(error < 0.06 for error in medians.values()), medians


def test_the_ranges_that_a_plan_shows_are_those_of_the_published_runs() -> None:
    """If not: `python -m benchmarks.planner_accuracy --write`."""
    assert (CALIBRATIONS / "ranges.toml").read_text() == ranges_text(compared(), adapters())


def test_the_report_names_each_source_and_each_run() -> None:
    text = report(compared(), rows=True)
    assert all(name in text for name in judged())
    assert text.count("| llm_foundry |") == 216 + 2


def test_every_limit_is_that_of_a_group() -> None:
    groups = {key(one) for key in TABLES.values() for one in compared()}
    assert set(LIMITS) <= groups


def test_published_speeds_of_a_source_are_inside_ranges_that_never_saw_it() -> None:
    by_source = judged()
    every = [one for own in by_source.values() for one in own]

    def inside(group: Sequence[Judged]) -> float:
        return sum(one.is_inside for one in group) / len(group)

    assert inside(every) >= INSIDE
    # Eight sources have one to three runs, so a single run outside counts much.
    assert sum(inside(own) for own in by_source.values()) / len(by_source) >= 0.85
    # A range that says nothing would have all of them.
    assert math.exp(sum(one.width for one in every) / len(every)) <= 1.49
    for profile in {one.one.run.profile for one in every}:
        assert inside([one for one in every if one.one.run.profile == profile]) >= INSIDE, profile


def test_a_range_is_wider_on_a_device_that_few_sources_have() -> None:
    found = support_of(compared())
    known, few, none = (
        found.widening(profile, "hopper")
        for profile in ("h100-sxm-80gb", "h200-sxm-141gb", "h100-sxm-96gb-500w")
    )
    assert 1 < known < few < none < found.widening("mine", "unknown")
    plain, far = (
        speed_range(setup(), fabric(name).profile.calibration, hosts=1)
        for name in ("h100-sxm-80gb", "h100-sxm-96gb-500w")
    )
    assert far.low < plain.low < plain.high < far.high
    assert "1.8 times as wide because few are on this device" in far.basis
    assert "wide" not in plain.basis


def test_a_source_of_many_runs_counts_more_in_a_range_but_not_as_often() -> None:
    many = [one for one in compared() if one.source == "hagemann"]
    few = [one for one in compared() if one.source == "llama3_paper"]
    group: Group = "several hosts with tp, cp or pp"
    many = [one for one in many if one.group == group]
    # The paper's runs are faster than planned, the others slower. One run more has no error.
    means = [sum(math.log(one.ratio) for one in own) / len(own) for own in (many, few)]
    weights = [weight(len(own)) for own in (many, few)]
    center = spreads_of([*many, *few])[group].center
    expected = sum(w * m for w, m in zip(weights, means, strict=True)) / (sum(weights) + 1)
    assert center == pytest.approx(expected)
    assert 1 < weight(len(many)) / weight(len(few)) < len(many) / len(few)


def test_a_range_is_wider_if_it_has_a_source_that_differs() -> None:
    alike = [one for one in compared() if one.source in ("llm_foundry", "fms_fsdp", "tinyllama")]
    mixed = [one for one in compared() if one.source in ("llm_foundry", "fms_fsdp", "internevo")]
    group: Group = "several hosts with data parallelism only"
    wide, narrow = (spreads_of(one)[group].spread for one in (mixed, alike))
    assert wide > narrow


def test_every_plan_has_a_range_and_it_rests_on_several_sources() -> None:
    found = {one.group: one for one in ranges_of(compared())}
    assert set(found) == set(get_args(Group))
    for one in found.values():
        low, high = one.limits(widening=1)
        assert one.sources >= 5
        assert low < 1 < high


def test_a_range_rests_on_comparable_runs_or_says_that_there_are_none() -> None:
    plain = speed_range(setup(), H100.profile.calibration, hosts=1)
    assert "comparable published runs (hopper, data parallelism only, up to" in plain.basis
    assert "published runs on one host" in plain.basis
    assert plain.low < 1 < plain.high
    cp = speed_range(setup(mesh=Mesh(cp=8)), H100.profile.calibration, hosts=1)
    assert "no run like this is published; range of" in cp.basis
    far = speed_range(setup(mesh=Mesh(dp_shard=16, tp=4)), H100.profile.calibration, hosts=8)
    assert "on several hosts with tp, cp or pp" in far.basis
    guessed = speed_range(setup(), fabric("l40s-48gb").profile.calibration, hosts=1)
    assert guessed.high - guessed.low > plain.high - plain.low
    assert "guesses" in guessed.basis


def test_models_with_experts_or_adapters_are_not_called_comparable() -> None:
    calibration = H100.profile.calibration
    plain = speed_range(setup(), calibration, hosts=1)
    experts = speed_range(setup(shape=MIXTRAL), calibration, hosts=1)
    adapters = speed_range(setup(lora=LoraSpec()), calibration, hosts=1)
    assert "no run of a model with experts is published" in experts.basis
    assert "17 runs with adapters are published, all of Llama 2 70B" in adapters.basis
    widths = [one.high - one.low for one in (plain, adapters, experts)]
    assert widths == sorted(widths)


def test_host_work_of_a_source_is_counted_only_where_it_cuts_tensors_for_ranks() -> None:
    """nanotron's ZeRO-1 starts operations for each tensor and rank; its DDP does not."""
    runs_of = [run for run in runs() if run.source.name == "nanotron_scaling"]
    added = {run.setup.mesh.dp_shard: added_s(run) for run in runs_of if run.model == "nanotron-1b"}
    assert added[1] == 0
    assert added[32] == pytest.approx(2 * added[16])
    assert added[128] > 0.05, "a large part of a step of 0.4 s"
    assert not [one for one in runs() if added_s(one) and one.source.method is None]


def test_tensor_parallelism_without_sequence_parallelism_takes_longer_with_more_ranks() -> None:
    """Norms and residuals of all tokens, on each rank of tp."""
    found: dict[int, float] = {}
    for run in runs():
        if run.source.name == "bigscience":
            share = added_s(run) / step_time(run.setup, run.fabric).step_s
            tp = run.setup.mesh.tp
            found[tp] = max(found.get(tp, 0.0), share)
    assert 0 < found[2] < found[4] < found[8] < 0.05
    alone = [run for run in runs() if run.source.name == "internevo" and run.setup.mesh.tp == 1]
    assert alone
    assert not any(map(added_s, alone))


def test_a_step_has_the_range_around_its_speed() -> None:
    one = step_time(setup(), H100)
    found = speed_range(setup(), machine_of(H100).calibration, H100.hosts)
    assert one.tokens_per_second_per_device_range == pytest.approx(
        (
            one.tokens_per_second_per_device * found.low,
            one.tokens_per_second_per_device * found.high,
        )
    )


def allocator_slacks() -> list[tuple[float, float]]:
    """Each distinct run, with its weight."""
    rows = csv.DictReader((FOLDER / "kernels" / "allocator.csv").read_text().splitlines())
    runs = {
        (row["source"], float(row["allocated_mib"]), float(row["reserved_mib"])) for row in rows
    }
    number = Counter(source for source, *_ in runs)
    return sorted(
        (reserved / allocated - 1, weight(number[source]) / number[source])
        for source, allocated, reserved in runs
    )


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    total, passed = sum(each for _, each in weighted), 0.0
    for value, each in weighted:
        passed += each
        if passed >= share * total - 1e-9:
            return value
    return weighted[-1][0]


def test_the_slack_of_the_allocator_is_the_published_one() -> None:
    slacks = allocator_slacks()
    assert pytest.approx((quantile(slacks, 0.05), quantile(slacks, 0.95)), abs=6e-4) == SLACKS
    assert f"{len(slacks)} published runs" in BASIS
    deciles = [quantile(slacks, tenth / 10) for tenth in range(11)]
    assert pytest.approx(deciles, abs=1e-4) == SLACK_DECILES


def test_the_likelihood_to_fit_is_that_of_the_published_allocators() -> None:
    slacks = allocator_slacks()
    reserve = {"communication": 0, "context": CONTEXT_BYTES, "slack": 1}
    device = H100.profile.memory_bytes
    context = sum(CONTEXTS) / 2
    for room in (0.01, 0.024, 0.035, 0.05, 0.07, 0.1):
        tensors = int((device - context) / (1 + room))
        share = sum(each for slack, each in slacks if slack <= room)
        share /= sum(each for _, each in slacks)
        assert fits_share(tensors, reserve, device) == pytest.approx(share, abs=0.06)


def test_the_range_of_tensors_is_that_of_the_traced_cells() -> None:
    table = (ROOT / "benchmarks" / "results" / "memory.md").read_text()
    cells = re.findall(r"^\|.*\| (\d+) \| (\d+) \| [-+]\d+\.\d% \|", table, re.MULTILINE)
    ratios = sorted(int(traced) / int(planned) for planned, traced in cells)
    assert f"{len(cells)} traced steps" in BASIS
    assert pytest.approx((ratios[len(cells) // 20], ratios[-len(cells) // 20]), abs=2e-3) == TRACED


def test_memory_has_a_range_around_its_peak() -> None:
    memory = memory_of(setup(), H100)
    assert memory.peak_bytes_range is not None
    low, high = memory.peak_bytes_range
    assert 0.95 * memory.peak_bytes < low < memory.peak_bytes < high < 1.08 * memory.peak_bytes
