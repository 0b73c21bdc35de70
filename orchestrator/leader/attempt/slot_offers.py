"""Finds out, before an attempt starts, which checkpoints are in the memory of which hosts.

The agents are asked, because the memory is theirs: no journal line could say what it still holds,
and a new leader learns the same. The ranks decide what they resume from; this only has the slots
brought to where they are needed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan, OfferSlots, Peer, SlotsOffered, Wanted
from orchestrator.contract.memory.slot_file import Label, is_history
from orchestrator.leader.agent_sessions import AgentSessions
from orchestrator.seams import Clock

OFFER_S = 3.0
"""Limit for the agents to answer. An agent that is late counts as one that has nothing."""


class SlotOffers:
    """The answers of the agents for one attempt."""

    def __init__(self, sessions: AgentSessions, clock: Clock) -> None:
        self.sessions, self.clock = sessions, clock
        self.attempt = 0
        self.asked: tuple[str, ...] = ()
        self.until = 0.0
        self.by_host: dict[str, SlotsOffered] = {}

    def ask(self, attempt: int) -> None:
        """Ask all agents, also those whose hosts are not used: they may have copies."""
        self.attempt, self.asked = attempt, tuple(self.sessions.by_host)
        self.until, self.by_host = self.clock.monotonic() + OFFER_S, {}
        for host in self.asked:
            self.sessions.order(host, OfferSlots(attempt=attempt))

    def hear(self, offered: SlotsOffered) -> None:
        # An agent repeats its answer after a reconnection.
        if offered.attempt == self.attempt and offered.host in self.asked:
            self.by_host[offered.host] = offered

    @property
    def are_here(self) -> bool:
        """All agents have answered, or it is too late."""
        return len(self.by_host) == len(self.asked) or self.clock.monotonic() >= self.until


class Layout(Struct, frozen=True, kw_only=True):
    """Which host has which ranks, and who keeps its copies."""

    hosts: Sequence[str]
    """In node-rank order."""
    ranks_per_host: int
    partners: Sequence[Sequence[int]]
    """As `partners_of` returns them."""

    def ranks_of(self, node: int) -> range:
        first = node * self.ranks_per_host
        return range(first, first + self.ranks_per_host)


def copy_plans(
    layout: Layout,
    offers: Mapping[str, SlotsOffered],
    addresses: Mapping[str, str],
    *,
    lineage: int,
    resumed: tuple[Made, ...],
    bytes_per_s: int | None,
) -> tuple[CopyPlan, ...]:
    """What each host does, in node-rank order. Pure.

    Args:
        addresses: of the hosts in `offers`.
    """
    peers = {
        host: Peer(host=host, address=addresses[host], port=offered.port)
        for host, offered in offers.items()
        if offered.port
    }
    where = _newest_complete(offers, lineage, resumed)
    count = len(layout.hosts) * layout.ranks_per_host
    if where and next(iter(where.values()))[0].ranks == count:
        fetched = _by_rank(layout, where)
    else:
        fetched = _by_host(layout, where)
    holds: dict[int, list[int]] = defaultdict(list)
    for node, partners in enumerate(layout.partners):
        for partner in partners:
            holds[partner] += layout.ranks_of(node)
    plans = []
    restored = where[0][0].made if fetched else None
    for node, host in enumerate(layout.hosts):
        wanted = [
            Wanted(
                rank=rank,
                label=where[rank][0],
                # A copy on this host itself is the nearest.
                peers=tuple(peers[one] for one in sorted(where[rank][1], key=lambda h: h != host)),
            )
            for rank in fetched.get(node, ())
        ]
        keepers = [layout.hosts[partner] for partner in layout.partners[node]]
        plans.append(
            CopyPlan(
                resumed=resumed,
                restored=restored,
                wanted=tuple(wanted),
                partners=tuple(peers[one] for one in keepers if one in peers),
                holds=tuple(holds[node]),
                bytes_per_s=bytes_per_s,
            )
        )
    return tuple(plans)


Where = Mapping[int, tuple[Label, Sequence[str]]]
"""Rank -> its slot of a checkpoint, and the hosts that have it."""


def _newest_complete(
    offers: Mapping[str, SlotsOffered], lineage: int, resumed: Sequence[Made]
) -> Where:
    """The newest checkpoint that all its ranks have anywhere; empty if there is none."""
    found: dict[tuple[Made, str], dict[int, tuple[Label, list[str]]]] = defaultdict(dict)
    sizes: dict[tuple[Made, str], int] = {}
    for host, offered in offers.items():
        for label in offered.slots if offered.port else ():
            if label.lineage == lineage and is_history(label.made, resumed):
                key = label.made, label.config
                sizes[key] = label.ranks
                found[key].setdefault(label.rank, (label, []))[1].append(host)
    whole = [key for key, ranks in found.items() if ranks.keys() == set(range(sizes[key]))]
    return found[max(whole)] if whole else {}


def _by_rank(layout: Layout, where: Where) -> Mapping[int, Sequence[int]]:
    """Node rank -> the ranks whose slots must be there, all of the host. Empty if each host has
    all slots of its ranks itself."""
    fetched = {node: layout.ranks_of(node) for node in range(len(layout.hosts))}
    missing = any(
        layout.hosts[node] not in where[rank][1]
        for node, ranks in fetched.items()
        for rank in ranks
    )
    return fetched if missing else {}


def _by_host(layout: Layout, where: Where) -> Mapping[int, Sequence[int]]:
    """Node rank -> the ranks whose slots must be there. Another number of ranks made them, so each
    may be on any host of the attempt."""
    fetched: dict[int, list[int]] = defaultdict(list)
    missing = (rank for rank, (_, hosts) in where.items() if not set(hosts) & {*layout.hosts})
    for number, rank in enumerate(missing):
        fetched[number % len(layout.hosts)].append(rank)
    return fetched
