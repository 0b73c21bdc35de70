"""`ndctl wait`: what it waits for, and its exit codes."""

from pathlib import Path

import pytest

from orchestrator.app.fleet.waiting import wait_for
from orchestrator.app.remote import Found
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.job.stage import ENDED, State
from orchestrator.journal.journal import Journal
from orchestrator.journal.supervisor import Supervisor
from tests.cli.test_verbs import ndctl, run_root
from tests.dashboard.dashboard_story import StoryClock, finished, restarting, started
from tests.jobs_on_disk import JOB, SPEC, NoCluster, cluster

__all__ = ["cluster", "run_root"]


class SteppedClock(StoryClock):
    """A clock whose sleeps run what happens to the job meanwhile."""

    def __init__(self, *steps: object) -> None:
        super().__init__()
        self.steps, self.slept = list(steps), 0.0

    def monotonic(self) -> float:
        return self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        if self.steps:
            self.steps.pop(0)()  # type: ignore[operator]


class Job:
    """A job whose journal this test writes, as its leader."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(folder)
        self.run_dir.make()
        self.journal = Journal(self.run_dir.journal, StoryClock())
        self.supervisor = Supervisor(self.journal)

    def feed(self, events: list) -> None:  # type: ignore[type-arg]
        for event in events:
            self.supervisor.feed(event)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    one = Job(tmp_path / "quickstart")
    one.feed(started())
    return one


def waited(job: Job, clock: SteppedClock, *states: State, timeout_s: float | None = 60) -> int:
    return wait_for([Found(job.run_dir)], states or ENDED, timeout_s, {}, clock, lambda _: None)


def test_it_waits_for_the_end(job: Job) -> None:
    rest = finished()[len(started()) :]
    clock = SteppedClock(lambda: None, lambda: job.feed(rest))
    assert waited(job, clock) == exit_codes.OK
    assert clock.slept == 1.0


def test_a_state_is_reached_before_the_end(job: Job) -> None:
    rest = restarting()[len(started()) :]
    assert waited(job, SteppedClock(), "RUNNING") == exit_codes.OK
    clock = SteppedClock(lambda: job.feed(rest))
    assert waited(job, clock, "RECOVERING", "FAILED") == exit_codes.OK


def test_a_job_that_ends_without_the_state_is_not_waited_for(job: Job) -> None:
    clock = SteppedClock(lambda: job.feed(finished()[len(started()) :]))
    assert waited(job, clock, "SUSPENDED") == exit_codes.BAD_JOB_STATE


def test_the_leader_dies(job: Job) -> None:
    clock = SteppedClock(lambda: job.journal.__exit__(None, None, None))
    assert waited(job, clock) == exit_codes.FAILED
    assert waited(job, SteppedClock(), "FAILED") == exit_codes.OK


def test_a_timeout_has_its_own_exit_code(job: Job) -> None:
    clock = SteppedClock()
    assert waited(job, clock, timeout_s=3) == exit_codes.TIMED_OUT
    assert clock.slept == 3
    assert waited(job, SteppedClock(), timeout_s=0) == exit_codes.TIMED_OUT


def test_the_command_line(cluster: NoCluster, run_root: Path) -> None:
    assert ndctl("submit", str(SPEC)).exit_code == 0
    done = ndctl("wait", JOB, "--timeout", "0s")
    assert (done.exit_code, done.output) == (124, f"{JOB}: timed out, SUBMITTED\n")
    assert ndctl("wait", JOB, "--for", "submitted,running").exit_code == 0
    assert ndctl("cancel", JOB).exit_code == 0
    assert ndctl("wait", JOB).exit_code == exit_codes.CANCELLED
    assert ndctl("wait", JOB, "--for", "CANCELLED").exit_code == 0
    assert ndctl("wait", JOB, "--for", "ended").exit_code == exit_codes.USAGE
    assert ndctl("wait", JOB, "--timeout", "soon").exit_code == exit_codes.USAGE
    assert ndctl("wait", "nothing").exit_code == exit_codes.BAD_JOB_STATE
