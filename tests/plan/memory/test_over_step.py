"""Memory of a rank over a step."""

from pathlib import Path

import pytest

from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.load import of_the_trainer, read_spec
from orchestrator.plan.memory.over_step import MemoryOverStep, over_step
from orchestrator.plan.planner import plan
from orchestrator.plan.setup import setup_of_plan
from tests.plan.cost.setups import LLAMA_8B
from tests.plan.test_golden import h100

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama3-8b.yaml"


def drawn(*overrides: str) -> tuple[MemoryOverStep, ...]:
    spec = of_the_trainer(read_spec(EXAMPLE, overrides), "a test")
    found = plan(spec, h100(), PRESETS["llama3-8b"])
    return over_step(setup_of_plan(spec, found, LLAMA_8B), found)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.dtype=auto", "parallel.tp=2"),
        ("parallel.pp=2", "parallel.pipeline.schedule=1f1b"),
        ("parallel.pp=2", "parallel.pipeline.schedule=zbv"),
        ("parallel.pp=2", "parallel.pipeline.schedule=interleaved_1f1b"),
        ("model.lora={quantize: nf4}",),
        ("model.lora={}", "parallel.data=zero1"),
        ("parallel.fsdp.cpu_offload=true",),
        ("train.activation_checkpointing=every_k",),
    ],
    ids=str,
)
def test_the_highest_point_is_the_peak_of_the_plan(overrides: tuple[str, ...]) -> None:
    """So the setup of the plan is the one that the search decided."""
    for one in drawn(*overrides):
        highest = max(sample.total for sample in one.samples)
        # Each item is rounded up to whole bytes.
        assert highest == pytest.approx(one.memory.peak_bytes, abs=16)


def test_a_step_goes_from_left_to_right_and_ends_as_it_began() -> None:
    (one,) = drawn("train.activation_checkpointing=none", "train.micro_batch_size=1")
    places = [sample.at for sample in one.samples]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, 1.0)
    first, last = one.samples[0], one.samples[-1]
    for item in ("parameters", "optimizer"):
        assert first.items[item] == last.items[item]
    assert "activations" not in last.items
    peak = max(one.samples, key=lambda sample: sample.total)
    assert peak.when == "head and loss"
