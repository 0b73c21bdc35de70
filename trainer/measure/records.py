"""Writes what rank 0 records of each step, in a thread: ledger, metrics and the line of the log.

Each write reads the fence and appends to a file, both on a shared file system, where that may take
longer than a step. Training does not wait for it. What the files promise stays the same: the fence
is read just before each write, lines are written in order, and `sync` returns when all lines of the
steps before it are on the disk. A rank that is killed loses the lines that still waited. They are
of steps after the newest checkpoint, which the next attempt repeats.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from trainer.data.ledger import SampleLedger, Sums
from trainer.measure.metrics import StepMetrics
from trainer.measure.report import Report

ROOM = 1024
"""Steps that may wait to be written. If storage hangs for longer, training waits too."""
LAST_WORDS_S = 10.0
"""Limit for the last lines of a rank that fails: its agent waits for it to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    metrics: StepMetrics
    """Without the memory, which is measured when the record is written."""
    read: Sums


class Records:
    """Exists on rank 0 only. Use it as a context manager, which writes what still waits."""

    def __init__(
        self,
        ledger: SampleLedger,
        report: Report,
        *,
        peak_memory_bytes: Callable[[], int],
        gpu: Callable[[], Mapping[str, Any]] = dict,
        log: Callable[[StepMetrics], None],
        room: int = ROOM,
    ) -> None:
        """
        Args:
            gpu: the state of rank 0's GPU, as fields of StepMetrics.
        """
        self._ledger, self._report = ledger, report
        self._peak_memory_bytes, self._log = peak_memory_bytes, log
        self._gpu = gpu
        self._room = room
        self._changed = threading.Condition()
        self._waiting: deque[StepRecord] = deque()
        self._added = self._written = 0
        """Numbers of steps."""
        self._after: list[tuple[int, Callable[[], None]]] = []
        """Number of steps -> called when so many are written."""
        self._failed: Exception | None = None
        """What ended the thread: most likely, a later attempt has started."""
        self._closing = False
        self._files = threading.Lock()
        """Held while the files are in use. A checkpoint's thread syncs them too."""
        # A daemon, because a process must be able to end although storage hangs.
        self._thread = threading.Thread(target=self._work, name="records", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """`add` would wait."""
        return len(self._waiting) >= self._room

    def add(self, record: StepRecord) -> None:
        """Have the record of a step written. Waits only while `full`.

        Raises:
            GivenUp: a later attempt has started, so this one no longer writes.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not self.full)
            self._raise_failure()
            self._waiting.append(record)
            self._added += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when all added records are written, or kept by their file for a disk that is full.

        Raises:
            GivenUp: as `add`.
        """
        with self._changed:
            added = self._added
            self._changed.wait_for(lambda: self._failed or self._written >= added, timeout_s)
            self._raise_failure()

    def written(self, then: Callable[[], None]) -> None:
        """Call `then` once all records added so far are written, at once or in the thread. It is
        never called if they cannot be written."""
        with self._changed:
            if self._written < self._added:
                self._after.append((self._added, then))
                return
        then()

    def sync(self) -> None:
        """Return when the ledger has the lines of all added steps on the disk, or could not write
        them, with a warning. To be called before a checkpoint becomes complete, by any thread.

        Raises:
            GivenUp: as `add`.
        """
        self.flush()
        with self._files:
            self._ledger.sync()

    def close(self, timeout_s: float | None = None) -> None:
        """Write what still waits, for at most `timeout_s`, and close the files.

        Raises:
            GivenUp: as `add`.
        """
        try:
            self.flush(timeout_s)
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join(timeout_s)
            # Files that the thread still uses are left to the end of the process.
            if not self._thread.is_alive():
                self._report.close()
                self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exc is None:
            self.close()
            return
        try:
            self.close(LAST_WORDS_S)
        except Exception as failed:  # noqa: BLE001 (must not hide the exception that ends the rank)
            exc.add_note(f"the last records were not written: {failed}")

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _work(self) -> None:
        try:
            while batch := self._next():
                with self._files:
                    self._write(batch)
                for then in self._count(len(batch)):
                    then()
        except Exception as exc:  # noqa: BLE001 (raised again by the next call of `add`)
            with self._changed:
                self._failed = exc
                self._changed.notify_all()

    def _count(self, steps: int) -> Sequence[Callable[[], None]]:
        """Count `steps` more as written; what to call now."""
        with self._changed:
            self._written += steps
            self._changed.notify_all()
            ready = [then for number, then in self._after if number <= self._written]
            self._after = [one for one in self._after if one[0] > self._written]
        return ready

    def _next(self) -> Sequence[StepRecord]:
        """All records that wait, at least one; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            batch = tuple(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return batch

    def _write(self, batch: Sequence[StepRecord]) -> None:
        self._ledger.append(*((record.metrics.step, record.read) for record in batch))
        memory, gpu = self._peak_memory_bytes(), self._gpu()
        steps = [replace(record.metrics, peak_memory_bytes=memory, **gpu) for record in batch]
        self._report.write(*steps)
        for metrics in steps:
            self._log(metrics)
