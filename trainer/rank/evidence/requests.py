"""Requests of the agent that a thread of the rank answers, even if the main thread is stuck in a
collective (collectives release the GIL). While C code holds the GIL, no Python thread can run."""

import signal
import threading
from collections.abc import Callable

from orchestrator.contract.files.env import DUMP_SIGNAL, STACKS_SIGNAL

REQUESTS = frozenset((DUMP_SIGNAL, STACKS_SIGNAL))


def answer_in_thread(number: int, answer: Callable[[], None], name: str) -> None:
    """Call `answer` at each signal `number`. Called before the process has other threads: all
    inherit what is blocked here, so only the thread that waits gets the signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)  # all: this thread must get no other request
    # A program of the user that unblocks all signals must not die of a request.
    signal.signal(number, lambda *_: None)

    def wait() -> None:
        while True:
            signal.sigwait({number})
            answer()

    threading.Thread(target=wait, name=name, daemon=True).start()
