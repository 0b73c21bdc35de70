"""Hardware profiles are complete, have sources, and users can override their numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from orchestrator.contract.codec import encode
from orchestrator.contract.devices import PROFILE_NAMES
from orchestrator.errors import SpecError
from orchestrator.inventory.profile import LinkKind
from orchestrator.inventory.profiles import FOLDER, load_profile


def test_there_is_a_file_for_each_name() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(PROFILE_NAMES)


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_each_number_has_its_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert set(profile.sources) == set(numbers(encode(profile)))


def numbers(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in data.items():
        if key == "calibration":
            continue  # whose sources are comments in its files
        if isinstance(value, Mapping) and key != "sources":
            yield from numbers(value, f"{above}{key}.")
        elif isinstance(value, (int, float)) or key == "kind":
            yield f"{above}{key}"


@pytest.mark.parametrize(
    ("name", "dense_bfloat16", "gib", "link"),
    [
        ("h100-sxm-80gb", 989.4e12, 79.1, 450e9),
        ("h100-sxm-96gb-500w", 989.4e12, 95, 450e9),
        ("h200-sxm-141gb", 989.4e12, 139.8, 450e9),
        ("a100-sxm-80gb", 312e12, 79.15, 300e9),
        ("a100-sxm-40gb", 312e12, 39.4, 300e9),
        ("b200-sxm-180gb", 2250e12, 178.35, 900e9),
        ("gb200-186gb", 2500e12, 184.3, 900e9),
        ("b300-sxm-270gb", 2250e12, 267.9, 900e9),
        ("h100-pcie-80gb", 756.4e12, 79.1, 63e9),
        ("mi300x-192gb", 1307.4e12, 191.98, 448e9),
        ("l40s-48gb", 362.05e12, 44.4, 31.5e9),
        ("rtx4090-24gb", 165.2e12, 23.5, 31.5e9),
    ],
)
def test_figures_are_dense_binary_and_one_way(
    name: str, dense_bfloat16: float, gib: float, link: float
) -> None:
    """Vendors print sparse rates, decimal gigabytes and both directions together."""
    profile = load_profile(name)
    assert profile.flops["bfloat16"] == dense_bfloat16
    assert profile.memory_bytes == pytest.approx(gib * 2**30, rel=2e-3)
    assert profile.intra_host.bytes_per_s == link


def test_a_user_overrides_a_number_and_its_source_says_so() -> None:
    profile = load_profile("h100-sxm-80gb", {"inter_host": {"bytes_per_s": 25e9}}, "my.yaml")
    assert profile.inter_host.bytes_per_s == 25e9
    assert profile.inter_host.kind == "infiniband"
    assert profile.sources["inter_host.bytes_per_s"] == "overridden in my.yaml"


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_every_profile_is_calibrated(name: str) -> None:
    profile = load_profile(name)
    calibration = profile.calibration
    assert name == "cpu" or calibration.processors > 100
    for share in (*calibration.gemm.values(), calibration.memory):
        assert 0.3 < share <= 1
    assert set(calibration.links) == set(get_args(LinkKind))


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A profile as a user writes it: an H100 that has another name."""
    path = tmp_path / "mine.yaml"
    text = (FOLDER / "h100-sxm-80gb.yaml").read_text().partition("sources:")[0]
    path.write_text(text.replace("name: h100-sxm-80gb", "name: mine"))
    return path


def test_a_users_profile_needs_no_sources(mine: Path) -> None:
    assert load_profile(str(mine)).name == "mine"
    assert load_profile(str(mine)).sources == {}


def test_a_profile_without_calibration_is_marked_as_guessed(mine: Path) -> None:
    known = load_profile("h100-sxm-80gb").calibration
    assert known.certainty == "measured"
    assert known.comparable
    assert known.widening < 1.2, "many sources have it"
    guessed = replace(known, certainty="guessed", comparable=(), adapters=0, widening=3.606)
    assert load_profile(str(mine)).calibration == guessed, "runs on H100 say nothing about it"


def test_a_users_profile_may_have_its_own_calibration(mine: Path) -> None:
    mine.write_text(mine.read_text() + "calibration: {certainty: measured, gemm: {bfloat16: 0.7}}")
    calibration = load_profile(str(mine)).calibration
    assert calibration.certainty == "measured"
    assert calibration.gemm == {**load_profile("h100-sxm-80gb").calibration.gemm, "bfloat16": 0.7}


def test_a_calibration_can_be_overridden_like_any_number() -> None:
    over = {"calibration": {"links": {"infiniband": {"share": 0.5}}}}
    profile = load_profile("h100-sxm-80gb", over, "my.yaml")
    assert profile.calibration.links["infiniband"].share == 0.5
    assert profile.sources["calibration.links.infiniband.share"] == "overridden in my.yaml"
    for wrong in ({"token ring": {"share": 0.5, "half_bytes": 0, "base_s": 0}}, {"pcie4": 1}):
        with pytest.raises(SpecError, match=r"calibration\.links"):
            load_profile("h100-sxm-80gb", {"calibration": {"links": wrong}}, "my.yaml")


def test_all_problems_of_a_profile_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (FOLDER / "cpu.yaml").read_text().replace("kind: ethernet", "kind: token ring")
    text = text.replace("memory_bytes: ", "memory_bytes: -", 1)
    path.write_text(text.replace("device: ", "devic: ", 1))
    with pytest.raises(SpecError) as caught:
        load_profile(str(path))
    said = str(caught.value)
    assert "4 problems" in said
    for part in ("did you mean device?", "inter_host.kind", "memory_bytes: must be", "add device"):
        assert part in said


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("h100-sxm-80g", "h100-sxm-80gb"),
        ("h10-sxm-80gb", "h100-sxm-80gb"),
        ("h010-sxm-80gb", "h100-sxm-80gb"),
        ("H100 SXM", "h100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("RTX 4090", "rtx4090-24gb"),
        ("h200-sxm-80gb", "h200-sxm-141gb"),
        ("cpus", "cpu"),
    ],
)
def test_a_name_that_is_almost_right_is_corrected(name: str, meant: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_profile(name)
    assert caught.value.fix == f"did you mean {meant}?"


@pytest.mark.parametrize(
    "name",
    [
        *("v100-sxm2-32gb", "a10-24gb", "a40-48gb", "l40-48gb", "h800-sxm-80gb", "h20-96gb"),
        *("b100-sxm-180gb", "rtx3090-24gb", "mi250x-128gb", "gh200-96gb", "gb300-288gb", "80gb"),
    ],
)
def test_another_gpu_is_not_corrected_to_one_that_has_a_profile(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_profile(name)
    assert "did you mean" not in (caught.value.fix or "")
    assert "ndctl calibrate" in (caught.value.fix or "")


def test_a_profile_has_the_rates_of_the_model() -> None:
    with pytest.raises(SpecError, match="float16 runs at the rate of bfloat16"):
        load_profile("cpu", {"flops": {"float16": 1.0}}, "my.yaml")
