"""Which ranks are persistently slower than their peers by their own work, and what that costs.

A rank says with each step what it took itself before it entered the step's first collective. That
leaves out its waiting, so the one that all wait for is the one that stands out. Ranks are compared
with those that do the same work: of the same pipeline stage. Pure, as `heartbeat_monitor.py`.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.agent_protocol import RankDigest
from orchestrator.contract.messages.events import StragglerFound, StragglerGone

ROUND_STEPS = 5
"""Steps of every rank that are judged together …"""
ROUND_S = 2.0
"""… and so long at least, for one interruption not to be most of it."""
ROUNDS = 3
"""A word is changed when so many rounds in a row say otherwise."""
COST = 0.1
"""Part of a step that a rank must keep its peers waiting to be named …"""
COST_GONE = 0.05
"""… and below which it keeps up again."""
SPREAD = 6.0
"""It must stand out from its peers by so many times their median deviation as well."""
NORMAL = 1.4826
"""Makes a median absolute deviation comparable with a standard deviation."""


Change = StragglerFound | StragglerGone


@dataclass(slots=True)
class _Sum:
    count: int = 0
    own_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Round:
    """Means of some steps."""

    own_s: Mapping[int, float]
    step_s: float
    steps: int


def roles_of(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Ranks that do the same work, apart from the tokens: those of one pipeline rank."""
    each = mesh.world_size // mesh.pp
    stages: dict[int, list[int]] = {}
    for rank in range(mesh.pp * each):
        stages.setdefault(mesh.coords(rank)["pp"], []).append(rank)
    return tuple(tuple(ranks) for ranks in stages.values())


class Stragglers:
    """Lives as long as an attempt."""

    def __init__(
        self,
        attempt: int,
        roles: Sequence[Sequence[int]],
        host_of: Callable[[int], str],
        now: float,
    ) -> None:
        self.attempt = attempt
        self.roles = roles
        self.host_of = host_of
        self.begun = now
        self.sums = {rank: _Sum() for ranks in roles for rank in ranks}
        self.rate: float | None = None
        """Tokens a second of the whole job, as last told."""
        self.slow: set[int] = set()
        self.otherwise: dict[int, int] = {}
        """Rounds in a row that spoke against a rank's present word."""

    def observe(self, digests: Iterable[RankDigest]) -> None:
        for digest in digests:
            steps, known = digest.steps, self.sums.get(digest.rank)
            self.rate = digest.tokens_per_second or self.rate
            if known is not None and steps is not None and steps.own_s is not None:
                known.count += steps.count
                known.own_s += steps.own_s
                known.total_s += steps.total_s

    def changes(self, now: float) -> tuple[Change, ...]:
        """What a round that is over changes; nothing while it is not."""
        if now - self.begun < ROUND_S:
            return ()
        if min((known.count for known in self.sums.values()), default=0) < ROUND_STEPS:
            return ()
        seen, self.begun = self._round(), now
        self.sums = {rank: _Sum() for rank in self.sums}
        return tuple(change for ranks in self.roles for change in self._judge(ranks, seen))

    def _round(self) -> Round:
        own = {rank: known.own_s / known.count for rank, known in self.sums.items()}
        lengths = [known.total_s / known.count for known in self.sums.values()]
        steps = min(known.count for known in self.sums.values())
        return Round(own, statistics.median(lengths), steps)

    def _judge(self, ranks: Sequence[int], seen: Round) -> Iterable[Change]:
        verdicts = compare({rank: seen.own_s[rank] for rank in ranks}, seen.step_s)
        for rank in ranks:
            is_slow = rank in self.slow
            against = rank not in verdicts.over if is_slow else rank in verdicts.slow
            self.otherwise[rank] = self.otherwise.get(rank, 0) + 1 if against else 0
            if self.otherwise[rank] < ROUNDS:
                continue
            self.otherwise[rank] = 0
            self.slow ^= {rank}
            if is_slow:
                yield StragglerGone(
                    attempt=self.attempt,
                    rank=rank,
                    host=self.host_of(rank),
                    own_s=seen.own_s[rank],
                    peers_s=verdicts.usual_s,
                )
            else:
                keep_up = [seen.own_s[other] for other in ranks if other not in verdicts.slow]
                yield self._found(rank, seen, verdicts.usual_s, max(keep_up))

    def _found(
        self, rank: int, seen: Round, peers_s: float, slowest_peer_s: float
    ) -> StragglerFound:
        """The job would be as fast as its slowest peer, not as fast as the median of its peers."""
        own_s, lost = seen.own_s[rank], None
        if self.rate is not None:
            lost = cost(self.rate, seen.step_s, own_s - slowest_peer_s)
        return StragglerFound(
            attempt=self.attempt,
            rank=rank,
            host=self.host_of(rank),
            own_s=own_s,
            peers_s=peers_s,
            step_s=seen.step_s,
            steps=seen.steps * ROUNDS,
            lost_tokens_per_second=lost,
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    usual_s: float
    slow: frozenset[int]
    """Stand out, and cost more than `COST`."""
    over: frozenset[int]
    """Cost more than `COST_GONE`."""


def compare(own_s: Mapping[int, float], step_s: float) -> Comparison:
    """Who of these peers is slow; never more than half of them, and nobody who has no peer.

    Of an even number the lower middle is the usual one: a host that is slow may have half of them.
    """
    usual = statistics.median_low(own_s.values())
    spread = NORMAL * statistics.median_low(abs(own - usual) for own in own_s.values())
    limit = max(COST * step_s, SPREAD * spread)
    return Comparison(
        usual,
        frozenset(rank for rank, own in own_s.items() if own - usual > limit),
        frozenset(rank for rank, own in own_s.items() if own - usual > COST_GONE * step_s),
    )


def cost(rate: float, step_s: float, waited_s: float) -> float:
    """Tokens a second that a job at `rate` does less because its steps wait so long of `step_s`."""
    waited_s = min(max(0.0, waited_s), 0.99 * step_s)
    return rate * waited_s / (step_s - waited_s)
