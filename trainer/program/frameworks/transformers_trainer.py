"""`transformers.Trainer`: reports its steps, metrics and saves, and stops it when ndctl asks.

A callback is added to those that each Trainer has. The method that saves a checkpoint is wrapped,
because callbacks hear of a save only at its end. `get_last_checkpoint` skips torn checkpoints.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ndctl.rank.reporting import log
from ndctl.rank.stopping import should_stop
from trainer.program.frameworks.folder_marks import FolderSave, folder_save
from trainer.program.frameworks.last_checkpoint import skip_torn, skipped
from trainer.program.frameworks.steps import Steps, checkpoint_phase

SUMMARY = "train_runtime"
"""In the metrics of the whole training, which are no metrics of its last step."""
NAMES = {"learning_rate": "lr"}
"""Metrics whose name differs from that of the bundled trainer."""
TAKEN = ("attempt", "step", "time")

_saving: FolderSave | None = None


def add_to(module: ModuleType) -> None:
    """Add the callback and the other changes to `transformers.trainer`."""
    trainer: Any = getattr(module, "Trainer", None)
    known = ("DEFAULT_CALLBACKS", "TrainerCallback", "get_last_checkpoint", "rotate_checkpoints")
    if not hasattr(trainer, "_save_checkpoint") or not all(hasattr(module, one) for one in known):
        version = getattr(sys.modules.get("transformers"), "__version__", "")
        sys.stderr.write(
            f"ndctl: transformers {version} has another Trainer than the versions that ndctl"
            " knows, so ndctl counts optimizer steps alone; use `import ndctl` in the script\n"
        )
        return
    names: Any = module
    callback = type("NdctlCallback", (Calls, names.TrainerCallback), {})
    names.DEFAULT_CALLBACKS.append(callback)
    skip_torn(module)
    trainer._save_checkpoint = _marked(trainer._save_checkpoint)
    names.rotate_checkpoints = _after_completion(names.rotate_checkpoints)


class Calls:
    """The methods of the callback. Its other base is transformers' class, which this module must
    not import: most scripts do not need it."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.logged: tuple[int, Any] = (0, None)
        """The last step with a loss, and the loss."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.begin(state.global_step, skipped)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.done(state.global_step)
        # Without checkpoints nothing is gained, and SIGTERM ends the rank as without ndctl.
        if args.save_strategy != "no" and should_stop():
            control.should_save = True
            control.should_training_stop = True
            # It may take longer than the job has.
            control.should_evaluate = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs: Mapping[str, Any] = kwargs["logs"]
        if SUMMARY in logs:
            return
        step = self.steps.earlier + state.global_step
        if "loss" in logs:
            self.logged = step, logs["loss"]
        # The metrics of an evaluation have no loss of the training.
        loss = self.logged[1] if self.logged[0] == step else None
        more = {
            NAMES.get(name, name): value
            for name, value in logs.items()
            if name not in ("loss", *TAKEN) and isinstance(value, int | float | str)
        }
        log(step, loss=loss, **more)


def _marked(proper: Any) -> Any:
    """`Trainer._save_checkpoint` in the phase `checkpoint`, with marks in the folder."""

    @functools.wraps(proper)
    def save(self: Any, model: Any, trial: Any, *args: Any, **kwargs: Any) -> Any:
        global _saving
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{step}"
        _saving = folder_save(folder, step, marks=self.args.should_save)
        try:
            with checkpoint_phase(), _saving.written():
                return proper(self, model, trial, *args, **kwargs)
        finally:
            _saving = None

    return save


def _after_completion(proper: Any) -> Any:
    """`rotate_checkpoints`, which removes old ones, after the new one is complete on all ranks."""

    @functools.wraps(proper)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        if _saving is not None:
            _saving.complete()
        return proper(*args, **kwargs)

    return rotate
