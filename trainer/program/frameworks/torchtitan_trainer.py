"""torchtitan's `Trainer`: reports its steps, metrics and saves, and stops it when ndctl asks.

It has no callbacks. But it asks `should_continue_training` before each step, also in subclasses
that have a training step of their own.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ndctl.rank.link import current
from ndctl.rank.place import place
from ndctl.rank.reporting import log
from ndctl.rank.stopping import should_stop
from trainer.program.frameworks.folder_marks import add_link, mark, report_saved
from trainer.program.frameworks.steps import Steps, checkpoint_phase

ATTRIBUTE = "_ndctl"


def add_to(module: ModuleType) -> None:
    """Add the calls to `torchtitan.trainer`."""
    trainer: Any = getattr(module, "Trainer", None)
    if not hasattr(trainer, "should_continue_training"):
        sys.stderr.write(
            "ndctl: this torchtitan has another Trainer than the versions that ndctl knows, so"
            " ndctl counts optimizer steps alone\n"
        )
        return
    trainer.should_continue_training = _asked(trainer.should_continue_training)


def _asked(proper: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(proper)
    def should_continue_training(self: Any) -> bool:
        goes_on = proper(self)
        calls: Calls | None = getattr(self, ATTRIBUTE, None)
        if calls is None:  # before the first step, after the checkpoint was loaded
            setattr(self, ATTRIBUTE, Calls(self))
            return goes_on
        calls.steps.done(self.step)
        return goes_on and not calls.stopped()

    return should_continue_training


class Calls:
    """The calls of ndctl for one Trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps = Steps()
        self.steps.begin(trainer.step)
        self.saved = 0
        """The last step with a checkpoint of this process."""
        trainer.metrics_processor.log = self._logged(trainer.metrics_processor.log)
        trainer.checkpointer.save = self._reported(trainer.checkpointer.save)

    def stopped(self) -> bool:
        """Whether to leave now, with a checkpoint of this step."""
        saver, step = self.trainer.checkpointer, self.trainer.step
        # Without checkpoints nothing is gained, and SIGTERM ends the rank as without ndctl.
        if not saver.enable or saver.load_only or not should_stop():
            return False
        if self.saved != step:
            # Not as the last step, which by default saves the model alone.
            interval, saver.interval = saver.interval, 1
            saver.save(step)
            saver.interval = interval
        saver.maybe_wait_for_saving()
        return True

    def _logged(self, proper: Callable[..., Any]) -> Callable[..., Any]:
        """`MetricsProcessor.log`, which torchtitan calls at each `metrics.log_freq`."""

        @functools.wraps(proper)
        def logged(
            step: int, loss: float, highest: float, grad_norm: float, *more: Any, **named: Any
        ) -> Any:
            # Other stages of a pipeline do not know the loss.
            known = getattr(self.trainer, "pp_has_last_stage", True)
            loss_of_step = loss if known else None
            log(self.steps.earlier + step, loss=loss_of_step, grad_norm=grad_norm)
            return proper(step, loss, highest, grad_norm, *more, **named)

        return logged

    def _reported(self, proper: Callable[..., bool]) -> Callable[..., bool]:
        """`save` of the checkpoint manager, which may write in the background."""

        @functools.wraps(proper)
        def save(step: int, *more: Any, **named: Any) -> bool:
            with checkpoint_phase():
                begun = proper(step, *more, **named)
                if not begun:
                    return False
                self.saved = step
                written = getattr(self.trainer.checkpointer, "save_future", None)
                if written is None:
                    self._tell(step)
                else:
                    written.add_done_callback(functools.partial(self._written, step))
            return True

        return save

    def _written(self, step: int, done: Any) -> None:
        """In the thread that has written. torchtitan itself raises if it failed."""
        if done.exception() is None:
            self._tell(step)

    def _tell(self, step: int) -> None:
        """On rank 0, which writes the metadata when all ranks have written their parts."""
        link = current()
        if link.rank != 0:
            return
        done = self.steps.earlier + step
        folder = Path(self.trainer.checkpointer.folder) / f"step-{step}"

        def add() -> None:
            if folder.is_dir():  # it is not in an object store
                mark(folder, done, link)
                add_link(place().checkpoints, folder, done)

        report_saved(done, add)
