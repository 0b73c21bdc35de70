"""Prepares the micro batches of the next steps in a background thread.

The samples of a step do not depend on when they are read, so this changes only the waiting time.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from trainer.data.batches import Batches, MicroBatch, StepBatches
from trainer.data.ledger import NOTHING, Sums

DEPTH = 2
"""Steps that are prepared ahead of the current one."""


class Loader:
    """The micro batches of consecutive steps, from any first step on.

    Use it as a context manager, which ends its thread. If reading fails, `of_step` of the step that
    needs the data raises the same error.
    """

    def __init__(
        self, batches: Batches, depth: int = DEPTH, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._batches = batches
        self._depth = depth
        self._clock = clock
        self._ahead: deque[tuple[int, Future[StepBatches]]] = deque()
        self._reader = ThreadPoolExecutor(1, "loader", initializer=_use, initargs=(batches.device,))
        self.wait_s = 0.0
        """Seconds that the last step waited for its data."""
        self.read: Sums = NOTHING
        """Checksums of the last step's samples, for the ledger."""

    def of_step(self, step: int) -> list[MicroBatch]:
        """The micro batches of `step`, counted from 1, on the device."""
        # The trainer asks for consecutive steps; after any other request the queue is of no use.
        if self._ahead and self._ahead[0][0] != step:
            self._forget()
        self._fill(step)
        begun = self._clock()
        ready = self._ahead.popleft()[1].result()
        self.wait_s = self._clock() - begun
        self._fill(step + 1)
        self.read = ready.read
        return [micro.on(self._batches.device) for micro in ready.micro_batches]

    def stall(self) -> None:
        """Block all further reads, as hung storage would (for drills)."""
        self._forget()
        self._reader.submit(threading.Event().wait)

    def close(self) -> None:
        self._forget()
        self._reader.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fill(self, step: int) -> None:
        """Start to read `step` and the steps after it."""
        for number in range(step + len(self._ahead), step + self._depth):
            self._ahead.append((number, self._reader.submit(self._read, number)))

    def _forget(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _read(self, step: int) -> StepBatches:
        ready = self._batches.read_step(step)
        if self._batches.device.type != "cuda":
            return ready
        return StepBatches([micro.pinned() for micro in ready.micro_batches], ready.read)


def _use(device: torch.device) -> None:
    # Pinning memory needs a CUDA context. Without this, the thread would create one on GPU 0.
    if device.type == "cuda":
        torch.cuda.set_device(device)
