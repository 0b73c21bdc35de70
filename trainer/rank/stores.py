"""Rendezvous stores that listen only at the address of their host.

torch's own server listens at every address of the machine, without a password.
"""

import contextlib
import ipaddress
import socket
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

BACKLOG = 4_096
"""All ranks of a job connect at the same time."""


def serve(
    address: str, port: int, timeout: timedelta, world_size: int | None = None, *, shared: bool
) -> TCPStore:
    """A store server at `address`. If `shared`, other stores of this process at that port reuse it.

    Raises:
        RuntimeError: torch cannot listen at the port.
    """
    return TCPStore(
        address,
        port,
        world_size,
        True,
        timeout,
        wait_for_workers=shared,
        multi_tenant=shared,
        master_listen_fd=listener(address, port),
    )


def listener(address: str, port: int) -> int | None:
    """A socket that listens only at `address`; None if torch must listen at all addresses.

    That is so for a host name, because this host may resolve it differently than other hosts:
    Debian resolves a host's own name to 127.0.1.1.
    """
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        sock = socket.socket(family)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(BACKLOG)
        except OSError as exc:
            # torch tries the same port next, and raises its own error if another process has it.
            sys.stderr.write(f"failed to listen only at {address}:{port}: {exc}\n")
            sock.close()
            return None
        return sock.detach()
    return None
