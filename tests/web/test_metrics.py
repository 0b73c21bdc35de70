from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as classic_families

from orchestrator.contract.messages.events import StepReached
from orchestrator.dashboard.snapshot import read_snapshot
from orchestrator.dashboard.time_spent.read import time_spent
from orchestrator.journal.journal import Entry, read, to_line
from orchestrator.seams import LaunchStatus
from orchestrator.web.fleet import FleetState
from orchestrator.web.metrics.exposition import Exposition
from orchestrator.web.metrics.families import FAMILIES
from tests.dashboard.dashboard_story import START, finished, recovered, started
from tests.web.served_jobs import HOSTILE, fleet_of, line, renamed, state_of, written

OPEN = "application/openmetrics-text; version=1.0.0"
Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
DOCS = Path(__file__).parents[2] / "docs" / "monitoring.md"


def series(state: FleetState, exposition: Exposition | None = None) -> Series:
    """Name and labels -> value, as the strict parser reads the text."""
    body, content_type = (exposition or Exposition()).text(state, OPEN)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float:
    (one,) = [
        v for (n, has), v in found.items() if n == name and labels.items() <= dict(has).items()
    ]
    return one


def test_a_job_that_recovered(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", recovered(), range(1, 25), attempt=2)
    found = series(state_of([run_dir], START + 40))
    assert value(found, "ndctl_step") == 24
    assert value(found, "ndctl_steps") == 60
    assert value(found, "ndctl_mfu") == 0.41
    assert value(found, "ndctl_restarts_total") == 1
    assert value(found, "ndctl_checkpoint_step") == 20
    assert value(found, "ndctl_incidents_total", **{"class": "unknown"}) == 1
    assert value(found, "ndctl_job_state", state="FAILED") == 1  # it has no leader
    assert value(found, "ndctl_job_state", state="RUNNING") == 0
    assert value(found, "ndctl_ranks", health="stopped") == 4
    assert value(found, "ndctl_unreadable_jobs") == 0


def test_lost_seconds_are_those_of_status_and_add_up(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", finished(), range(1, 25))
    found = series(state_of([run_dir]))
    snapshot = read_snapshot(run_dir, START + 100)
    assert snapshot is not None
    told = time_spent(snapshot)
    for cause, seconds in told.lost_s.items():
        assert value(found, "ndctl_lost_seconds_total", cause=cause) == pytest.approx(seconds)
    elapsed = value(found, "ndctl_elapsed_seconds_total")
    ratio = value(found, "ndctl_effective_time_ratio")
    assert elapsed * (1 - ratio) == pytest.approx(sum(told.lost_s.values()))
    assert told.lost_s["checkpoint"] == 0.25


def test_a_job_without_figures_has_no_series_for_them(tmp_path: Path) -> None:
    names = {name for name, _ in series(state_of([written(tmp_path / "new", started()[:1])]))}
    assert "ndctl_job_state" in names
    assert not names & {
        "ndctl_loss",
        "ndctl_mfu",
        "ndctl_eta_seconds",
        "ndctl_rank_own_step_seconds",
    }


def test_a_hostile_name_is_one_label(tmp_path: Path) -> None:
    run_dir = written(tmp_path / HOSTILE.replace("/", ""), renamed(started(), HOSTILE), range(1, 3))
    for accept in (OPEN, "text/plain", "", "application/openmetrics-text; version=zz", "\udcff"):
        body, _ = Exposition().text(state_of([run_dir]), accept)
        assert b"\x1b" not in body
        assert "\u202e" not in body.decode()
    (labels,) = [
        dict(has) for (name, has), _ in series(state_of([run_dir])).items() if name == "ndctl_step"
    ]
    assert labels["job_name"].startswith('a"b\\c\nd{e="f"} red\\u202egnp')


def test_one_damaged_journal_does_not_hide_the_others(tmp_path: Path) -> None:
    good, bad = (written(tmp_path / name, started()) for name in ("good", "bad"))
    bad.journal.write_text('{"v":1,"seq":1,"event":{"kind":"Nonsense"},"actions":[]}\n')
    state = state_of([good, bad])
    assert "journal line 1" in state.unreadable[bad.path]
    found = series(state)
    assert value(found, "ndctl_unreadable_jobs") == 1
    assert value(found, "ndctl_step") == 1


def test_a_second_look_reads_what_was_added(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", started(), range(1, 3))
    fleet = fleet_of([run_dir])
    assert value(series(fleet.look()), "ndctl_step") == 2
    entry = read(run_dir.journal)[-1]
    at = START + 50
    later = StepReached(at=at, attempt=1, step=30, loss=1.5, tokens_per_second=7.0)
    with run_dir.journal.open("ab") as file:
        file.write(to_line(Entry(seq=entry.seq + 1, event=later, actions=())))
    with run_dir.metrics.open("a") as file:
        file.write(str(line(30)).replace("'", '"') + "\n")
    found = series(fleet.look())
    assert value(found, "ndctl_step") == 30
    # `submit --new` puts another journal in the same place.
    run_dir.path.rename(tmp_path / "archived")
    assert fleet.look().unreadable.keys() == {run_dir.path}
    written(run_dir.path, started()[:1])
    assert value(series(fleet.look()), "ndctl_step") == 0


def test_a_counter_does_not_fall(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", recovered())
    exposition, fleet = Exposition(), fleet_of([run_dir])
    before = value(series(fleet.look(), exposition), "ndctl_lost_seconds_total", cause="lost_work")
    # The line of a pause within lost training arrives late.
    run_dir.metrics.write_text(str(line(24, checkpoint_s=1.0)).replace("'", '"') + "\n")
    after = value(series(fleet.look(), exposition), "ndctl_lost_seconds_total", cause="lost_work")
    fresh = value(series(fleet.look()), "ndctl_lost_seconds_total", cause="lost_work")
    assert after == before > fresh


def test_the_file_for_node_exporter_is_the_text_format(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", finished())
    body, _ = Exposition().text(state_of([run_dir]), "")
    text = body.decode()
    assert "# EOF" not in text
    names = {one.name for one in classic_families(text)}
    assert {"ndctl_step", "ndctl_lost_seconds"} <= names


def test_documents_list_each_metric() -> None:
    documented = DOCS.read_text()
    for family in FAMILIES:
        name = f"{family.name}_total" if family.counts else family.name
        row = f"| `{name}`"
        labels = "".join(f"`{label}`" for label in family.labels)
        assert row in documented, name
        (found,) = [one for one in documented.splitlines() if one.startswith(f"{row} ")]
        assert labels.replace("``", "`, `") in found, found


def test_a_job_of_a_scheduler_without_a_leader_is_asked_about(tmp_path: Path) -> None:
    job = replace(started()[0], backend="slurm")
    run_dir = written(tmp_path / "queued", [job])
    fleet = fleet_of([run_dir], START + 1000)
    (one,) = fleet.look().jobs
    assert one.snapshot.standing.state == "FAILED"
    fleet.statuses = lambda jobs: {jobs[0].path: LaunchStatus("Slurm job 7 is PENDING", held=True)}
    assert value(series(fleet.look()), "ndctl_job_state", state="PENDING") == 1
