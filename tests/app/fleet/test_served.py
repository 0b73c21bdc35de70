"""Which jobs `ndctl serve` shows: those of `ndctl list`, and those in more run roots."""

import os
import shutil
import time
from pathlib import Path

import pytest

from orchestrator.app.serve import LIST_S, OTHERS_S, ServedJobs
from orchestrator.contract.files import env
from orchestrator.dashboard.fleet.row import OLD_S
from orchestrator.web.fleet import Fleet, FleetState
from orchestrator.web.pages.fleet_page import rows_of
from tests.agent.world import TurnedClock
from tests.app.fleet.test_known_jobs import elsewhere
from tests.cli.test_verbs import ndctl
from tests.dashboard.dashboard_story import finished
from tests.jobs_on_disk import JOB, SPEC, NoCluster, cluster
from tests.web.served_jobs import patient, renamed, written

__all__ = ["cluster", "elsewhere"]


class Served:
    def __init__(self, *roots: Path, **more: str) -> None:
        self.clock = TurnedClock(time.time())
        self.jobs = ServedJobs(roots, {**os.environ, **more}, self.clock)
        self.fleet = Fleet(
            self.jobs.places, self.clock, self.jobs.statuses, self.jobs.strikes, self.jobs.others
        )
        patient(self.fleet)

    def look(self, later_s: float = 0.0) -> FleetState:
        self.clock.sleep(later_s)
        return self.fleet.look()

    def names(self, later_s: float = 0.0) -> list[str]:
        return [row.name for row in rows_of(self.look(later_s))]


def test_registered_jobs_are_shown_and_run_roots_are_added(elsewhere: Path, tmp_path: Path) -> None:
    written(tmp_path / "more" / "other", renamed(finished(), "other"))
    assert Served().names() == [JOB]
    assert sorted(Served(tmp_path / "more").names()) == [JOB, "other"]
    assert sorted(Served(tmp_path / "more", elsewhere).names()) == [JOB, "other"]  # each once
    assert Served(tmp_path / "no such folder").names() == [JOB]


def test_a_new_job_appears_and_a_removed_one_is_gone(elsewhere: Path) -> None:
    served = Served()
    assert served.names() == [JOB]
    assert ndctl("submit", str(SPEC), "--run-root", "b", "--set", "name=new").exit_code == 0
    assert served.names(LIST_S + 1) == ["new", JOB]
    shutil.rmtree(elsewhere)
    rows = {row.name: row for row in rows_of(served.look(LIST_S + 1))}
    assert rows[JOB].state == "GONE"
    assert "was removed" in rows[JOB].note


def test_a_job_that_ended_long_ago_is_a_row_that_no_journal_is_read_for(
    cluster: NoCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # `ndctl-runs` of the folder in use would be served too
    run_dir = written(tmp_path / "runs" / "old", renamed(finished(), "old"))
    served = Served(tmp_path / "runs")
    long_ago = served.clock.now() - OLD_S - 60
    os.utime(run_dir.journal, (long_ago, long_ago))
    state = served.look()
    assert state.jobs == ()
    assert [(row.name, row.state) for row in rows_of(state)] == [("old", "SUCCEEDED")]
    served.fleet.want(run_dir.path)
    assert [job.path for job in served.look().jobs] == [run_dir.path]
    assert len(rows_of(served.look())) == 1
    assert served.look(OTHERS_S + 1).jobs == ()


def test_an_index_that_cannot_be_read_hides_no_other_job(elsewhere: Path, tmp_path: Path) -> None:
    served = Served(**{env.INDEX: str(tmp_path / "not mounted")})
    state = served.look()
    assert [row.name for row in rows_of(state)] == [JOB]
    assert "the shared index cannot be read" in state.others.problem


def test_a_run_directory_that_cannot_be_read_is_a_row(elsewhere: Path) -> None:
    journal = elsewhere / JOB / "journal.jsonl"
    journal.unlink()
    journal.mkdir()
    (row,) = rows_of(Served().look())
    assert row.state == "UNKNOWN"
    assert "its journal is not a file" in row.note
