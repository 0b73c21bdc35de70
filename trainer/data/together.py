"""What ranks do together at the start, without anyone waiting in vain for another."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from trainer.data.packing.pack import Progress, Say
from trainer.rank.emit import Reporter
from trainer.rank.ranks import shared_from_first

T = TypeVar("T")
PATIENCE_S = 2.0
"""Between two meetings of the ranks while the first one works."""


def wait_for_first(work: Callable[[Say], T], reporter: Reporter) -> T:
    """What `work` answers on rank 0, on every rank; or the TrainingError that it raises there.

    It may take hours. Meanwhile the ranks meet every few seconds, so that no collective times out,
    and each tells its agent as long as the work gets on: whoever watches sees the difference
    between work and a hang.
    """
    task = _Task(work) if dist.get_rank() == 0 else None
    seen = 0
    while True:
        # Only the first rank asks, and it has the task.
        news = shared_from_first(lambda: task.news(PATIENCE_S) if task else _News(0))
        if news.answer is not None:
            answer: T = news.answer[0]
            return answer
        if news.count != seen:
            reporter.beat("init")
        seen = news.count


@dataclass(frozen=True, slots=True)
class _News:
    count: int
    """How often the work has said that it gets on."""
    answer: tuple[Any] | None = None


class _Task(Generic[T]):
    """`work` in a thread of its own, which nobody waits for if the process has to end."""

    def __init__(self, work: Callable[[Say], T]) -> None:
        self._work = work
        self._count = 0
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, name="pack", daemon=True).start()

    def news(self, patience_s: float) -> _News:
        """The answer, as soon as there is one; else, after a while, how far the work is."""
        try:
            return _News(self._count, (self._future.result(patience_s),))
        except TimeoutError:
            return _News(self._count)

    def _run(self) -> None:
        try:
            self._future.set_result(self._work(self._say))
        except BaseException as exc:  # noqa: BLE001 (raised where the answer is asked for)
            self._future.set_exception(exc)

    def _say(self, progress: Progress) -> None:
        self._count += 1
