"""What takes two hosts to see: clocks, and whether each finds the other by its name."""

import asyncio
import socket
from collections.abc import Callable

from orchestrator.contract.check_results import Finding

SKEW_LIMIT_S = 5.0
"""Clocks further apart make timestamps of logs and leases lie; journal times are the leader's."""

NAME_S = 5.0
"""For the name servers to answer."""

Resolve = Callable[[str], tuple[str, ...]]
"""A host's name to its addresses; raises OSError when there are none."""


def clock_skew(
    host: str, sent_at: float, received_at: float, limit_s: float = SKEW_LIMIT_S
) -> Finding | None:
    """Whether the clock of `host` and the leader's are too far apart.

    The way of the message counts as skew, so a skew below the limit may be none.
    """
    skew = received_at - sent_at
    if abs(skew) <= limit_s:
        return None
    where = "behind" if skew > 0 else "ahead of"
    return Finding(
        what="clock",
        verdict="warns",
        found=f"{host} is {abs(skew):.1f} s {where} the leader (limit {limit_s:.0f} s)",
        fix=f"start an NTP service on {host}: `timedatectl set-ntp true`",
    )


async def looked_up(host: str, address: str, asker: str, limit_s: float) -> Finding | None:
    """`name_resolves` on this very machine, which is `asker`, within a limit."""
    asking = asyncio.to_thread(name_resolves, host, address, addresses_of, asker)
    try:
        return await asyncio.wait_for(asking, limit_s)
    except TimeoutError:
        return Finding(
            what="name",
            verdict="warns",
            found=f"on {asker} looking up {host} took longer than {limit_s:.0f} s",
            fix=f"look at the name servers in /etc/resolv.conf of {asker}",
        )


def name_resolves(host: str, address: str, resolve: Resolve, asker: str) -> Finding | None:
    """Whether `asker` finds `host` by its name, at an address that may be its own."""
    fix = f"let {host} resolve on {asker} too (DNS, /etc/hosts)"
    try:
        found = resolve(host)
    except OSError as exc:
        return Finding(
            what="name",
            verdict="warns",
            found=f"{asker} does not know {host}: {exc}",
            fix=fix,
        )
    if address in found or _is_loopback(address) or not all(map(_is_loopback, found)):
        return None  # another address of the host may be the one that it gave itself
    return Finding(
        what="name",
        verdict="warns",
        found=f"on {asker} {host} is {', '.join(found)}; it says it is at {address}",
        fix=fix,
    )


def addresses_of(name: str) -> tuple[str, ...]:
    """The real `Resolve`; may take as long as the name servers."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
