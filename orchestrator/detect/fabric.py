"""Finds hosts that disturb the small all-reduce over all hosts, from the reports of all. Pure.

If the reports allow several explanations, no host is named: excluding a good host costs more than
keeping a bad one, which the supervisor detects when it breaks something.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not imported at run time: commands fold a journal but read no report
    from orchestrator.contract.messages.agent_protocol import Checked

SLOW = 4.0
"""A slow link takes this many times as long as the fast links of the ring. One switch more does
not."""
LEAST_S = 0.005
"""Seconds. A faster round trip is never slow."""


def judge(
    hosts: Sequence[str], reports: Mapping[str, "Checked"], limit: float = SLOW
) -> Mapping[str, str]:
    """Host -> why it must not run ranks. `hosts` is in ring order."""
    if all(host in reports and reports[host].state == "ok" for host in hosts):
        return _slow(hosts, reports, limit)
    return _failing(hosts, reports)


def _failing(hosts: Sequence[str], reports: Mapping[str, "Checked"]) -> Mapping[str, str]:
    """Hosts that failed by themselves, and hosts for which most others waited until a timeout.

    If the network splits, each half waits for the other half. So a host is named only if a majority
    of all other hosts waited for it. If most hosts would be named, something else is wrong.
    """
    named: dict[str, str] = {}
    waiting = Counter(
        name for host in hosts if host in reports for name in {*reports[host].waited_for} - {host}
    )
    for host in hosts:
        report = reports.get(host)
        if report is None:
            named[host] = "it sent no report of the check of all hosts"
        elif report.state == "broke":
            named[host] = report.why
        elif 2 * waiting[host] > len(hosts) - 1:
            named[host] = (
                f"{waiting[host]} of {len(hosts) - 1} other hosts timed out waiting for it"
            )
    return named if 2 * len(named) <= len(hosts) else {}


def _slow(
    hosts: Sequence[str], reports: Mapping[str, "Checked"], limit: float
) -> Mapping[str, str]:
    """Hosts with two slow links next to a host that has a fast link.

    A host with one fast link is not slow itself, so a slow link between it and a host without any
    fast link is the other host's fault. Between two hosts without fast links, the link may be at
    fault, so neither is named.
    """
    links = _ring(hosts, reports)
    # With two hosts there is only one link, and nothing shows which of its ends is slow.
    if len(links) < 3:
        return {}
    # Not the median: a slow host has two slow links, so a few of them can slow half of the ring.
    usual = sorted(links.values())[(len(links) - 1) // 4]
    slow = {pair for pair, took in links.items() if took > max(limit * usual, LEAST_S)}
    fine = {host for pair in links for host in pair if pair not in slow}
    named = {}
    for host in hosts:
        own = {pair: took for pair, took in links.items() if host in pair}
        if host not in fine and any(fine & pair for pair in own):
            took = " and ".join(f"{1e3 * one:.0f} ms" for one in own.values())
            named[host] = f"its links to both neighbours take {took}, others {1e3 * usual:.0f} ms"
    return named if 2 * len(named) <= len(hosts) else {}


def _ring(hosts: Sequence[str], reports: Mapping[str, "Checked"]) -> Mapping[frozenset[str], float]:
    """Link of the ring -> seconds, the larger value that its two ends measured."""
    took: dict[frozenset[str], float] = {}
    for host in hosts:
        for link in reports[host].links:
            pair = frozenset((host, link.peer))
            took[pair] = max(link.seconds, took.get(pair, 0.0))
    return took
