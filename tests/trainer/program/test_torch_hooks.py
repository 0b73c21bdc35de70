"""Optimizer steps of a script, counted through torch's hook."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict, state_dict_saver
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, dataloader

from ndctl.rank.link import Link
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.run_dir import RunDir
from trainer.program.step_log import StepLog
from trainer.program.torch_hooks import (
    OTHERS_STEPS,
    OptimizerSteps,
    _in_phase_data,
    _report_eval,
    _report_save,
    _report_workers,
)


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


def step_of(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)


def test_of_several_optimizers_the_steps_of_one_are_counted(steps: OptimizerSteps) -> None:
    generator, critic = sgd(), sgd()
    for number in range(1, 5):
        step_of(generator)
        step_of(critic)
        assert steps.link.step == number


def test_after_a_warm_up_the_next_optimizer_is_counted(steps: OptimizerSteps) -> None:
    warm_up, proper = sgd(), sgd()
    step_of(warm_up)
    for _ in range(OTHERS_STEPS):
        step_of(proper)
    assert steps.link.step == 1, "it may be a second optimizer"
    step_of(proper)
    assert steps.link.step == 2


def test_the_first_step_is_told_once_and_steps_that_a_script_reports_are_not_counted(
    steps: OptimizerSteps,
) -> None:
    told = []
    steps.first_step = lambda: told.append(steps.link.step)
    optimizer = sgd()
    step_of(optimizer)
    steps.link.logged = True
    step_of(optimizer)
    assert told == [1]
    assert steps.link.step == 1


def test_evaluations_and_saves_are_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, seen = Link({}), list[str]()
    link.phase = "train"

    def beat(phase: str) -> None:
        seen.append(phase)
        link.phase = phase

    monkeypatch.setattr(link, "beat", beat)
    monkeypatch.setattr(torch.nn.Module, "train", torch.nn.Module.train)
    for holder in (torch, torch.serialization):
        monkeypatch.setattr(holder, "save", torch.save)
    _report_eval(link, torch.nn.modules.module)
    _report_save(link, torch.serialization)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1)))
    model.eval()
    torch.save(model.state_dict(), tmp_path / "best.pt")
    model.train()
    assert seen == ["eval", "checkpoint", "eval", "train"]
    # A model that is built before training is neither trained nor evaluated.
    link.phase = "init"
    model.eval()
    assert link.phase == "init"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_is_a_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, seen = Link({}), list[str]()
    link.phase = "train"
    monkeypatch.setattr(link, "beat", seen.append)
    for holder in (dcp, state_dict_saver):
        monkeypatch.setattr(holder, "save", state_dict_saver.save)
    _report_save(link, state_dict_saver)
    vars(dcp)["save"]({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert seen[0] == "checkpoint"
    assert seen[-1] == "train"
    assert (tmp_path / "step-1" / ".metadata").exists()


def test_a_failed_save_ends_its_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link({})
    link.phase = "train"
    for holder in (torch, torch.serialization):
        monkeypatch.setattr(holder, "save", torch.save)
    _report_save(link, torch.serialization)
    with pytest.raises(RuntimeError):
        torch.save({}, tmp_path / "no" / "folder.pt")
    assert link.phase == "train"


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


def test_steps_of_a_compiled_optimizer_are_counted_without_a_warning(steps: OptimizerSteps) -> None:
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 1).parameters(), lr=torch.tensor(1e-3))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    compiled = torch.compile(optimizer.step, backend="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled()
        compiled()
    assert steps.link.step == 2
    assert not [one for one in said if "does not know how to trace" in str(one.message)]


WORKERS = 2


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index


class Broken(Samples):
    def __getitem__(self, index: int) -> int:
        raise OSError("no such sample")


class LinkOfTest(Link):
    def __init__(self) -> None:
        super().__init__({})
        self.phase = "train"
        self.sent: list[str] = []
        """The phase of each report."""

    def _send(self, message: Mapping[str, Any], *, wait: bool) -> None:
        self.sent.append(message["phase"])

    def phases(self) -> list[str]:
        """Phases since the last call, each once in a row."""
        sent, self.sent = self.sent, []
        return [one for n, one in enumerate(sent) if n == 0 or one != sent[n - 1]]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> LinkOfTest:
    cls = dataloader._MultiProcessingDataLoaderIter
    for name in ("__init__", "_reset", "_next_data", "_shutdown_workers"):
        monkeypatch.setattr(cls, name, vars(cls)[name])
    link = LinkOfTest()
    _report_workers(link, dataloader)
    return link


def loader(samples: Dataset[int], **more: Any) -> DataLoader[int]:
    return DataLoader(samples, num_workers=WORKERS, multiprocessing_context="fork", **more)


def test_only_batches_that_wait_for_workers_are_a_phase(link: LinkOfTest) -> None:
    batches = iter(loader(Samples()))
    assert link.phases() == ["data", "train"]
    each = [link.phases() for _ in batches]
    assert each == [["data", "train"]] * WORKERS + [[]] * (len(Samples()) - WORKERS)
    assert link.phases() == ["data", "train"], "the workers end"
    assert [int(one) for one in loader(Samples())] == [*range(5)]


def test_workers_that_are_kept_begin_each_epoch_in_the_phase_and_end_in_it(
    link: LinkOfTest,
) -> None:
    kept = loader(Samples(), persistent_workers=True)
    assert len([*kept]) == 5
    link.phases()
    again = iter(kept)
    assert link.phases() == ["data", "train"]
    next(again)
    assert link.phases() == ["data", "train"]
    del kept, again
    assert link.phases() == ["data", "train"]


def test_an_error_or_a_break_in_an_epoch_ends_the_phase(link: LinkOfTest) -> None:
    with pytest.raises(OSError, match="no such sample"):
        next(iter(loader(Broken())))
    assert link.sent[-1] == "train"
    for _ in loader(Samples()):
        break
    assert link.sent[-1] == "train"
    assert not link.loading


def test_workers_that_start_in_an_evaluation_or_before_training_change_no_phase(
    link: LinkOfTest,
) -> None:
    for phase in ("init", "eval"):
        link.phase = phase
        assert len([*loader(Samples())]) == 5
        assert link.phases() == [phase]


def test_a_step_does_not_end_the_wait_of_a_thread_that_fetches_batches(link: LinkOfTest) -> None:
    nested = _in_phase_data(link, lambda: link.stepped())
    _in_phase_data(link, lambda: nested())()
    assert link.phases() == ["data", "train"]
    assert (link.step, link.phase) == (1, "train")


def test_a_loader_without_workers_and_a_torch_without_these_names_work_as_before(
    link: LinkOfTest,
) -> None:
    assert len([*DataLoader(Samples())]) == 5
    assert link.sent == []
    _report_workers(link, ModuleType("torch.utils.data.dataloader"))
