"""What people read of a forecast."""

import re
from pathlib import Path

from click.testing import CliRunner

from orchestrator.cli import cli
from tests.test_docs import ROOT

SPEC = str(ROOT / "examples/llama3-8b.yaml")


def forecast(inventory: Path, hosts: int, spares: int, *options: str) -> str:
    inventory.write_text(
        f"{{profile: h100-sxm-80gb, hosts: {hosts}, devices_per_host: 8, hosts_per_leaf: 16}}"
    )
    given = ["--inventory", str(inventory), "--set", f"cluster.spare_hosts={spares}"]
    told = CliRunner().invoke(cli, ["forecast", SPEC, *given, "--histories", "8", *options])
    assert told.exit_code == 0, told.output
    return " ".join(told.output.split())


def test_hosts_that_do_not_suffice_are_said_before_their_mean_exceeds_those_there_are(
    tmp_path: Path,
) -> None:
    """Less than one in repair on average and one there, often two at once."""
    told = forecast(tmp_path / "hosts.yaml", 2, 1, "--mtbf", "24")
    assert "too few 0.766 hosts are being repaired on average, and there is 1 beside" in told
    assert "for 17.9% of the time, in the long run, these do not suffice" in told


def test_where_the_best_has_another_number_of_spares_it_says_what_makes_it_the_best(
    tmp_path: Path,
) -> None:
    told = forecast(tmp_path / "hosts.yaml", 10, 6, "--mtbf", "48")
    said = "of the time of all hosts held, spares too: 99.37%, as the spec says it 14.22%"
    assert f"and 0 spare hosts {said}" in told
    assert "too few" not in told


def test_where_histories_and_closed_form_are_apart_it_says_so(tmp_path: Path) -> None:
    far = ("--mtbf", "200", "--repair", "2000", "--days", "2")
    told = forecast(tmp_path / "hosts.yaml", 5, 2, *far)
    assert re.search(r"the two are up to [0-9.]+% apart, and the histories decided", told)
    assert "apart" not in forecast(tmp_path / "hosts.yaml", 10, 6, "--mtbf", "48")
