"""A `Handover` for tests: the payload that a submission passes to its backend."""

from pathlib import Path
from typing import Any

from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.submission_payload import Handover
from tests.agent.world import a_job


def handover_of(launch: LaunchPlan, **more: Any) -> Handover:
    """`more`: fields of the JobSubmitted event."""
    job = a_job(Path(launch.run_dir), launch=launch, at=0.0, **more)
    return Handover(job=job, spec="name: job\n", plan={"mesh": "2"}, trainer={"out": "/runs"})
