"""A save without a hurry leaves the processor to the ranks."""

import threading

import pytest

from trainer.checkpoint import pace
from trainer.checkpoint.pace import SHARE, Pace, pause_s


def test_a_piece_and_the_pause_after_it_use_the_share_of_a_processor() -> None:
    assert 0.001 / (0.001 + pause_s(0.001, 0.001)) == pytest.approx(SHARE)
    assert pause_s(0.001, 0.003) == pytest.approx(0.001 / SHARE - 0.003), "it waited for the disk"
    assert pause_s(0.001, 1.0) == 0.0, "the disk is slower than the pace"


def test_a_save_that_is_hurried_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SHARE", 1e-9)
    monkeypatch.setattr(pace, "FREE_S", 0.0)
    kept, written = Pace(), threading.Semaphore(0)

    def write() -> None:
        for _ in range(1000):
            kept.keep()
            written.release()

    thread = threading.Thread(target=write)
    thread.start()
    written.acquire()
    assert not written.acquire(timeout=0.05), "the second piece waits"
    kept.hurry()
    thread.join(60)
    assert not thread.is_alive()


def test_a_small_save_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SHARE", 1e-9)
    monkeypatch.setattr(pace, "FREE_S", 100.0)
    kept = Pace()
    for _ in range(1000):
        kept.keep()
