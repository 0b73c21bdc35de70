"""How long an optimizer step takes, and how many tokens a second that makes."""

from orchestrator.contract.plan import StepTime
from orchestrator.inventory.profile import Fabric
from orchestrator.plan.cost.machine import Machine, machine_of
from orchestrator.plan.cost.timeline import timeline
from orchestrator.plan.model.flops import flops_per_token
from orchestrator.plan.setup import Setup

ERROR = {"measured": 15, "derived": 25, "guessed": 50}
"""Per cent by which a prediction may be off, judged by what its numbers rest on; no step that was
measured has gone into this."""


def step_time(setup: Setup, fabric: Fabric) -> StepTime:
    """Of one step of `setup` on devices of `fabric`, hosts filled in rank order."""
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
        f"about {ERROR[certainty]} % either way: single operations of this device are {certainty},"
        " and whole steps have not been measured"
    )
