from pathlib import Path

import pytest

from orchestrator.errors import SpecError
from orchestrator.forecast.rates import rates_of

OWN = """
tables:
  - name: ours
    source: tickets of 2026
    hosts: 10
    days: 100
    devices_per_host: 4
    classes:
      - {name: GPU, count: 3}
      - {name: cable, count: 1, detected: hang, host: stays}
      - {name: patch day, count: 5, detected: planned, host: stays}
"""


def test_a_site_has_rates_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(OWN)
    rates = rates_of(str(path))
    assert rates.per_1000_host_days == pytest.approx(4.0)
    assert rates.classes[0].host == "leaves"


def test_a_given_mean_time_keeps_shares_and_planned_failures(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(OWN)
    before = rates_of(str(path))
    after = before.with_mtbf(1200)
    assert 1 / after.unplanned_per_host_s == pytest.approx(1200 * 3600)
    assert after.classes[0].count == pytest.approx(3 * after.classes[1].count)
    assert after.classes[2] == before.classes[2]
    assert "1200 h" in after.source


def test_rates_follow_the_devices_of_a_host(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(OWN)
    before = rates_of(str(path))
    assert before.for_devices(4) is before
    after = before.for_devices(2)
    assert after.per_1000_host_days == pytest.approx(2.0)
    assert after.classes[2] == before.classes[2], "a patch day is the host's"
    assert "hosts with 4 devices; multiplied by 0.5 for" in after.source


def test_all_problems_of_a_rates_file_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"no failure rates are called llama-3; known: llama3, rsc-1"
    ):
        rates_of("llama-3")
    path = tmp_path / "ours.yaml"
    path.write_text(OWN.replace("count: 3", "count: 0").replace("hang", "felt"))
    with pytest.raises(SpecError) as caught:
        rates_of(str(path))
    assert "classes[0].count" in str(caught.value)
    assert "classes[1].detected" in str(caught.value)
    path.write_text("tables: []")
    with pytest.raises(SpecError, match="must have one table"):
        rates_of(str(path))
