"""Records how fast a job was, so that plans of later jobs can be corrected.

A job counts if its steps were steady for long enough, if none of them was slowed down on purpose,
and if they did not wait for data.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from orchestrator.contract.codec import decode
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.read_json import read_json
from orchestrator.dashboard.measured.steady import attempts_of_plan, read_steady
from orchestrator.errors import NdctlError
from orchestrator.job.state import Run
from orchestrator.plan.history.record import (
    FEWEST_STEPS,
    MOST_DATA,
    SpeedRecord,
    is_sound,
    setup_of_training,
)
from orchestrator.speed_history import path_of, remember

log = logging.getLogger(__name__)


def write_speed(run_dir: RunDir, run: Run) -> None:
    """Append the record of an ended job to the history of its run root. Failures are only
    logged."""

    def training() -> TrainingConfig:
        body = read_json(run_dir.trainer_config(run.current.number).read_bytes())
        config: TrainingConfig = decode(TrainingConfig, body)
        return config

    append_speed(path_of(run_dir.path.parent), run_dir, run, training)


def append_speed(
    history: Path, run_dir: RunDir, run: Run, training: Callable[[], TrainingConfig]
) -> None:
    """As `write_speed`. `training` reads the configuration of the ranks."""
    try:
        record = record_of(run_dir, run, training)
        if record is not None:
            remember(history, record)
    except (OSError, ValueError, NdctlError) as exc:
        log.warning("failed to record the speed of the job for later plans: %s", exc)


def record_of(
    run_dir: RunDir, run: Run, training: Callable[[], TrainingConfig]
) -> SpeedRecord | None:
    """None if the job does not count.

    Raises:
        OSError, ValueError, NdctlError: a file of the run directory cannot be read.
    """
    job, plan = run.job, run.plan
    # Drills slow down or kill ranks on purpose.
    if job is None or job.drills or plan.time is None:
        return None
    steady = read_steady(run_dir.metrics, attempts_of_plan(run))
    if steady is None or steady.steps < FEWEST_STEPS or steady.data_share > MOST_DATA:
        return None
    record = SpeedRecord(
        at=run.last_at,
        job=job.launch.job,
        run_dir=str(run_dir.path),
        submitted=job.at,
        backend=job.backend,
        profile=plan.profile or "",
        hosts=len(plan.hosts),
        devices_per_host=plan.ranks_per_host,
        setup=setup_of_training(training(), plan),
        steps=steady.steps,
        step_s=steady.step_s,
        step_s_range=steady.step_s_range,
    )
    return record if is_sound(record) else None
