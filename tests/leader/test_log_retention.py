"""Old attempts' files go, those of the newest stay, and nobody waits for it."""

import asyncio
from pathlib import Path

import pytest

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import StepReached
from orchestrator.leader.records.log_retention import LogRetention, remove_before
from tests.agent.world import until
from tests.job.job_driver import Job
from tests.leader.leader_world import Led, play


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    for attempt in (1, 2, 3, 12):
        leave(run_dir, attempt)
    (run_dir.logs / "agent-host-0.log").write_text("said")
    (run_dir.logs / "attempt-first").mkdir()
    return run_dir


def leave(run_dir: RunDir, attempt: int) -> None:
    for folder in (
        run_dir.attempt_logs(attempt, "host-0"),
        run_dir.traces(attempt),
        run_dir.profiles(attempt),
    ):
        folder.mkdir(parents=True)
        (folder / "rank-0").write_text("words")


def left(run_dir: RunDir) -> list[str]:
    return sorted(str(path.relative_to(run_dir.path)) for path in run_dir.path.rglob("*-[0-9]*"))


def of(attempt: int) -> list[str]:
    each = [f"{parent}/attempt-{attempt}" for parent in ("logs", "profiles", "traces")]
    return [*each, f"{each[0]}/host-0", *(f"{e}/rank-0" for e in (f"{each[0]}/host-0", *each[1:]))]


def test_what_is_before_goes_and_nothing_else(run_dir: RunDir, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("of another")
    (run_dir.traces(1) / "link").symlink_to(elsewhere)
    remove_before(run_dir, 3, lambda: False)
    assert left(run_dir) == sorted([*of(3), *of(12), "logs/agent-host-0.log"])
    assert (run_dir.logs / "attempt-first").is_dir()
    assert (elsewhere / "kept").exists()


def test_it_stops_between_two_files(run_dir: RunDir) -> None:
    turns = iter([False, True])
    before = left(run_dir)
    remove_before(run_dir, 12, lambda: next(turns))
    assert len(before) - len(left(run_dir)) == 1
    remove_before(run_dir, 12, lambda: False)
    assert left(run_dir) == sorted([*of(12), "logs/agent-host-0.log"])


def test_it_is_due_once_an_attempt_trains_that_has_enough_before_it(run_dir: RunDir) -> None:
    job = Job(max_restarts=9).running()
    tidying = LogRetention(lambda: job.run, run_dir, keep=2)
    assert not tidying.is_due(), "the first"
    job.fails_once()
    job.trains()
    assert not tidying.is_due(), "the second"
    job.fails_once()
    assert not tidying.is_due(), "it does not train yet"
    job.trains()
    assert job.run.attempt.number == 3
    assert tidying.is_due()
    asyncio.run(tidying.tidy())
    assert not tidying.is_due()
    assert left(run_dir) == sorted([*of(2), *of(3), *of(12), "logs/agent-host-0.log"])


def test_a_leader_tidies_beside_its_decisions(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        leave(RunDir(tmp_path), 0)
        job.leader.log_retention.tidied = 0
        job.leader.log_retention.keep = 1
        await job.started()
        now = job.clock.now()
        step = StepReached(at=now, attempt=1, step=1, loss=1.0, tokens_per_second=1.0)
        job.leader._happened(step)
        await until(lambda: not RunDir(tmp_path).traces(0).exists(), "the old attempt to go")

    play(tmp_path, script)
