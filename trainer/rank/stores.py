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
    """The server, at `address`. `shared`: other stores of this process at that port use it as well.

    Raises RuntimeError, in torch's words, where the port cannot be had.
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
    """A socket that listens at `address` alone; None where torch has to listen everywhere.

    What a name means here can differ from what other hosts make of it (Debian gives a host's own
    name 127.0.1.1), so only a number is taken.
    """
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        sock = socket.socket(family)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(BACKLOG)
        except OSError as exc:
            # torch tries the same port, and fails in its own words where another process has it.
            sys.stderr.write(f"cannot listen at {address}:{port} alone: {exc}\n")
            sock.close()
            return None
        return sock.detach()
    return None
