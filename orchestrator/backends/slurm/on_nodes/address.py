"""The address at which other hosts reach this one."""

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence


def choose_address(
    resolved: str | None, node_addr: str, routed: str | None, meaning: Callable[[str], str | None]
) -> str | None:
    """Choose between the address of the host name, Slurm's NodeAddr, and the source address.

    Some distributions resolve a host's own name to 127.0.1.1, which other hosts cannot reach. Such
    an address is used only if Slurm uses it too, as when all nodes are on one machine.

    Args:
        resolved: address of the own host name.
        routed: source address of packets to other hosts.
        meaning: resolves a NodeAddr that is a name.
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
    """Resolve a name, IPv4 first like torchrun and gloo. None: the name has no address."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        best = sorted(found, key=lambda one: one[0] != socket.AF_INET)
        return str(best[0][4][0])
    return None


def routed_towards(hosts: Sequence[str]) -> str | None:
    """The source address of packets to the first of `hosts` that resolves."""
    for host in hosts:
        there = resolve(host)
        if there is None:
            continue
        family = socket.AF_INET6 if ":" in there else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(
                (there, 9)
            )  # connecting a datagram socket sends nothing, but selects a route
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
