"""Listens for the orders of the agent, in a thread.

The main thread may be blocked in a collective when the order to leave comes. So the thread breaks
all connections, and the collective raises.
"""

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.messages.rank_orders import (
    MAX_BYTES,
    JoinAttempt,
    LeaveAttempt,
    from_bytes,
    socket_path,
)
from trainer.rank.signals import StopRequest

LOG = logging.getLogger("trainer")

LOOK_S = 0.5
"""While it waits for an order, how often a rank looks whether it must end."""


class Orders:
    """The orders to this rank. Created once in the process."""

    def __init__(self, env: RankEnv) -> None:
        """Raises OSError."""
        self.attempt = env.attempt
        """The attempt that the rank takes part in."""
        self._left = 0
        """The attempt that the agent has ordered it to leave."""
        self._joins: queue.SimpleQueue[JoinAttempt] = queue.SimpleQueue()
        path = socket_path(Path(env.heartbeat_socket), env.local_rank)
        path.unlink(missing_ok=True)  # of an earlier process
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @property
    def leaving(self) -> bool:
        """The agent has ordered the rank to leave its attempt."""
        return self._left == self.attempt

    def next_join(self, stop: StopRequest) -> JoinAttempt | None:
        """Wait for the order to join an attempt. None: the process must end."""
        while not stop.asked:
            with contextlib.suppress(queue.Empty):
                return self._joins.get(timeout=LOOK_S)
        return None

    def _listen(self) -> None:
        while True:
            try:
                order = from_bytes(self._socket.recv(MAX_BYTES))
            except ValueError as exc:
                LOG.warning("ignoring an invalid order: %s", exc)
                continue
            match order:
                case JoinAttempt():
                    self._joins.put(order)
                # The agent may order it again, and after the rank has left by itself.
                case LeaveAttempt(attempt=attempt):
                    if attempt == self.attempt and not self.leaving:
                        self._left = attempt
                        break_collectives()


def break_collectives() -> None:
    """Make the collectives that are in progress raise, in whichever thread they are."""
    _shut_connections()
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or not module.is_initialized():
        return
    with contextlib.suppress(Exception):  # the main thread may be creating or forgetting groups
        if "nccl" in str(module.get_backend()):
            module._abort_process_group()


def _shut_connections() -> None:
    """Break all TCP connections of this process: those of gloo, and that to the rendezvous store.

    The abort of gloo's groups does not end a collective that waits for a peer (measured on torch
    2.13); a broken connection does. gloo ends the process if its listening socket breaks, so that
    stays.
    """
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is not connected
            if link.readlink().name.startswith("socket:"):
                _shut(int(link.name))


def _shut(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as sock:
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.shutdown(socket.SHUT_RDWR)


def forget_groups() -> None:
    """Forget all process groups. No thread uses one any more."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if module is not None and module.is_initialized():
        module._abort_process_group()
