"""What takes two hosts to see: the leader's look at a host whose agent registers."""

from collections.abc import Callable

from orchestrator.contract.findings import Finding

SKEW_LIMIT_S = 5.0
"""Clocks further apart make timestamps of logs and leases lie; journal times are the leader's."""

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


def name_resolves(host: str, address: str, resolve: Resolve) -> Finding | None:
    """Whether the leader's host finds `host` by its name, at an address that may be its own."""
