"""Which host keeps the others from talking, from what all said of one small all-reduce. Pure.

Where the signs allow more than one reading, nobody is named: to leave out a good host costs more
than to go on with one that the supervisor will catch when it breaks something.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what is typed folds a journal, and reads no report
    from orchestrator.contract.messages.agent_protocol import Checked

SLOW = 4.0
"""Times as long as on the faster links of the ring: more than one switch further costs."""
LEAST_S = 0.005
"""A message there and back that takes less is never slow."""


def judge(
    hosts: Sequence[str], reports: Mapping[str, "Checked"], limit: float = SLOW
) -> Mapping[str, str]:
    """Host to why it should not run ranks, of those that took part in ring order."""
    if all(host in reports and reports[host].state == "ok" for host in hosts):
        return _slow(hosts, reports, limit)
    return _failing(hosts, reports)


def _failing(hosts: Sequence[str], reports: Mapping[str, "Checked"]) -> Mapping[str, str]:
    """Those that broke by themselves, and those that most of the others waited for in vain.

    Of a network that fell into two halves each half waits for the other, so a majority of all that
    could have waited is asked for; and where that is said of most hosts, something else is wrong.
    """
    named: dict[str, str] = {}
    waiting = Counter(
        name for host in hosts if host in reports for name in {*reports[host].waited_for} - {host}
    )
    for host in hosts:
        report = reports.get(host)
        if report is None:
            named[host] = "it did not report from the check of all hosts"
        elif report.state == "broke":
            named[host] = report.why
        elif 2 * waiting[host] > len(hosts) - 1:
            named[host] = f"{waiting[host]} of {len(hosts) - 1} other hosts waited for it in vain"
    return named if 2 * len(named) <= len(hosts) else {}


def _slow(
    hosts: Sequence[str], reports: Mapping[str, "Checked"], limit: float
) -> Mapping[str, str]:
    """Those both of whose links are slow, next to one that has a fast link.

    A host with one fast link is not slow itself. So a slow link between it and a host that has no
    fast one is that host's fault; between two such hosts it is the link's, and names nobody.
    """
    links = _ring(hosts, reports)
    if len(links) < 3:
        return {}
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
    """Each link of the ring to the seconds that the slower of its two ends measured."""
    took: dict[frozenset[str], float] = {}
    for host in hosts:
        for link in reports[host].links:
            pair = frozenset((host, link.peer))
            took[pair] = max(link.seconds, took.get(pair, 0.0))
    return took
