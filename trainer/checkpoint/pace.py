"""How fast the files of a checkpoint are written while ranks train."""

import threading
import time

SHARE = 0.2
"""Part of one processor that writing may use without a hurry. Writing has to compute checksums and
copy into the kernel, and all steps meanwhile are slower by what it uses."""

FREE_S = 0.1
"""Processor seconds at the beginning of a save without a pause: a small one is complete at once."""


def pause_s(used_s: float, took_s: float) -> float:
    """Seconds to wait after a piece.

    Args:
        used_s: processor seconds that the piece took.
        took_s: seconds that it took. Storage that is slow has waited already.
    """
    return max(0.0, used_s / SHARE - took_s)


class Pace:
    """The pace of one save. Its thread calls `keep` after each piece that it has written."""

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._since: tuple[float, float] | None = None
        self._used_s = 0.0

    def hurry(self) -> None:
        """Something waits for the save. Called from another thread."""
        self._hurry.set()

    def keep(self) -> None:
        now = time.thread_time(), time.perf_counter()
        if self._since is not None:
            used_s, took_s = (end - begun for end, begun in zip(now, self._since, strict=True))
            self._used_s += used_s
            if self._used_s > FREE_S:
                self._hurry.wait(pause_s(used_s, took_s))
        self._since = time.thread_time(), time.perf_counter()
