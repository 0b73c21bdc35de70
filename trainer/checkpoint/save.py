"""Writes checkpoints: each rank its shards, in the background, one save at a time."""

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from orchestrator.contract.checkpoints import partial_name
from orchestrator.contract.spec import CheckpointSpec
from trainer.checkpoint.commit import commit, remove_old
from trainer.checkpoint.state import TrainingState
from trainer.emit import Reporter
from trainer.ranks import shared_from_first

LOG = logging.getLogger("trainer")


class Checkpoints:
    """The checkpoint folder of a job, as one rank writes to it.

    Every method is called by all ranks at the same step.
    """

    def __init__(
        self, folder: Path, state: TrainingState, spec: CheckpointSpec, reporter: Reporter
    ) -> None:
        self._folder = folder
        self._state = state
        self._spec = spec
        self._reporter = reporter
        self._env = state.ranks.env
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[None] | None = None

    def save(self, step: int) -> None:
        """A periodic save; a failure is a warning, for the ones before it are still there."""
        if self._spec.async_:
            self._save_in_background(step)
        elif error := self._save_now(step):
            self._warn(step, error)

    def save_for_sure(self, step: int) -> None:
        """A save whose outcome matters: returns when it is complete, raises when it failed."""
        error = self._save_now(step)
        # Rank 0 completes it; whoever leaves with "checkpointed" must know that it did.
        if failure := shared_from_first(lambda: str(error) if error else ""):
            raise RuntimeError(f"the checkpoint of step {step} failed: {failure}") from error

    def _save_now(self, step: int) -> BaseException | None:
        snapshot, partial = self._prepare(step)
        try:
            save(snapshot, checkpoint_id=partial, process_group=self._group)
            self._commit(partial, step)
        except (Exception, CheckpointException) as exc:  # noqa: BLE001 (told by the caller)
            return exc
        return None

    def _save_in_background(self, step: int) -> None:
        snapshot, partial = self._prepare(step)
        upload = async_save(snapshot, checkpoint_id=partial, process_group=self._group)
        # A stager that works in the background would give an AsyncSaveResponse; ours does not.
        assert not isinstance(upload, AsyncSaveResponse)
        self._pending = _followed_by(
            upload,
            lambda: self._commit(partial, step),
            lambda error: self._warn(step, error),
        )

    def _prepare(self, step: int) -> tuple[dict[str, Any], Path]:
        self.wait()
        if self._group is None:
            # A save in the background talks while training does: it needs a group of its own.
            self._group = dist.new_group(backend="gloo")
        partial = self._folder / partial_name(step, self._env.attempt)
        if self._env.rank == 0:
            # The others write only after rank 0 has joined the save, so after this.
            shutil.rmtree(partial, ignore_errors=True)
        return self._state.snapshot(step), partial

    def wait(self) -> None:
        """Return when no save is going on; its failure was told when it happened."""
        if self._pending is not None:
            self._pending.exception()
            self._pending = None

    def _commit(self, partial: Path, step: int) -> None:
        if self._env.rank != 0:
            return
        commit(partial, step=step, attempt=self._env.attempt, world_size=self._env.world_size)
        self._reporter.saved(step)
        LOG.info("checkpoint of step %d is complete", step)
        remove_old(self._folder, self._spec.keep)

    def _warn(self, step: int, error: BaseException) -> None:
        if self._env.rank == 0:
            LOG.warning("the checkpoint of step %d failed, training goes on: %s", step, error)


def _followed_by(
    upload: "Future[Any]", commit: Callable[[], None], warn: Callable[[BaseException], None]
) -> "Future[None]":
    """A future that is done when `upload` is and `commit` after it, in the thread of `upload`."""
    done: Future[None] = Future()

    def settle(finished: "Future[Any]") -> None:
        try:
            finished.result()
            commit()
        # torch's CheckpointException is not an Exception.
        except BaseException as exc:  # noqa: BLE001 (handed to `warn` and to whoever waits)
            warn(exc)
            done.set_exception(exc)
        else:
            done.set_result(None)

    upload.add_done_callback(settle)
    return done
