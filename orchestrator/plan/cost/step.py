"""The predicted time of an optimizer step, its throughput and its accuracy."""

from orchestrator.contract.plan import StepTime
from orchestrator.inventory.profile import Fabric
from orchestrator.plan.accuracy import speed_range
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.timeline import timeline
from orchestrator.plan.model.flops import flops_per_token
from orchestrator.plan.setup import Setup


def step_seconds(setup: Setup, fabric: Fabric) -> float:
    """The seconds of `step_time`, which also computes throughput and accuracy."""
    return sum(timeline(setup, machine_of(fabric)).parts.values())


def step_time(setup: Setup, fabric: Fabric) -> StepTime:
    """One step of `setup` on `fabric`; ranks fill hosts in order."""
    machine = machine_of(fabric)
    parts = timeline(setup, machine).parts
    step_s = sum(parts.values())
    speed = setup.tokens_of_step / (step_s * setup.mesh.world_size)
    peak = fabric.profile.flops[setup.dtype]
    flops = flops_per_token(setup.shape, setup.tokens, setup.lora, setup.document_tokens)
    found = speed_range(setup, machine.calibration, fabric.hosts)
    return StepTime(
        step_s=step_s,
        tokens_per_second_per_device=speed,
        mfu=speed * flops / peak,
        parts=parts,
        tokens_per_second_per_device_range=(speed * found.low, speed * found.high),
        confidence=found.basis,
        certainty=machine.calibration.certainty,
    )
