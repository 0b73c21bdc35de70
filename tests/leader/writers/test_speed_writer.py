"""Which jobs leave their speed for later plans."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.contract.codec import encode
from orchestrator.contract.drills import parse_drill
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.plan import Plan
from orchestrator.job.state import Run
from orchestrator.leader.records.speed_writer import write_speed
from orchestrator.plan.history.record import FEWEST_STEPS, setup_of_training
from orchestrator.speed_history import path_of, recall
from tests.agent.world import a_job
from tests.dashboard.measured.test_steady import line
from tests.job.job_driver import Job
from tests.plan.history.jobs import ran
from trainer.measure.metrics import to_line

STEPS = 60


@pytest.fixture(scope="module")
def job() -> tuple[Plan, TrainingConfig]:
    return ran()


@pytest.fixture
def run_dir(tmp_path: Path, job: tuple[Plan, TrainingConfig]) -> RunDir:
    found = RunDir(tmp_path / "job")
    found.make()
    found.trainer_config(1).write_text(json.dumps(encode(job[1])))
    trained(found)
    return found


def trained(run_dir: RunDir, steps: int = STEPS, **more: Any) -> None:
    lines = (line(number, step_s=9.5, **more) for number in range(1, steps + 1))
    run_dir.metrics.write_bytes(b"".join(map(to_line, lines)))


def ended(run_dir: RunDir, plan: Plan, **changes: Any) -> Run:
    submitted: JobSubmitted = a_job(run_dir.path, backend="slurm", plan=plan, **changes)
    return replace(Job().running().run, job=submitted)


def written(run_dir: RunDir) -> int:
    return len(recall(path_of(run_dir.path.parent)))


def test_a_job_leaves_what_it_ran_and_how_fast(
    run_dir: RunDir, job: tuple[Plan, TrainingConfig]
) -> None:
    plan, config = job
    run = ended(run_dir, plan)
    write_speed(run_dir, run)
    write_speed(run_dir, run)
    (found,) = recall(path_of(run_dir.path.parent))
    assert found.setup == setup_of_training(config, plan)
    assert (found.setup.dtype, found.setup.mesh) == ("bfloat16", plan.mesh)
    assert (found.backend, found.profile) == ("slurm", "h100-sxm-80gb")
    assert (found.steps, found.step_s) == (STEPS - 5, 9.5)
    assert (found.hosts, found.devices_per_host) == (1, 8)


def test_a_job_with_drills_waiting_for_data_or_with_few_steps_leaves_nothing(
    run_dir: RunDir, job: tuple[Plan, TrainingConfig]
) -> None:
    plan, _ = job
    write_speed(run_dir, ended(run_dir, plan, drills=(parse_drill("kill:rank=1@step=25", 1),)))
    write_speed(run_dir, ended(run_dir, replace(plan, time=None)))
    trained(run_dir, data_s=2.0)
    write_speed(run_dir, ended(run_dir, plan))
    trained(run_dir, steps=FEWEST_STEPS + 4)
    write_speed(run_dir, ended(run_dir, plan))
    assert written(run_dir) == 0
    trained(run_dir, steps=FEWEST_STEPS + 5)
    write_speed(run_dir, ended(run_dir, plan))
    assert written(run_dir) == 1


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model": 1}', "\x00\xff"])
def test_damaged_files_end_no_leader(
    run_dir: RunDir, job: tuple[Plan, TrainingConfig], content: str
) -> None:
    run_dir.trainer_config(1).write_text(content)
    write_speed(run_dir, ended(run_dir, job[0]))
    run_dir.trainer_config(1).unlink()
    write_speed(run_dir, ended(run_dir, job[0]))
    run_dir.metrics.write_text(content)
    write_speed(run_dir, ended(run_dir, job[0]))
    assert written(run_dir) == 0


def test_a_run_root_that_cannot_be_written_is_only_logged(
    run_dir: RunDir, job: tuple[Plan, TrainingConfig], caplog: pytest.LogCaptureFixture
) -> None:
    path_of(run_dir.path.parent).parent.write_text("no folder")
    write_speed(run_dir, ended(run_dir, job[0]))
    assert "failed to record the speed of the job" in caplog.text
