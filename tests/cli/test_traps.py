"""FIFOs, folders and devices in place of files of a run directory: no command waits for them, and
each says which one it cannot read. Another user may put a folder with them into a run root."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from orchestrator import cli
from orchestrator.app.submission import submit_job
from orchestrator.contract.messages.events import CancelRequested
from tests.agent.world import TurnedClock
from tests.jobs_on_disk import JOB, cluster, lead, submission

__all__ = ["cluster"]

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("cluster")]

TRAPS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
def as_the_user_runs_it(words: Sequence[str]) -> None:
    was, sys.argv = sys.argv, ["ndctl", *words]
    try:
        cli.main()
    finally:
        sys.argv = was


def run(root: Path, *words: str) -> Result:
    environ = {"NDCTL_RUN_ROOT": str(root), "XDG_STATE_HOME": str(root / "state")}
    return CliRunner(env=environ).invoke(as_the_user_runs_it, ["--", *words])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With a job that has ended."""
    submit_job.submit(submission(tmp_path), {}, TurnedClock())
    lead(tmp_path, CancelRequested(at=1.0, by="me"))
    return tmp_path


@pytest.mark.parametrize("kind", TRAPS)
def test_a_run_directory_without_a_readable_journal_stops_no_command(root: Path, kind: str) -> None:
    (root / "trap").mkdir()
    TRAPS[kind](root / "trap" / "journal.jsonl")
    listed = run(root, "list", "--all")
    assert listed.exit_code == 0
    assert JOB in listed.output
    assert f"it is {kind}, not a file" in listed.output
    assert "no job 'nosuch'" in run(root, "status", "nosuch").output
    assert run(root, "wait", JOB).exit_code == 7
    assert run(root, "prune").exit_code == 0
    for verb in ("status", "describe", "events", "logs", "report", "cancel"):
        done = run(root, verb, "trap")
        assert done.exit_code == 5, done.output
        assert f"trap/journal.jsonl of user {(root / 'trap').owner()} cannot be" in done.output
        assert f"it is {kind}, not a file" in done.output


@pytest.mark.parametrize("kind", TRAPS)
@pytest.mark.parametrize(
    ("file", "verbs"),
    [
        ("metrics.jsonl", ("status", "describe", "report", "diagnose")),
        ("logs/attempt-1/host-0/rank-0.log", ("logs",)),
        ("checkpoints/step-5/COMPLETE", ("describe",)),
    ],
)
def test_other_files_that_cannot_be_read_are_named(
    root: Path, file: str, verbs: Sequence[str], kind: str
) -> None:
    path = root / JOB / file
    path.parent.mkdir(parents=True, exist_ok=True)
    TRAPS[kind](path)
    assert run(root, "list", "--all").exit_code == 0
    for verb in verbs:
        done = run(root, verb, JOB)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        assert f"it is {kind}, not a file" in done.output


def test_small_files_that_cannot_be_read_are_ignored_or_named(root: Path) -> None:
    for name in ("launch.json", "leader.json", "submitted.json", "state.json", "report.json"):
        (root / JOB / name).unlink(missing_ok=True)
        os.mkfifo(root / JOB / name)
    (root / f".{JOB}.submitting").unlink(missing_ok=True)
    os.mkfifo(root / f".{JOB}.submitting")
    for verb in ("status", "describe", "events", "report", "diagnose", "cancel"):
        done = run(root, verb, JOB)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
