"""The sockets of an agent: one on which the ranks of its host report, and a port for torchrun."""

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Callable
from pathlib import Path

from orchestrator.contract.messages.rank_messages import Datagram, from_bytes, to_bytes

log = logging.getLogger(__name__)

PORTS = range(20_000, 32_000)
"""Below Linux's ephemeral ports, which outgoing connections of the job use."""
PORTS_TRIED = 200


async def listen(path: Path, hear: Callable[[Datagram], None]) -> asyncio.DatagramTransport:
    """Open the socket that the ranks of this host report to; `hear` is called with each report.

    `path` is in a folder that no other user can enter (`private_folder.py`).
    """
    path.unlink(missing_ok=True)  # an earlier agent of this host may have left it
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        sock.bind(str(path))
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Receiver(hear), sock=sock)
    except BaseException:
        sock.close()
        raise
    return transport


def send(path: Path, datagram: Datagram) -> None:
    """Send a message to the socket of this agent. Raises OSError, also if the socket is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)  # the agent itself must read what is in the socket
        sock.sendto(to_bytes(datagram), str(path))


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, hear: Callable[[Datagram], None]) -> None:
        self.hear = hear

    def datagram_received(self, data: bytes, addr: object) -> None:
        try:
            datagram = from_bytes(data)
        except (ValueError, TypeError) as exc:
            log.warning("ignoring invalid datagram: %s", exc)
            return
        self.hear(datagram)


def free_port(address: str) -> int:
    """A free TCP port at `address`. Raises OSError if none is found."""
    # Until torchrun binds the port, another process may take it. A random one makes that unlikely.
    for port in random.sample(PORTS, PORTS_TRIED):
        with socket.socket() as sock:
            # Connections of the former attempt may still be in TIME_WAIT at this port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                sock.bind((address, port))
                return port
    raise OSError(f"no free port between {PORTS.start} and {PORTS.stop} on {address}")
