"""Plans and records of jobs, for tests of what later plans learn from them."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.app.planning.plans import plan_spec
from orchestrator.contract.codec import decode, encode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.plan import Plan
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.history.record import SpeedRecord, setup_of_training
from orchestrator.plan.setup import Setup
from orchestrator.plan.training import trainer_config

EXAMPLES = Path(__file__).parents[3] / "examples"
H100 = Fabric(profile=load_profile("h100-sxm-80gb"), hosts=1, devices_per_host=8)


def planned(*settings: str, spec: str = "llama3-8b.yaml", gpu: str = "h100-sxm-80gb") -> Plan:
    return ran(*settings, spec=spec, gpu=gpu)[0]


def ran(
    *settings: str, spec: str = "llama3-8b.yaml", gpu: str = "h100-sxm-80gb"
) -> tuple[Plan, TrainingConfig]:
    """The plan of an example, and the configuration of its ranks as the run directory has it."""
    found = plan_spec(EXAMPLES / spec, (*settings, f"cluster.gpu={gpu}"), {}, purpose="predict")
    job: Any = found.spec
    written = encode(trainer_config(job, found.plan, found.model_config, "/runs/job"))
    config: TrainingConfig = decode(TrainingConfig, written)
    return found.plan, config


def setup(*settings: str, **more: str) -> Setup:
    plan, config = ran(*settings, **more)
    return setup_of_training(config, plan)


def record(
    one: Setup, slowness: float = 1.0, number: int = 1, fabric: Fabric = H100, **changes: Any
) -> SpeedRecord:
    """A job whose steps took `slowness` times as long as this planner predicts."""
    step_s = slowness * step_time(one, fabric).step_s
    made = SpeedRecord(
        at=1_800_000_000.0 + number,
        job=f"job-{number}",
        run_dir=f"/runs/job-{number}",
        submitted=1_800_000_000.0,
        backend="slurm",
        profile=fabric.profile.name,
        hosts=fabric.hosts,
        devices_per_host=fabric.devices_per_host,
        setup=one,
        steps=200,
        step_s=step_s,
        step_s_range=(0.98 * step_s, 1.04 * step_s),
    )
    return replace(made, **changes)
