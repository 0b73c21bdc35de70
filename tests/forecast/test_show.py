"""The text of a forecast."""

import re
from pathlib import Path

from click.testing import CliRunner

from orchestrator.cli import cli
from tests.repository.test_docs import ROOT

SPEC = str(ROOT / "examples/llama3-8b.yaml")


def forecast(inventory: Path, hosts: int, spares: int, *options: str) -> str:
    inventory.write_text(
        f"{{profile: h100-sxm-80gb, hosts: {hosts}, devices_per_host: 8, hosts_per_leaf: 16}}"
    )
    given = ["--inventory", str(inventory), "--set", f"cluster.spare_hosts={spares}"]
    told = CliRunner().invoke(cli, ["forecast", SPEC, *given, "--histories", "8", *options])
    assert told.exit_code == 0, told.output
    return " ".join(told.output.split())


def test_too_few_hosts_are_reported_before_the_mean_in_repair_exceeds_them(
    tmp_path: Path,
) -> None:
    """Less than one in repair on average and one there, often two at once."""
    told = forecast(tmp_path / "hosts.yaml", 2, 1, "--mtbf", "24")
    assert "too few 0.766 hosts are in repair on average, and 1 is free beyond" in told
    assert "in the long run too few are left 17.9% of the time" in told


def test_a_different_best_number_of_spares_is_explained(
    tmp_path: Path,
) -> None:
    told = forecast(tmp_path / "hosts.yaml", 10, 6, "--mtbf", "48")
    said = "share of the time of all hosts, spares included: 99.36%, with the spec 14.22%"
    assert f"and 0 spare hosts {said}" in told
    assert "too few" not in told


def test_lost_time_is_never_rounded_away(tmp_path: Path) -> None:
    told = forecast(tmp_path / "hosts.yaml", 2, 0, "--mtbf", "5000000", "--days", "60")
    assert "effective 99.9" in told
    assert "100.0%" not in told
    assert re.search(r"failures on average \(\d+ to \d+\); times without a free spare: \d", told)


def test_a_gap_between_simulation_and_closed_form_is_explained(tmp_path: Path) -> None:
    far = ("--mtbf", "200", "--repair", "2000", "--days", "2")
    told = forecast(tmp_path / "hosts.yaml", 5, 2, *far)
    assert re.search(r"the two differ by up to [0-9.]+%; the simulations decide", told)
    assert "apart" not in forecast(tmp_path / "hosts.yaml", 10, 6, "--mtbf", "48")
