"""A late allocation of a job that has another one exits and changes nothing."""

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
    rival_state: str | None = None
    unanswered: int = 0
    launches: list[int] = field(default_factory=list)

    def rival(self, launch: LaunchPlan) -> str | None:
        self.launches.append(launch.launch)
        if len(self.launches) <= self.unanswered:
            raise Unanswered("Slurm does not answer")
        return self.rival_state


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    run_dir.token.write_text(SECRET_TEXT)
    with Journal(run_dir.journal, SystemClock()) as journal:
        journal.append(a_job(tmp_path))
    return run_dir


def reason_to_exit(run_dir: RunDir, launch: int, scheduler: Scheduler) -> str | None:
    return superseded(run_dir, Term(launch), lambda name: scheduler, TurnedClock())


def test_an_allocation_of_the_current_launch_starts(run_dir: RunDir) -> None:
    assert reason_to_exit(run_dir, LAUNCH, Scheduler()) is None
    assert reason_to_exit(RunDir(run_dir.path / "none"), LAUNCH, Scheduler()) is None


@pytest.mark.parametrize("launch", [LAUNCH - 1, LAUNCH + 1])
def test_an_allocation_of_another_launch_exits(run_dir: RunDir, launch: int) -> None:
    """With --new, launches are numbered from 1 again, so the current launch may be smaller."""
    scheduler = Scheduler()
    assert f"launch {LAUNCH} is the current one" in str(reason_to_exit(run_dir, launch, scheduler))
    assert scheduler.launches == []


def test_one_of_two_allocations_for_a_launch_exits(run_dir: RunDir) -> None:
    scheduler = Scheduler(rival_state="Slurm job 7 is RUNNING", unanswered=3)
    assert (
        reason_to_exit(run_dir, LAUNCH, scheduler)
        == "the job has other hosts: Slurm job 7 is RUNNING"
    )
    assert len(scheduler.launches) == 4, "the question is repeated until the scheduler answers"


def test_the_current_launch_is_read_from_its_own_file(run_dir: RunDir) -> None:
    """2,048 hosts start together, and the journal may have hundreds of megabytes."""
    write_current_launch(run_dir, a_job(run_dir.path))
    run_dir.journal.write_text("nobody can read this\n")
    assert reason_to_exit(run_dir, LAUNCH, Scheduler()) is None
    assert f"launch {LAUNCH} is the current one" in str(
        reason_to_exit(run_dir, LAUNCH - 1, Scheduler())
    )


@pytest.mark.parametrize("text", ["", "{}", '{"backend": 3, "launch": []}'])
def test_the_journal_is_read_if_that_file_is_damaged(run_dir: RunDir, text: str) -> None:
    run_dir.launch.write_text(text)
    assert reason_to_exit(run_dir, LAUNCH, Scheduler()) is None
    assert f"launch {LAUNCH} is the current one" in str(
        reason_to_exit(run_dir, LAUNCH - 1, Scheduler())
    )


@pytest.mark.parametrize("lead", [["--lead"], []])
def test_a_stale_allocation_changes_neither_fence_nor_journal(
    run_dir: RunDir, lead: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_fence(run_dir.fence, Fence(leader="the current leader", attempt=3))
    before = run_dir.journal.read_bytes()
    options = ["--host=host-9", "--address=127.0.0.1", f"--launch={LAUNCH + 1}", "--devices=1"]
    with caplog.at_level(logging.ERROR):
        code = main([f"--run-dir={run_dir.path}", *options, "--agent-timeout=1", *lead], {})
    assert code == exit_codes.NOT_ADMITTED
    assert "exiting: these hosts are of launch" in caplog.text
    assert read_fence(run_dir.fence) == Fence(leader="the current leader", attempt=3)
    assert run_dir.journal.read_bytes() == before
