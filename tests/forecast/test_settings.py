"""From a spec and its plan to a setting."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.contract.reliability import interval_of
from tests.test_docs import ROOT

SPEC = [str(ROOT / "examples/llama3-8b.yaml")]
HOSTS = ["--inventory", str(ROOT / "examples/inventories/h100.yaml")]
SHORT = ["--days", "5", "--histories", "2", "--json"]


def forecast(*options: str) -> dict[str, Any]:
    told = CliRunner().invoke(cli, ["forecast", *SPEC, *HOSTS, *SHORT, *options])
    assert told.exit_code == 0, told.output
    found: dict[str, Any] = json.loads(told.output)
    return found


def test_with_an_interval_that_adapts_it_is_the_one_that_training_comes_to() -> None:
    found = forecast("--set", "checkpoint.every=auto", "--mtbf", "100")
    setting = found["setting"]
    best = interval_of(setting["stall_s"], setting["write_s"], found["mtbf_s"])
    assert found["expected"]["every_steps"] == round(best.seconds / found["step_s"])
    assert found["expected"]["every_steps"] != 100
    assert "checkpoint.every is auto" in found["taken_for_granted"]["interval"]


def test_an_interval_that_the_spec_fixes_is_taken() -> None:
    found = forecast("--set", "checkpoint.every_steps=77")
    assert found["expected"]["every_steps"] == 77
    assert "interval" not in found["taken_for_granted"]


@pytest.mark.parametrize(("options", "factor"), [((), 0.5), (("--mtbf", "100"), 1.0)])
def test_a_host_of_which_half_the_devices_are_used_breaks_half_as_often(
    options: tuple[str, ...], factor: float
) -> None:
    """A mean time that is given is that of the host as it is."""
    whole = forecast("--set", "cluster.hosts=2", *options)
    half = forecast("--set", "cluster.hosts=2", "--set", "cluster.gpus_per_host=4", *options)
    assert half["per_1000_host_days"] == pytest.approx(factor * whole["per_1000_host_days"])


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "option", ["--days", "--mtbf", "--storage", "--stall", "--restart", "--repair", "--queue"]
)
def test_numbers_are_finite(option: str, number: str) -> None:
    told = CliRunner().invoke(cli, ["forecast", *SPEC, *HOSTS, option, number])
    assert told.exit_code == 2
    assert option in told.output
