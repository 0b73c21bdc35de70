"""Lightning's `Trainer`: reports its steps, metrics and saves, and stops it when ndctl asks.

A callback is added to those that each Trainer has, in the way of Lightning's external callbacks.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ndctl.rank.link import current
from ndctl.rank.place import place
from ndctl.rank.reporting import log
from ndctl.rank.stopping import should_stop
from trainer.program.frameworks.folder_marks import add_file, report_saved
from trainer.program.frameworks.steps import Steps, checkpoint_phase

TAKEN = ("attempt", "epoch", "loss", "step", "time")


def add_to(module: ModuleType) -> None:
    """Add the callback and the report of saves to `lightning.pytorch.trainer.trainer`."""
    package = module.__name__.removesuffix(".trainer.trainer")
    connector: Any = sys.modules.get(f"{package}.trainer.connectors.callback_connector")
    exceptions: Any = sys.modules.get(f"{package}.utilities.exceptions")
    load = getattr(connector, "_load_external_callbacks", None)
    leave = getattr(exceptions, "_TunerExitException", None)
    trainer: Any = getattr(module, "Trainer", None)
    if load is None or leave is None or trainer is None:
        version = getattr(sys.modules.get(package), "__version__", "")
        sys.stderr.write(
            f"ndctl: {package} {version} has another Trainer than the versions that ndctl knows, so"
            " ndctl counts optimizer steps alone; use `import ndctl` in the script\n"
        )
        return
    callback = type("NdctlCallback", (Calls, connector.Callback), {"leave": leave})
    connector._load_external_callbacks = lambda group: [*load(group), callback()]
    trainer.save_checkpoint = _reported(trainer.save_checkpoint)


class Calls:
    """The methods of the callback. Its other base is Lightning's class, which this module must not
    import: most scripts do not need it."""

    leave: type[Exception]
    """Ends `fit` without an error, and without the validation and the saves of an epoch's end."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.handler: Any = None
        """The handler of SIGTERM without Lightning's."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # Without checkpoints nothing is gained, and SIGTERM ends the rank as without ndctl.
        # A ModelCheckpoint without `dirpath` chooses its folder after this call.
        if stage == "fit" and trainer.checkpoint_callbacks:
            should_stop()
            self.handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps.begin(trainer.global_step)
        if _saver(trainer) is None:
            self.handler = None
        if self.handler is not None:
            # Lightning's handler calls a collective, wherever the rank is at that time.
            signal.signal(signal.SIGTERM, self.handler)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before = current().step
        step = self.steps.done(trainer.global_step)
        if step == before:
            return  # gradients of this batch are accumulated
        if trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
            loss = outputs.get("loss") if isinstance(outputs, dict) else None
            known = {name: float(value) for name, value in trainer.callback_metrics.items()}
            log(step, loss=loss, **{k: value for k, value in known.items() if k not in TAKEN})
        if self.handler is not None and should_stop():
            saver = _saver(trainer)
            assert saver is not None
            trainer.save_checkpoint(saver)
            raise self.leave


def _saver(trainer: Any) -> str | None:
    """The file that `fit(ckpt_path="last")` finds; None if the Trainer saves no checkpoints."""
    for one in trainer.checkpoint_callbacks:
        if getattr(one, "dirpath", None):
            name = f"{one.CHECKPOINT_NAME_LAST}{one.FILE_EXTENSION}"
            return one.last_model_path or os.path.join(one.dirpath, name)  # noqa: PTH118 (a URL too)
    return None


def _reported(proper: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.save_checkpoint`, which returns on each rank after all have written."""

    @functools.wraps(proper)
    def save(
        self: Any, filepath: Any, weights_only: bool | None = None, *more: Any, **k: Any
    ) -> Any:
        with checkpoint_phase():
            result = proper(self, filepath, weights_only, *more, **k)
            if self.training and not weights_only and current().rank == 0:
                _report(Path(filepath))
        return result

    return save


_reported_steps: set[int] = set()
"""The last step with a checkpoint."""


def _report(file: Path) -> None:
    link = current()

    def add() -> None:
        if file.exists():  # it is not in an object store
            add_file(place().checkpoints, file, link.step, link)

    if link.step in _reported_steps:
        # Lightning has also written `last.ckpt` for this step, which later steps replace.
        with suppress(OSError):
            add()
        return
    _reported_steps.clear()
    _reported_steps.add(link.step)
    report_saved(link.step, add)
