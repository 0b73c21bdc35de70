"""Detects ranks whose own work is persistently slower than that of their peers, and the cost.

With each step a rank reports how long it worked before the step's first collective. This excludes
waiting, so the rank for which all wait stands out. Ranks are compared with ranks that do the same
work, which are those of the same pipeline stage. Pure, like `heartbeat_monitor.py`.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.agent_protocol import RankDigest
from orchestrator.contract.messages.events import StragglerFound, StragglerGone

ROUND_STEPS = 5
"""Number of steps of every rank that are judged together."""
ROUND_S = 2.0
"""They must also take this many seconds, so that one interruption does not dominate."""
ROUNDS = 3
"""The verdict on a rank changes after this many rounds in a row that contradict it."""
COST = 0.1
"""A straggler delays its peers by at least this share of a step."""
COST_GONE = 0.05
"""Below this share the rank is no longer a straggler."""
SPREAD = 6.0
"""It must also differ from its peers by this many median absolute deviations."""
NORMAL = 1.4826
"""Factor that makes a median absolute deviation comparable with a standard deviation."""


Change = StragglerFound | StragglerGone


@dataclass(slots=True)
class _Sum:
    count: int = 0
    own_s: float = 0.0
    total_s: float = 0.0


class Round(Struct, frozen=True):
    """Mean values over some steps."""

    own_s: Mapping[int, float]
    step_s: float
    steps: int


def roles_of(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Ranks with the same work except for the tokens: those of one pipeline rank."""
    each = mesh.world_size // mesh.pp
    stages: dict[int, list[int]] = {}
    for rank in range(mesh.pp * each):
        stages.setdefault(mesh.coords(rank)["pp"], []).append(rank)
    return tuple(tuple(ranks) for ranks in stages.values())


class Stragglers:
    """State of the detector for one attempt."""

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
        """Tokens per second of the whole job, as last reported."""
        self.slow: set[int] = set()
        self.otherwise: dict[int, int] = {}
        """Rank -> number of rounds in a row that contradicted the current verdict."""
        self.own_s: Mapping[int, float] = {}
        """Rank -> its own seconds per step in the last round."""

    def observe(self, digests: Iterable[RankDigest]) -> None:
        for digest in digests:
            steps, known = digest.steps, self.sums.get(digest.rank)
            # Only some digests have the rate of the job. The others must not erase it.
            self.rate = digest.tokens_per_second or self.rate
            # Without its own times a rank is not judged, because the whole step has the waiting for
            # its peers too.
            if known is not None and steps is not None and steps.own_s is not None:
                known.count += steps.count
                known.own_s += steps.own_s
                known.total_s += steps.total_s

    def changes(self, now: float) -> tuple[Change, ...]:
        """Changes after a complete round; empty in between."""
        # Rounds have a minimum duration and every rank's minimum number of steps, so that one
        # interruption, or a rank whose digest is late, does not decide.
        if now - self.begun < ROUND_S:
            return ()
        if min((known.count for known in self.sums.values()), default=0) < ROUND_STEPS:
            return ()
        seen, self.begun = self._round(), now
        self.own_s = seen.own_s
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
            # A rank that is slow must fall below the lower limit to recover, which keeps a rank
            # near the limit from changing its verdict in every round.
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
        """The cost assumes that the job would be as fast as the slowest peer, not as the median."""
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


class Comparison(Struct, frozen=True):
    usual_s: float
    slow: frozenset[int]
    """Ranks that stand out and cost more than `COST`."""
    over: frozenset[int]
    """Ranks that cost more than `COST_GONE`."""


def compare(own_s: Mapping[int, float], step_s: float) -> Comparison:
    """The slow ranks among peers: at most half of them, and none without a peer.

    With an even number of peers the lower middle value is the usual one, because a slow host may
    have half of them.
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
    """Tokens per second that a job at `rate` loses because each step of `step_s` waits so long."""
    # The wait is shorter than the step; 0.99 keeps the cost finite.
    waited_s = min(max(0.0, waited_s), 0.99 * step_s)
    return rate * waited_s / (step_s - waited_s)
