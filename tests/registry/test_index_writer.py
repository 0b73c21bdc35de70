"""The leader's report to the site's index."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from orchestrator.app.fleet.known_jobs import Scope, known_jobs
from orchestrator.app.fleet.summaries import Reader, _reported
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import Event
from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.dashboard.fleet.summary import JobSummary
from orchestrator.job.transitions import fold
from orchestrator.journal.journal import Journal
from orchestrator.journal.supervisor import Supervisor
from orchestrator.leader.records.index_writer import public_summary, publishing
from orchestrator.registry.store import shared_entries
from tests.dashboard.dashboard_story import START, StoryClock, finished, restarting, started


def environ(tmp_path: Path) -> dict[str, str]:
    index = tmp_path / "index"
    index.mkdir(exist_ok=True)
    index.chmod(0o1777)
    return {env.INDEX: str(index)}


def published(tmp_path: Path, events: list[Event]) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "quickstart")
    run_dir.make()
    with Journal(run_dir.journal, StoryClock()) as written:
        supervisor = Supervisor(written)
        for event in events:
            supervisor.feed(event)

        async def lead() -> None:
            async with publishing(supervisor, run_dir, environ(tmp_path), StoryClock()):
                pass

        asyncio.run(lead())
    return run_dir


def row_of(tmp_path: Path) -> JobRow:
    """What a user without access to the run directory sees."""
    told, clock = environ(tmp_path), StoryClock()
    (row,), _ = Reader(told, clock).rows(known_jobs(Scope(), told, clock))
    return row


def test_a_user_without_access_sees_the_leaders_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # `ndctl-runs` of the folder in use would be listed too
    run_dir = published(tmp_path, started())
    if os.geteuid() == 0:
        run_dir.journal.rename(tmp_path / "elsewhere")  # root has access to everything
    else:
        run_dir.path.chmod(0)
    row = row_of(tmp_path)
    assert (row.state, row.name, row.hosts) == ("RUNNING", "quickstart", 2)
    assert row.job is not None
    assert row.job.as_of is None
    run_dir.path.chmod(0o700)


def test_a_report_has_no_text_that_a_program_printed(tmp_path: Path) -> None:
    published(tmp_path, restarting())
    (one,) = shared_entries(environ(tmp_path))
    report = msgspec.json.decode(one.entry.report, type=JobSummary)
    assert report.state == "RECOVERING"
    assert report.note.endswith("rank 1 on host-0")
    text = one.path.read_text()
    assert "Traceback" not in text
    assert "Error" not in text


def test_a_report_gets_old_unless_the_job_ended(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    report = public_summary(fold(started()), run_dir, START + 40)
    assert _reported(report, START + 60).as_of is None
    assert _reported(report, START + 400).as_of == START + 40
    ended = public_summary(fold(finished()), run_dir, START + 80)
    assert _reported(ended, START + 1e6).as_of is None


def test_nothing_is_published_without_an_index(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "runs" / "x")

    async def lead() -> None:
        supervisor = None
        async with publishing(supervisor, run_dir, {}, StoryClock()):  # type: ignore[arg-type]
            pass

    asyncio.run(lead())
    assert list(tmp_path.iterdir()) == []
