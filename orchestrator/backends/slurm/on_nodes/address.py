"""Where other hosts reach this one."""

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence


def choose_address(
    resolved: str | None,
    node_addr: str,
    routed: str | None,
    meaning: Callable[[str], str | None],
) -> str | None:
    """Of what the host's own name means here, what Slurm's NodeAddr is, and what it sends from.

    Distributions let a machine's own name mean 127.0.1.1: of no use to others, unless Slurm itself
    uses such an address, as where all nodes are played on one machine. `meaning` of a NodeAddr that
    is a name: its address here.
    """
    if resolved and not is_loopback(resolved):
        return resolved
    if is_address(node_addr):
        return node_addr
    named = meaning(node_addr) if node_addr else None
    for found in (named, routed):
        if found and not is_loopback(found):
            return found
    return resolved or named


def is_address(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def resolve(name: str) -> str | None:
    """IPv4 before IPv6, as torchrun and gloo take it; None when the name means nothing here."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        best = sorted(found, key=lambda one: one[0] != socket.AF_INET)
        return str(best[0][4][0])
    return None


def routed_towards(hosts: Sequence[str]) -> str | None:
    """The address that this host sends from to the first of `hosts` that means anything here."""
    for host in hosts:
        there = resolve(host)
        if there is None:
            continue
        family = socket.AF_INET6 if ":" in there else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((there, 9))  # sends nothing: a datagram socket only finds its way
            return str(sock.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has `address` (IPv4)."""
    import fcntl
    import struct

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(sock.fileno(), siocgifaddr, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
