"""Optimizer steps of a script, counted through torch's hook."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook

from ndctl.rank.link import Link
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.run_dir import RunDir
from trainer.program.step_log import StepLog
from trainer.program.torch_hooks import OptimizerSteps


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OptimizerSteps]:
    link = Link({})
    log = StepLog(link, RunDir(tmp_path), RankEnv.from_mapping({}))
    counted = OptimizerSteps(link, log, lambda: None)
    monkeypatch.setattr(state_dict, "_init_optim_state", state_dict._init_optim_state)
    counted.skip_initialization(state_dict)
    hook = register_optimizer_step_post_hook(counted.stepped)
    yield counted
    hook.remove()


def test_the_step_that_fills_an_optimizers_state_is_not_counted(steps: OptimizerSteps) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    # A script that resumes calls this before it loads its checkpoint.
    _, moments = state_dict.get_state_dict(model, optimizer)
    assert moments["state"], "torch made a step, else there were no state yet"
    assert steps.link.step == 0
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert steps.link.step == 1
