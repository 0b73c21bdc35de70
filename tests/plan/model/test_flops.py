"""The planner and the trainer report the same model FLOPs."""

from typing import Any

import pytest

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.flops import flops_per_token
from tests.plan.cost.setups import LLAMA_8B
from tests.trainer.launch.tiny_runs import LLAMA, QWEN3
from tests.trainer.measure.test_flops import LLAMA_8B as CONFIG_8B
from tests.trainer.measure.test_flops import alone, model
from trainer.measure import flops as trainer_flops


@pytest.mark.parametrize("config", [LLAMA, QWEN3, CONFIG_8B])
def test_planned_flops_equal_those_that_the_trainer_reports(config: dict[str, Any]) -> None:
    assert flops_per_token(shape_of(config), 32) == trainer_flops.flops_per_token(
        [model(config)], alone(), 32
    )


def test_frozen_weights_need_two_thirds_of_the_flops() -> None:
    full, frozen = (flops_per_token(LLAMA_8B, 0, lora) for lora in (None, LoraSpec(rank=1)))
    assert frozen / full == pytest.approx(2 / 3, rel=1e-3)
