"""Sees the progress of an unchanged script: optimizer steps, evaluation, saves and loader workers.

torch calls a global hook after each optimizer step. `Module.eval()` begins an evaluation, and
`torch.save` or `torch.distributed.checkpoint.save` a checkpoint. A `DataLoader` starts and ends its
workers with each epoch. These would otherwise look like a hang, because no step is done meanwhile.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ndctl.rank.link import Link
from trainer.program.after_import import after_import
from trainer.program.step_log import StepLog

OTHERS_STEPS = 3
"""The optimizer that is counted changes when another one has stepped so often since its last step,
for example after a warm-up that has an optimizer of its own."""


def report_steps(link: Link, log: StepLog, first_step: Callable[[], None]) -> None:
    """Report each optimizer step. `first_step` is called after the first one."""
    if not link.active:
        return
    steps = OptimizerSteps(link, log, first_step)
    after_import(
        "torch.optim.optimizer",
        lambda torch: torch.register_optimizer_step_post_hook(steps.stepped),
    )
    after_import("torch.distributed.checkpoint.state_dict", steps.skip_initialization)
    after_import("torch.nn.modules.module", functools.partial(_report_eval, link))
    after_import("torch.serialization", functools.partial(_report_save, link))
    after_import(
        "torch.distributed.checkpoint.state_dict_saver", functools.partial(_report_save, link)
    )
    after_import("torch.utils.data.dataloader", functools.partial(_report_workers, link))


class OptimizerSteps:
    """Counts the steps of one optimizer, though a script may have several (a GAN has two)."""

    def __init__(self, link: Link, log: StepLog, first_step: Callable[[], None]) -> None:
        self.link, self.log = link, log
        self.first_step: Callable[[], None] | None = first_step
        self.counted: weakref.ref[Any] | None = None
        self.others = 0
        """Steps of other optimizers since the last step of the counted one."""
        self.initializing = False

    def skip_initialization(self, module: ModuleType) -> None:
        """Do not count the step that torch makes with zero gradients to fill an optimizer's state,
        before `get_state_dict` gives it to a script that resumes."""
        proper = getattr(module, "_init_optim_state", None)
        if proper is None:  # another version of torch may do without the step
            return

        @functools.wraps(proper)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            self.initializing = True
            try:
                return proper(*args, **kwargs)
            finally:
                self.initializing = False

        module._init_optim_state = initialize  # type: ignore[attr-defined]

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.initializing:
            return
        if self.counted is None or self.counted() is None or self.others >= OTHERS_STEPS:
            self.counted = weakref.ref(optimizer)
        if self.counted() is not optimizer:
            self.others += 1
            return
        self.others = 0
        if not self.link.logged:
            self.link.stepped()
            self.log.stepped(self.link.step)
        if self.first_step is not None:
            first, self.first_step = self.first_step, None
            first()

    # In a compiled step, Dynamo must not look inside. This is what `torch.compiler.disable` sets,
    # whose import takes a second.
    stepped._torchdynamo_disable = True  # type: ignore[attr-defined]


def _report_eval(link: Link, module: ModuleType) -> None:
    """Report `Module.eval()` as the beginning of an evaluation, and `train()` as its end."""
    cls: Any = module.Module
    proper = cls.train
    depth = 0

    @functools.wraps(proper)
    def train(self: Any, mode: bool = True) -> Any:
        # torch calls it again for each child.
        nonlocal depth
        depth += 1
        try:
            return proper(self, mode)
        finally:
            depth -= 1
            if depth == 0 and link.phase in ("train", "eval"):
                link.beat("train" if mode else "eval")

    cls.train = train


def _report_save(link: Link, module: ModuleType) -> None:
    """Report `save` of the module as a checkpoint."""
    proper = module.save
    # Its package has the function under the same name. In a forked rank it is imported already.
    packages = (sys.modules.get(name) for name in ("torch", "torch.distributed.checkpoint"))
    holders = [one for one in (module, *packages) if getattr(one, "save", None) is proper]

    @functools.wraps(proper)
    def save(*args: Any, **kwargs: Any) -> Any:
        before = link.phase
        if before == "checkpoint":
            return proper(*args, **kwargs)
        link.beat("checkpoint")
        try:
            return proper(*args, **kwargs)
        finally:
            link.beat(before)

    for holder in holders:
        holder.save = save  # type: ignore[union-attr]


def _report_workers(link: Link, module: ModuleType) -> None:
    """Report waits for workers of a DataLoader to start or end as the phase `data`.

    A spawned worker imports torch before its first batch, which takes several seconds.
    """
    cls: Any = getattr(module, "_MultiProcessingDataLoaderIter", None)
    # `_reset` begins another epoch with workers that were kept.
    names = ("__init__", "_reset", "_shutdown_workers", "_next_data")
    if not all(hasattr(cls, name) for name in names):  # another version of torch
        return
    for name in names[:3]:
        setattr(cls, name, _in_phase_data(link, getattr(cls, name)))
    next_data = cls._next_data
    first_data = _in_phase_data(link, next_data)

    @functools.wraps(next_data)
    def next_of_worker(self: Any) -> Any:
        # Workers take turns, so each of the first batches is the first one of a worker.
        if getattr(self, "_num_yielded", 0) < getattr(self, "_num_workers", 0):
            return first_data(self)
        return next_data(self)

    cls._next_data = next_of_worker


def _in_phase_data(link: Link, proper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(proper)
    def wait(*args: Any, **kwargs: Any) -> Any:
        call = object()
        link.loading.add(call)
        link.beat()
        try:
            return proper(*args, **kwargs)
        finally:
            link.loading.discard(call)
            link.beat()

    return wait
