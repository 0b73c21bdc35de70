"""`ndctl report` on run directories: running, ended, torn, and with mistakes in the command."""

from pathlib import Path

import pytest

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.journal.journal import to_line
from tests.cli.test_verbs import ndctl
from tests.dashboard.dashboard_story import finished, journal, started


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NDCTL_RUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, events in (("ended", finished()), ("begun", started())):
        run_dir = RunDir(tmp_path / "runs" / name)
        run_dir.path.mkdir(parents=True)
        run_dir.journal.write_bytes(b"".join(map(to_line, journal(events))))
    return tmp_path


def test_the_report_is_printed_or_written(root: Path) -> None:
    printed = ndctl("report", "ended")
    assert printed.exit_code == 0, printed.output
    assert printed.stdout.startswith("# Report of quickstart\n")
    page, text = root / "r.html", root / "r.md"
    done = ndctl("report", "ended", "--html", str(page), "--md", str(text), "--price", "2.5")
    assert done.exit_code == 0, done.output
    assert page.read_text().startswith("<!doctype html>")
    assert "at 2.5 a GPU-hour (--price)" in text.read_text()
    assert "lost" in done.stdout.splitlines()[-1]


def test_the_users_price_counts_unless_one_is_given(root: Path) -> None:
    config = root / "config" / "ndctl"
    config.mkdir(parents=True)
    (config / "config.yaml").write_text("price: 4\n")
    assert "at 4 a GPU-hour (your configuration)" in ndctl("report", "ended").stdout
    assert "at 1 a GPU-hour (--price)" in ndctl("report", "ended", "--price", "1").stdout


def test_a_wrong_number_names_the_incidents_there_are(root: Path) -> None:
    done = ndctl("report", "ended", "--incident", "7")
    assert done.exit_code == 5
    assert "quickstart has no incident 7" in done.stderr or "ended has no incident 7" in done.stderr
    assert "1 (rank-killed: rank 1 was killed by SIGKILL)" in done.stderr
    assert "had no incident" in ndctl("report", "begun", "--incident", "1").stderr
    assert ndctl("report", "ended", "--incident", "1").exit_code == 0


def test_a_torn_journal_and_lost_files_have_a_report(root: Path) -> None:
    journal_file = root / "runs" / "ended" / "journal.jsonl"
    data = journal_file.read_bytes()
    journal_file.write_bytes(data[:-40])
    done = ndctl("report", "ended")
    assert done.exit_code == 0, done.output
    assert "rank 1 was killed by SIGKILL" in done.stdout
    assert ndctl("report", "begun").exit_code == 0


def test_a_file_that_cannot_be_written_is_an_error(root: Path) -> None:
    done = ndctl("report", "ended", "--html", str(root / "no" / "r.html"))
    assert done.exit_code == 3
    assert "cannot be written" in done.stderr
    assert ndctl("report", "nobody").exit_code == 5
