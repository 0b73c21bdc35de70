"""Looks at a script's rank once a second from a thread of its own.

It tells the agent that the rank calls collectives, though it does no optimizer step: it may
evaluate, or have no optimizer at all. And it notes what memory and GPU the rank uses.
"""

import sys
import threading
from typing import Any

from ndctl.rank.link import Link
from trainer.program.devices import use

LOOK_S = 1.0


def watch(link: Link) -> None:
    """Start the thread. It cannot run while C code holds the GIL; then there is no sign of life,
    which is what the agent must see."""
    if link.active:
        threading.Thread(target=_watch, args=(link,), name="ndctl-activity", daemon=True).start()


def _watch(link: Link) -> None:
    step, called, wait = -1, 0, threading.Event()
    while not wait.wait(LOOK_S):
        link.use = use()
        now = collectives()
        # A rank that hangs in a step has already called some of its collectives. So only calls
        # between two looks in the same step are a sign of life.
        if link.step == step and now != called:
            link.beat(link.phase, active=True)
        step, called = link.step, now


def collectives() -> int:
    """Number of collectives that this rank has called, in all its process groups; 0 if unknown."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return 0
    total = 0
    for group in list(module._world.pg_map):
        try:
            total += group._get_sequence_number_for_group()
        except RuntimeError:  # the group's backend does not count, or the group is being destroyed
            continue
    return total
