"""`ndctl.should_stop`: whether the ranks shall write a checkpoint and end, the same on all."""

import signal
import threading
import time
from types import FrameType
from typing import Any

from ndctl.rank.agreement import Ranks, ranks_of_script
from ndctl.rank.link import current

WINDOW_S = 1.0
"""Rank 0 decides for as many calls as ranks make in this time, so that agreement costs little even
if steps take milliseconds."""
MOST_CALLS = 64
"""For one decision. If steps become slower after it was made, it still covers so many of them."""
CALL = "ndctl.should_stop()"
TIMEOUT_S = 1800.0
ASKED = "ndctl/stop/asked"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def should_stop() -> bool:
    """Whether to write a checkpoint now and leave, because the job was asked to stop: it is
    preempted, its time is up, or it is cancelled with a grace period.

        if ndctl.should_stop():
            save(step)
            break

    All ranks get the same answer in the same call, so call it equally often on every rank. Call it
    once per step and keep the answer: the next call may have another one. The answer follows a
    signal after about a second and a step. Once it is true, it stays true. A program that then ends
    with exit code 0 has not finished: ndctl resumes it later.

    The first call installs handlers for SIGTERM and SIGUSR1, and must be made in the main thread.
    Before `torch.distributed.init_process_group`, each rank answers for itself.
    """
    global _vote
    if _vote is None:
        _vote = StopVote()
        for number in SIGNALS:
            _handle(number, _vote)
    link = current()
    link.stopped = _vote.ask(ranks_of_script(link.rank, link.world_size))
    return link.stopped


def _handle(number: signal.Signals, vote: "StopVote") -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "the first call of ndctl.should_stop must be in the main thread, because it installs"
            " signal handlers; call it once before you start threads"
        )
    former = signal.getsignal(number)

    def remember(signum: int, frame: FrameType | None) -> None:
        vote.signalled = True
        if callable(former):  # the script's own
            former(signum, frame)

    signal.signal(number, remember)


class StopVote:
    """One rank's view of whether all stop."""

    def __init__(self) -> None:
        self.signalled = False
        self.told = False
        """Rank 0 can see that this rank was signalled."""
        self.stopped = False
        self.calls = 0
        self.until = 0
        """The answer is known up to this call."""
        self.window = 0
        """Number of the next decision."""
        self.began = time.monotonic()
        self.length = 1
        """Calls that the last decision was for."""

    def ask(self, ranks: Ranks | None) -> bool:
        if self.stopped:
            return True
        if ranks is None or ranks.size == 1:
            self.stopped = self.signalled
            return self.stopped
        if self.signalled and not self.told:
            self.told = True
            ranks.store.set(ASKED, b"1")
        self.calls += 1
        if self.calls > self.until:
            self._decide(ranks)
        return self.stopped

    def _decide(self, ranks: Ranks) -> None:
        """Rank 0 decides for the next calls, so that all ranks stop in the same one."""

        def decide() -> list[Any]:
            return [self.signalled or ranks.store.check([ASKED]), self._next_length()]

        self.stopped, self.length = ranks.lead("stop", self.window, decide, TIMEOUT_S, CALL)
        self.until = self.calls + self.length - 1
        self.window += 1
        self.began = time.monotonic()

    def _next_length(self) -> int:
        per_call = (time.monotonic() - self.began) / self.length
        # It at most doubles, because the first calls may be much faster than the later ones.
        fitting = MOST_CALLS if per_call * MOST_CALLS < WINDOW_S else int(WINDOW_S / per_call)
        return max(1, min(2 * self.length, fitting))


_vote: StopVote | None = None
