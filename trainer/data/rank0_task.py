"""Runs long work on rank 0 while the other ranks wait, without a timeout or a false hang."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from trainer.data.packing.pack import OnProgress, Progress
from trainer.rank.ranks import broadcast_from_rank0
from trainer.rank.reporter import Reporter

T = TypeVar("T")
POLL_S = 2.0
"""Between two broadcasts while rank 0 works."""


def run_on_rank0(work: Callable[[OnProgress], T], reporter: Reporter) -> T:
    """Run `work` on rank 0 and return its result on every rank, or raise its TrainingError there.

    The work may take hours. Rank 0 broadcasts every `POLL_S`, so that no collective times out. Each
    rank sends a heartbeat only if the work made progress, so its agent can tell work from a hang.
    """
    task = _Task(work) if dist.get_rank() == 0 else None
    seen = 0
    while True:
        # The lambda runs on rank 0 alone, where `task` exists.
        status = broadcast_from_rank0(lambda: task.status(POLL_S) if task else _Status(0))
        if status.result is not None:
            result: T = status.result[0]
            return result
        if status.count != seen:
            reporter.beat("init")
        seen = status.count


@dataclass(frozen=True, slots=True)
class _Status:
    count: int
    """Progress reports so far."""
    result: tuple[Any] | None = None
    """A tuple of one, because the result itself may be None."""


class _Task(Generic[T]):
    """Runs `work` in a daemon thread, so that it never delays the end of the process."""

    def __init__(self, work: Callable[[OnProgress], T]) -> None:
        self._work = work
        self._count = 0
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, name="pack", daemon=True).start()

    def status(self, wait_s: float) -> _Status:
        """The result if it arrives within `wait_s`, else the progress."""
        try:
            return _Status(self._count, (self._future.result(wait_s),))
        except TimeoutError:
            return _Status(self._count)

    def _run(self) -> None:
        try:
            self._future.set_result(self._work(self._on_progress))
        except BaseException as exc:  # noqa: BLE001 (`status` raises it again)
            self._future.set_exception(exc)

    def _on_progress(self, progress: Progress) -> None:
        self._count += 1
