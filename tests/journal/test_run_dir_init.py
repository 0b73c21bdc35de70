"""Creating a run directory: which launches are accepted, and which files they get."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import CancelRequested, LeaderStarted
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import JobError
from orchestrator.journal.current_launch import Launched, current_launch
from orchestrator.journal.journal import Journal
from orchestrator.journal.run_dir_init import ARCHIVE, begin, is_same_launch, read_folder
from orchestrator.journal.snapshot import replay
from orchestrator.journal.supervisor import Supervisor
from tests.agent.world import TurnedClock
from tests.backends.handover import handover_of

CLOCK = TurnedClock()


def handover(run_dir: RunDir, launch: int = 1, **more: Any) -> Handover:
    plan = LaunchPlan(
        job="job",
        run_dir=str(run_dir.path),
        launch=launch,
        hosts=("node-0",),
        devices_per_host=1,
        agent_timeout=10.0,
    )
    return handover_of(plan, **more)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "job")


def end_job(run_dir: RunDir) -> None:
    with Journal(run_dir.journal, CLOCK) as journal:
        supervisor = Supervisor(journal)
        supervisor.feed(LeaderStarted(at=CLOCK.now(), host="node-0", pid=1))
        supervisor.feed(CancelRequested(at=CLOCK.now(), by="me"))


def test_a_spec_is_written_as_utf_8_whatever_the_locale_is(run_dir: RunDir) -> None:
    code = (
        "import sys, pathlib; from tests.journal.test_run_dir_init import *;"
        "dir = RunDir(pathlib.Path(sys.argv[1]));"
        "begin(dir, replace(handover(dir), spec='# \\u8bad'), CLOCK, token=False)"
    )
    environ = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "POSIX"}
    command = [sys.executable, "-c", code, str(run_dir.path)]
    subprocess.run(command, env=environ, check=True, timeout=60)
    assert run_dir.spec.read_text(encoding="utf-8") == "# \u8bad"


def test_the_first_launch_writes_all_files_and_its_start_time(run_dir: RunDir) -> None:
    run = begin(run_dir, handover(run_dir), CLOCK, token=True)
    assert run.job is not None
    assert (run.job.at, run.job.resume, run.job.plan_number) == (CLOCK.now(), False, 1)
    assert run_dir.spec.read_text() == "name: job\n"
    assert json.loads(run_dir.plan(1).read_text()) == {"mesh": "2"}
    assert json.loads(run_dir.trainer_config(1).read_text()) == {"out": "/runs"}
    assert run_dir.token.stat().st_mode & 0o777 == 0o600


def test_a_secret_passed_to_pods_is_written_to_no_file(run_dir: RunDir) -> None:
    begin(run_dir, handover(run_dir), CLOCK, token=False)
    assert not run_dir.token.exists()


def test_the_same_launch_again_is_a_restart_that_writes_nothing(run_dir: RunDir) -> None:
    begin(run_dir, handover(run_dir), CLOCK, token=True)
    before = {path: path.read_bytes() for path in run_dir.path.glob("*") if path.is_file()}
    begin(run_dir, handover(run_dir), TurnedClock(CLOCK.now() + 60), token=True)
    assert {path: path.read_bytes() for path in before} == before
    end_job(run_dir)
    assert begin(run_dir, handover(run_dir), CLOCK, token=True).ending == "CANCELLED"


def test_a_launch_differs_from_another_submission_with_its_number(run_dir: RunDir) -> None:
    """All requested values count: hosts are in the launch, a learning rate only in the spec."""
    wanted = handover(run_dir)
    assert is_same_launch(run_dir, wanted, begin(run_dir, wanted, CLOCK, token=True))
    end_job(run_dir)
    resumed = handover(run_dir, 2, resume=True)
    run = begin(run_dir, resumed, CLOCK, token=True)
    assert is_same_launch(run_dir, resumed, run)
    assert is_same_launch(run_dir, resumed, replay(run_dir)), (
        "also when it is read from the journal"
    )
    fewer = replace(resumed.job, launch=replace(resumed.launch, hosts=()))
    assert not is_same_launch(run_dir, replace(resumed, job=fewer), run)
    assert not is_same_launch(run_dir, replace(resumed, spec="name: job\ntrain: {lr: 2}\n"), run)
    run_dir.spec.unlink()
    assert is_same_launch(run_dir, resumed, run), "no file shows a difference"


def test_resuming_uses_the_same_journal_with_another_plan(run_dir: RunDir) -> None:
    begin(run_dir, handover(run_dir), CLOCK, token=True)
    end_job(run_dir)
    token = run_dir.token.read_text()
    run = begin(run_dir, handover(run_dir, 2, resume=True), CLOCK, token=True)
    assert run.job is not None
    assert (run.ending, run.job.launch.launch, run.job.resume) == (None, 2, True)
    assert current_launch(run_dir) == Launched(backend=run.job.backend, launch=run.job.launch)
    assert run.job.plan_number == 2
    assert run_dir.plan(2).exists()
    assert run_dir.token.read_text() == token


def test_a_new_run_archives_the_old_one(run_dir: RunDir) -> None:
    begin(run_dir, handover(run_dir), CLOCK, token=True)
    end_job(run_dir)
    run = begin(run_dir, replace(handover(run_dir, 2), new=True), CLOCK, token=True)
    assert run.job is not None
    assert (run.job.launch.launch, run.job.resume, run.job.plan_number) == (2, False, 1)
    (old,) = (run_dir.path.parent / ARCHIVE).iterdir()
    assert replay(RunDir(old)).ending == "CANCELLED"


@pytest.mark.parametrize(
    ("existing", "launch", "resume", "message"),
    [
        (3, 2, True, "an old manifest was applied"),
        (None, 2, True, "no run to resume"),
        (1, 2, False, "job job exists in"),
    ],
)
def test_other_launches_are_refused_with_a_fix(
    run_dir: RunDir, existing: int | None, launch: int, resume: bool, message: str
) -> None:
    if existing is not None:
        begin(run_dir, handover(run_dir, existing), CLOCK, token=True)
    with pytest.raises(JobError, match=message) as refused:
        begin(run_dir, handover(run_dir, launch, resume=resume), CLOCK, token=True)
    assert "resume" in refused.value.fix
    assert run_dir.journal.exists() == (existing is not None)


def test_a_mounted_folder_is_read_without_kubernetes_own_files(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "spec.yaml").write_text("name: job\n")
    assert read_folder(tmp_path) == {"spec.yaml": b"name: job\n"}


@pytest.mark.parametrize("file", ["checkpoints/step-20", "metrics.jsonl"])
def test_files_without_a_journal_are_refused_or_archived(run_dir: RunDir, file: str) -> None:
    (run_dir.path / file).mkdir(parents=True)
    for resume in (False, True):
        with pytest.raises(JobError, match=r"no journal\.jsonl: ndctl does not know which run"):
            begin(run_dir, handover(run_dir, resume=resume), CLOCK, token=True)
    run = begin(run_dir, replace(handover(run_dir), new=True), CLOCK, token=True)
    assert run.job is not None
    (old,) = (run_dir.path.parent / ARCHIVE).iterdir()
    assert (old / file).exists()
    assert not (run_dir.path / file).exists()


def test_a_name_that_differs_only_in_case_is_refused(run_dir: RunDir) -> None:
    begin(run_dir, handover(run_dir), CLOCK, token=True)
    other = RunDir(run_dir.path.with_name("Job"))
    with pytest.raises(JobError, match="job Job differs from job in ") as refused:
        begin(other, handover(other), CLOCK, token=True)
    assert "--set name=" in refused.value.fix
    assert not other.path.exists()
