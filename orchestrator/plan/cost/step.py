"""The predicted time of an optimizer step, its throughput and its accuracy."""

from orchestrator.contract.plan import StepTime
from orchestrator.inventory.profile import Fabric
from orchestrator.plan.cost.machine import Machine, machine_of
from orchestrator.plan.cost.timeline import timeline
from orchestrator.plan.model.flops import flops_per_token
from orchestrator.plan.setup import Setup

ERROR = {"measured": 15, "derived": 25, "guessed": 50}
"""Accuracy of a step time in percent, by how the profile's numbers were found. An estimate: no
measured step was used."""


def step_time(setup: Setup, fabric: Fabric) -> StepTime:
    """One step of `setup` on `fabric`; ranks fill hosts in order."""
    machine = machine_of(fabric)
    parts = timeline(setup, machine).parts
    step_s = sum(parts.values())
    speed = setup.tokens_of_step / (step_s * setup.mesh.world_size)
    peak = fabric.profile.flops[setup.dtype]
    return StepTime(
        step_s=step_s,
        tokens_per_second_per_device=speed,
        mfu=speed * flops_per_token(setup.shape, setup.tokens, setup.lora) / peak,
        parts=parts,
        confidence=_confidence(machine),
    )


def _confidence(machine: Machine) -> str:
    certainty = machine.calibration.certainty
    return (
        f"±{ERROR[certainty]} %, estimated: times of single operations on this device are"
        f" {certainty}, whole steps were not measured"
    )
