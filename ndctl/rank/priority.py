"""Threads that copy or write checkpoints while ranks train give way to the ranks."""

import contextlib
import os
import threading

NICE = 10
"""A tenth of the weight of a rank where both want the same processor. With less, a thread that
holds Python's lock could keep the agent's event loop waiting for seconds; `SCHED_IDLE` has a
thirtieth of this."""


def give_way() -> None:
    """Called once in each such thread. It stays so: only a privileged thread may go back."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        # A batch thread that wakes up for some bytes does not interrupt a rank.
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, NICE))
