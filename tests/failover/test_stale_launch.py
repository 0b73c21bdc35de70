"""An allocation that a scheduler made late touches nothing of a job that has another."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.backends.entry.agent import main
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.fence import Fence, read_fence, write_fence
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import Unanswered
from orchestrator.failover.stale_launch import superseded
from orchestrator.journal.current_launch import write_current_launch
from orchestrator.journal.journal import Journal
from orchestrator.system import SystemClock
from tests.agent.world import LAUNCH, SECRET_TEXT, FakeBackend, TurnedClock, a_job


@dataclass
class Scheduler(FakeBackend):
    says: str | None = None
    silent: int = 0
    launches: list[int] = field(default_factory=list)

    def rival(self, launch: LaunchPlan) -> str | None:
        self.launches.append(launch.launch)
        if len(self.launches) <= self.silent:
            raise Unanswered("Slurm does not answer")
        return self.says


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    run_dir.token.write_text(SECRET_TEXT)
    with Journal(run_dir.journal, SystemClock()) as journal:
        journal.append(a_job(tmp_path))
    return run_dir


def why(run_dir: RunDir, launch: int, scheduler: Scheduler) -> str | None:
    return superseded(run_dir, Term(launch), lambda name: scheduler, TurnedClock())


def test_who_is_of_the_journals_launch_begins(run_dir: RunDir) -> None:
    assert why(run_dir, LAUNCH, Scheduler()) is None
    assert why(RunDir(run_dir.path / "none"), LAUNCH, Scheduler()) is None


@pytest.mark.parametrize("launch", [LAUNCH - 1, LAUNCH + 1])
def test_a_job_that_was_submitted_again_has_other_hosts(run_dir: RunDir, launch: int) -> None:
    """With --new launches are counted from 1 again."""
    scheduler = Scheduler()
    assert f"launch {LAUNCH} is the current one" in str(why(run_dir, launch, scheduler))
    assert scheduler.launches == []


def test_of_two_allocations_for_a_launch_one_leaves(run_dir: RunDir) -> None:
    scheduler = Scheduler(says="Slurm job 7 is RUNNING", silent=3)
    assert why(run_dir, LAUNCH, scheduler) == "the job has other hosts: Slurm job 7 is RUNNING"
    assert len(scheduler.launches) == 4, "it is asked again until it answers"


def test_which_launch_counts_is_known_without_the_journal(run_dir: RunDir) -> None:
    """2,048 hosts read it at the same time, and it may have hundreds of megabytes."""
    write_current_launch(run_dir, a_job(run_dir.path))
    run_dir.journal.write_text("nobody can read this\n")
    assert why(run_dir, LAUNCH, Scheduler()) is None
    assert f"launch {LAUNCH} is the current one" in str(why(run_dir, LAUNCH - 1, Scheduler()))


@pytest.mark.parametrize("text", ["", "{}", '{"backend": 3, "launch": []}'])
def test_where_that_is_damaged_the_journal_says_it(run_dir: RunDir, text: str) -> None:
    run_dir.launch.write_text(text)
    assert why(run_dir, LAUNCH, Scheduler()) is None
    assert f"launch {LAUNCH} is the current one" in str(why(run_dir, LAUNCH - 1, Scheduler()))


@pytest.mark.parametrize("lead", [["--lead"], []])
def test_who_is_superseded_leaves_everything_as_it_is(
    run_dir: RunDir, lead: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_fence(run_dir.fence, Fence(leader="who trains", attempt=3))
    before = run_dir.journal.read_bytes()
    words = ["--host=host-9", "--address=127.0.0.1", f"--launch={LAUNCH + 1}", "--devices=1"]
    with caplog.at_level(logging.ERROR):
        code = main([f"--run-dir={run_dir.path}", *words, "--agent-timeout=1", *lead], {})
    assert code == exit_codes.NOT_ADMITTED
    assert "exiting: these hosts are of launch" in caplog.text
    assert read_fence(run_dir.fence) == Fence(leader="who trains", attempt=3)
    assert run_dir.journal.read_bytes() == before
