"""Files of earlier attempts are deleted in the background; files of the newest ones stay."""

import asyncio
from pathlib import Path

import pytest

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import StepReached
from orchestrator.leader.records.log_retention import LogRetention, remove_before
from tests.agent.world import until
from tests.job.job_driver import Job
from tests.leader.leader_world import LedJob, run_script


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    for attempt in (1, 2, 3, 12):
        write_files(run_dir, attempt)
    (run_dir.logs / "agent-host-0.log").write_text("text")
    (run_dir.logs / "attempt-first").mkdir()
    return run_dir


def write_files(run_dir: RunDir, attempt: int) -> None:
    for folder in (
        run_dir.attempt_logs(attempt, "host-0"),
        run_dir.traces(attempt),
        run_dir.profiles(attempt),
    ):
        folder.mkdir(parents=True)
        (folder / "rank-0").write_text("text")


def numbered_paths(run_dir: RunDir) -> list[str]:
    return sorted(str(path.relative_to(run_dir.path)) for path in run_dir.path.rglob("*-[0-9]*"))


def paths_of(attempt: int) -> list[str]:
    each = [f"{parent}/attempt-{attempt}" for parent in ("logs", "profiles", "traces")]
    return [*each, f"{each[0]}/host-0", *(f"{e}/rank-0" for e in (f"{each[0]}/host-0", *each[1:]))]


def test_only_older_attempts_are_deleted(run_dir: RunDir, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("of another job")
    (run_dir.traces(1) / "link").symlink_to(elsewhere)
    remove_before(run_dir, 3, lambda: False)
    assert numbered_paths(run_dir) == sorted([*paths_of(3), *paths_of(12), "logs/agent-host-0.log"])
    assert (run_dir.logs / "attempt-first").is_dir()
    assert (elsewhere / "kept").exists()


def test_the_deletion_can_stop_between_two_files(run_dir: RunDir) -> None:
    turns = iter([False, True])
    before = numbered_paths(run_dir)
    remove_before(run_dir, 12, lambda: next(turns))
    assert len(before) - len(numbered_paths(run_dir)) == 1
    remove_before(run_dir, 12, lambda: False)
    assert numbered_paths(run_dir) == sorted([*paths_of(12), "logs/agent-host-0.log"])


def test_the_deletion_is_due_when_an_attempt_trains_after_enough_older_ones(
    run_dir: RunDir,
) -> None:
    job = Job(max_restarts=9).running()
    retention = LogRetention(lambda: job.run, run_dir, keep=2)
    assert not retention.is_due(), "attempt 1"
    job.fails_once()
    job.trains()
    assert not retention.is_due(), "attempt 2"
    job.fails_once()
    assert not retention.is_due(), "attempt 3 does not train yet"
    job.trains()
    assert job.run.attempt.number == 3
    assert retention.is_due()
    asyncio.run(retention.tidy())
    assert not retention.is_due()
    assert numbered_paths(run_dir) == sorted(
        [*paths_of(2), *paths_of(3), *paths_of(12), "logs/agent-host-0.log"]
    )


def test_a_leader_deletes_old_files_in_the_background(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        write_files(RunDir(tmp_path), 0)
        job.leader.log_retention.tidied = 0
        job.leader.log_retention.keep = 1
        await job.start_both()
        now = job.clock.now()
        step = StepReached(at=now, attempt=1, step=1, loss=1.0, tokens_per_second=1.0)
        job.leader._happened(step)
        await until(
            lambda: not RunDir(tmp_path).traces(0).exists(),
            "the files of the old attempt to be deleted",
        )

    run_script(tmp_path, script)
