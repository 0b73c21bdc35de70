"""Checks that need two hosts: clock skew and name resolution."""

import asyncio
import socket
from collections.abc import Callable

from orchestrator.contract.check_results import Finding

SKEW_LIMIT_S = 5.0
"""With a larger skew, times in logs and leases are wrong. The journal uses the leader's clock."""

NAME_S = 5.0
"""Timeout of a name lookup, seconds."""

Resolve = Callable[[str], tuple[str, ...]]
"""Host name -> addresses. Raises OSError if there are none."""


def clock_skew(
    host: str, sent_at: float, received_at: float, limit_s: float = SKEW_LIMIT_S
) -> Finding | None:
    """A finding if the clocks of `host` and the leader differ too much.

    The delay of the message is part of the measured skew.
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
    """`name_resolves` on this machine (`asker`), with a timeout."""
    asking = asyncio.to_thread(name_resolves, host, address, addresses_of, asker)
    try:
        return await asyncio.wait_for(asking, limit_s)
    except TimeoutError:
        return Finding(
            what="name",
            verdict="warns",
            found=f"lookup of {host} on {asker} timed out after {limit_s:.0f} s",
            fix=f"check the name servers in /etc/resolv.conf of {asker}",
        )


def name_resolves(host: str, address: str, resolve: Resolve, asker: str) -> Finding | None:
    """A finding if `asker` cannot resolve the name of `host` to a plausible address."""
    fix = f"make {host} resolvable on {asker} (DNS, /etc/hosts)"
    try:
        found = resolve(host)
    except OSError as exc:
        return Finding(
            what="name",
            verdict="warns",
            found=f"{asker} cannot resolve {host}: {exc}",
            fix=fix,
        )
    if address in found or _is_loopback(address) or not all(map(_is_loopback, found)):
        return None  # a host may have several addresses
    return Finding(
        what="name",
        verdict="warns",
        found=f"{host} resolves to {', '.join(found)} on {asker}, but its own address is {address}",
        fix=fix,
    )


def addresses_of(name: str) -> tuple[str, ...]:
    """`Resolve` with the name servers of this host."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
