"""Sockets that processes of a job have open, according to the kernel."""

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LISTENS = "0A"
"""Number in /proc/net/tcp of the state LISTEN."""
TABLES = ("tcp", "tcp6", "udp", "udp6")


@dataclass(frozen=True, order=True)
class Listener:
    pid: int
    protocol: str
    address: str
    port: int


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Every TCP socket that listens and every UDP socket, of these processes."""
    opened = sockets()
    found = set()
    for pid in pids:
        found |= {Listener(pid, *opened[inode]) for inode in _inodes(pid) if inode in opened}
    return sorted(found)


def sockets(net: Path = Path("/proc/net")) -> dict[str, tuple[str, str, int]]:
    """Inode -> protocol, address and port."""
    found = {}
    for table in TABLES:
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in (net / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if table.startswith("udp") or state == LISTENS:
                    address, port = local.split(":")
                    found[rest[5]] = (table[:3], _address(address), int(port, 16))
    return found


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the byte order of the machine."""
    raw = bytes.fromhex(text)
    words = [int.from_bytes(raw[at : at + 4], "big") for at in range(0, len(raw), 4)]
    return str(ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words)))


def _inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # the process has ended
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if named := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):  # noqa: PTH115
                    yield named[1]
