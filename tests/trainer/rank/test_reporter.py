"""What a rank reports to its agent, and the signals that ask it to stop."""

import os
import signal
from pathlib import Path

import pytest

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.messages.rank_messages import MAX_BYTES, to_bytes
from orchestrator.contract.messages.rank_orders import SAVE, STOP_IN_MEMORY
from trainer.rank.reporter import Reporter, raised_of
from trainer.rank.signals import StopRequest


def test_an_exception_fits_a_datagram_and_keeps_the_end_of_its_traceback() -> None:
    def deep(depth: int) -> None:
        if depth == 0:
            raise ValueError("\N{SNOWMAN}" * 100_000)
        eval(f"deep({depth - 1}) #" + "x" * 10_000, {"deep": deep})

    with pytest.raises(ValueError, match="\N{SNOWMAN}") as caught:
        deep(20)
    raised = raised_of(caught.value, RankEnv(rank=3), step=7)
    assert len(to_bytes(raised)) <= MAX_BYTES
    error = raised.error
    assert (raised.rank, error.step, error.error) == (3, 7, "ValueError")
    assert error.traceback.endswith("\N{SNOWMAN}\n")


def test_an_exception_of_a_save_belongs_to_the_step_that_is_saved() -> None:
    reporter = Reporter(RankEnv())
    reporter.step = 4
    assert reporter.computing == 5
    reporter.beat("checkpoint")
    assert reporter.computing == 4
    reporter.close()


def test_reports_without_a_listener_are_dropped(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "none"), "x" * 500):
        reporter = Reporter(RankEnv(heartbeat_socket=path))
        reporter.beat("train", loss=float("nan"))
        reporter.saved(3)
        reporter.close()


@pytest.mark.parametrize(
    ("number", "asked", "on_disk", "save"),
    [
        (signal.SIGTERM, True, True, False),
        (signal.SIGUSR1, True, True, False),
        (STOP_IN_MEMORY, True, False, False),
        (SAVE, False, False, True),
    ],
)
def test_a_signal_asks_the_rank_to_stop_or_to_save(
    number: int, asked: bool, on_disk: bool, save: bool
) -> None:
    signals = (signal.SIGTERM, signal.SIGUSR1, STOP_IN_MEMORY, SAVE)
    before = {n: signal.getsignal(n) for n in signals}
    try:
        stop = StopRequest()
        assert (stop.asked, stop.on_disk, stop.save) == (False, False, False)
        os.kill(os.getpid(), number)
        assert (stop.asked, stop.on_disk, stop.save) == (asked, on_disk, save)
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
