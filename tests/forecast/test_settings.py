"""The setting of a forecast follows from a spec and its plan."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.contract.checkpoint_interval import (
    MEMORY_ON_CPU,
    MEMORY_ON_GPU,
    interval_of,
)
from orchestrator.errors import SpecError
from orchestrator.forecast.settings import UNCOVERED
from tests.repository.test_docs import ROOT

SPEC = [str(ROOT / "examples/llama3-8b.yaml")]
HOSTS = ["--inventory", str(ROOT / "examples/inventories/h100.yaml")]
SHORT = ["--days", "5", "--histories", "2", "--json"]


def forecast(*options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("forecast", *SPEC, *HOSTS, *SHORT, *options))
    return found


def test_an_adaptive_interval_is_the_one_that_training_reaches() -> None:
    found = forecast("--set", "checkpoint.every=auto", "--mtbf", "100")
    setting = found["setting"]
    best = interval_of(setting["stall_s"], setting["write_s"], found["mtbf_s"])
    assert found["expected"]["every_steps"] == round(best.seconds / found["step_s"])
    assert found["expected"]["every_steps"] != 100
    assert "checkpoint.every: auto" in found["taken_for_granted"]["interval"]


def test_an_interval_in_the_spec_is_used() -> None:
    found = forecast("--set", "checkpoint.every_steps=77")
    assert found["expected"]["every_steps"] == 77
    assert "interval" not in found["taken_for_granted"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--days", "1e9"), ("--days",)),
        (("--repair", "1e12"), ("--repair",)),
        (("--mtbf", "1e-5"), ("--days", "--repair")),
        (("--days", "1e9", "--mtbf", "1e-300"), ()),
    ],
)
def test_a_forecast_that_would_take_many_minutes_is_refused(
    options: tuple[str, ...], named: tuple[str, ...]
) -> None:
    """Failures are simulated one by one, and the closed form counts the hosts under repair."""
    refused = CliRunner().invoke(cli, ["forecast", *SPEC, *HOSTS, *options])
    assert isinstance(refused.exception, SpecError)
    fixes = dict(re.findall(r"(--\w+) (\S+) or less", refused.exception.fix))
    assert tuple(fixes) == named


def test_a_job_whose_hosts_are_always_under_repair_does_not_train() -> None:
    words = ("forecast", str(ROOT / "examples/quickstart.yaml"), *SHORT, "--repair", "1e8")
    assert json.loads(run(*words))["best"]["closed_form"] == 0.0


@pytest.mark.parametrize(("options", "factor"), [((), 0.5), (("--mtbf", "100"), 1.0)])
def test_a_half_used_host_fails_half_as_often(options: tuple[str, ...], factor: float) -> None:
    """A mean time that is given is that of the host as it is."""
    whole = forecast("--set", "cluster.hosts=2", *options)
    half = forecast("--set", "cluster.hosts=2", "--set", "cluster.gpus_per_host=4", *options)
    assert half["per_1000_host_days"] == pytest.approx(factor * whole["per_1000_host_days"])


@pytest.mark.parametrize(
    ("hosts", "asked", "spares", "reserve"),
    [(3, 16, 0, 0), (2, 16, 1, 0), (2, 1, 1, 0), (1, 1, 1, 1), (1, 16, 2, 0)],
)
def test_spares_are_limited_to_the_inventory(
    tmp_path: Path, hosts: int, asked: int, spares: int, reserve: int
) -> None:
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text("{profile: h100-sxm-80gb, hosts: 3, devices_per_host: 8}")
    given = [*SPEC, "--inventory", str(inventory), *SHORT]
    given += ["--set", f"cluster.hosts={hosts}", "--set", f"cluster.spare_hosts={asked}"]
    found = json.loads(run("forecast", *given))
    setting = found["setting"]
    assert (setting["hosts"], setting["spares"], setting["reserve"]) == (hosts, spares, reserve)
    words = f"{asked} spare hosts requested, {spares} available"
    assert (found["spares_asked"] > spares) == (asked > spares)
    assert (words in run("forecast", *(one for one in given if one != "--json"))) == (
        asked > spares
    )
    assert (words in run("plan", *(one for one in given if one not in SHORT))) == (asked > spares)


def test_a_local_job_always_has_the_hosts_of_its_plan() -> None:
    given = [str(ROOT / "examples/quickstart.yaml"), "--set", "cluster.spare_hosts=3", *SHORT]
    found = json.loads(run("forecast", *given))
    assert (found["setting"]["spares"], found["setting"]["reserve"]) == (3, 0)
    assert "simulated on this machine" in found["taken_for_granted"]["hosts"]


def run(*command: str) -> str:
    told = CliRunner().invoke(cli, command)
    assert told.exit_code == 0, told.output
    return told.output


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "option", ["--days", "--mtbf", "--storage", "--stall", "--restart", "--repair", "--queue"]
)
def test_numbers_are_finite(option: str, number: str) -> None:
    told = CliRunner().invoke(cli, ["forecast", *SPEC, *HOSTS, option, number])
    assert told.exit_code == 2
    assert option in told.output


@pytest.mark.parametrize(
    ("hosts", "copies", "hosts_too"), [(2, 2, True), (2, 1, True), (2, 0, False), (1, 2, False)]
)
def test_memory_covers_most_failures_and_without_partners_none_that_takes_a_host(
    hosts: int, copies: int, hosts_too: bool
) -> None:
    default = forecast("--set", f"cluster.hosts={hosts}")
    alone = default["setting"]
    assert alone["memory"] is None
    assert "no GPU has run them yet" in default["taken_for_granted"]["memory"]
    memory = [("every", "on"), ("copies", copies)]
    asked = [f"cluster.hosts={hosts}", *(f"checkpoint.memory.{key}={one}" for key, one in memory)]
    found = forecast(*(word for one in asked for word in ("--set", one)))["setting"]
    covered = [hazard for hazard in found["hazards"] if hazard["covered"]]
    assert not any(hazard["planned"] for hazard in covered)
    assert any(hazard["takes_host"] for hazard in covered) == hosts_too
    assert rate(found["hazards"]) == pytest.approx(rate(alone["hazards"])), "the same failures"
    could = [one for one in alone["hazards"] if not one["planned"]]
    could = [one for one in could if hosts_too or not one["takes_host"]]
    assert rate(covered) == pytest.approx((1 - UNCOVERED) * rate(could))
    assert found["memory"]["restart_s"] < found["restart_s"], "no file is read"


def rate(hazards: list[dict[str, Any]]) -> float:
    return sum(float(hazard["per_s"]) for hazard in hazards)


def test_a_slow_network_makes_copies_rarer() -> None:
    every = ("--set", "checkpoint.memory.every=1", "--set", "cluster.hosts=2")
    fast = forecast(*every)["setting"]["memory"]
    slow = forecast(*every, "--set", "checkpoint.memory.copy_mib_per_s=20")["setting"]["memory"]
    assert slow["interval_s"] > fast["interval_s"]
    assert slow["interval_s"] >= slow["lag_s"] - slow["stall_s"]


@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("every", ["on", "1", "4"])
def test_a_failure_costs_a_step_at_least(every: str, copies: int) -> None:
    """However fast the copies are: a host that was killed cost one step in the median."""
    given = [f"checkpoint.memory.every={every}", f"checkpoint.memory.copies={copies}"]
    found = forecast("--stall", "0.0001", *(word for one in given for word in ("--set", one)))
    memory = found["setting"]["memory"]
    assert memory["interval_s"] / 2 + memory["lag_s"] >= found["step_s"] * 0.999
    assert memory["lag_s"] >= memory["stall_s"]


@pytest.mark.parametrize(
    ("spec", "share"),
    [([*SPEC, *HOSTS], MEMORY_ON_GPU), ([str(ROOT / "examples/quickstart.yaml")], MEMORY_ON_CPU)],
    ids=["GPUs", "CPUs"],
)
def test_copies_are_no_more_frequent_than_their_cost_allows(spec: list[str], share: float) -> None:
    """`--stall` gives what was measured; training copies as seldom as that takes its share."""
    given = [*spec, *SHORT, "--stall", "0.5", "--set", "checkpoint.memory.every=on"]
    found = json.loads(run("forecast", *given))
    memory, step_s = found["setting"]["memory"], found["step_s"]
    assert memory["interval_s"] >= 0.5 / share
    assert memory["interval_s"] <= max(0.5 / share + step_s, memory["lag_s"] + step_s)
