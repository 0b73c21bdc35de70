"""Indexes the evidence of a hang once for all checks."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from orchestrator.diagnosis.dumps.dump import MOST_RANKS
from orchestrator.diagnosis.hang.groups import (
    Group,
    Stuck,
    groups_of,
    stages_of,
    stuck_operations,
    work_of,
)
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, Kind, RankFacts, Waiting
from orchestrator.diagnosis.stacks import python_stacks

SURE = 0.9
"""From this confidence on, a host may be excluded."""
MOST_ALONE = 3
"""Among so few stacks a unique place proves nothing."""
SHOWN = 8
"""Operations that a verdict lists."""
STATES = {
    "T": "stopped by a signal (state T)",
    "t": "stopped by a debugger (state t)",
    "D": "in an uninterruptible wait in the kernel (state D)",
    "Z": "a zombie: it has ended but was not reaped (state Z)",
    "gone": "gone",
}
RETURNED = "exit code 0"
"""How a rank ended whose program returned."""
STARVED = "starved of CPU"
THROTTLED = ", and its control group is throttled (cpu.max)"
STARVED_SHARE = 0.5
"""A rank is starved if it was ready but without a CPU for this share of the time without progress.
"""


class EvidenceIndex:
    """The evidence of one hang, matched per group and rank, and helpers to build a verdict."""

    def __init__(self, scene: HangEvidence) -> None:
        self.scene = scene
        dumps = scene.dumps
        self.stages = stages_of(dumps, scene.axes)
        self.ranks = self._all_ranks()
        self.no_dump = tuple(sorted(self.ranks - set(dumps)))
        self.groups = groups_of(dumps, self.ranks, self.stages, scene.axes)
        self.work = work_of(self.groups, self.ranks, self.stages, scene.axes)
        self.kin: dict[tuple[str, int, int], list[Group]] = defaultdict(list)
        for group in self.groups:
            self.kin[group.kin].append(group)
        self.stuck = list(stuck_operations(self.groups, dumps, self.no_dump))
        self.at = {stuck.group.id: stuck for stuck in self.stuck}
        self.partial = any(dump.partial for dump in dumps.values())
        """Some dumps have only pending operations: a missing operation then proves nothing."""
        self.waiters = {rank for rank, dump in dumps.items() if dump.waits}
        self.stacks = {
            rank: stack
            for rank, facts in scene.facts.items()
            if (stack := python_stacks.main_stack(facts.stack))
        }
        self.odd_states = {
            rank: STATES[facts.process_state]
            for rank, facts in scene.facts.items()
            # Running (R) and sleeping (S) are not listed: a rank that waits for others is in either
            # of them.
            if facts.process_state in STATES and not self._harmless(facts)
        }
        self.starved = {
            rank
            for rank, facts in scene.facts.items()
            # A rank whose stack is in a collective waits for its peers, so the lack of a CPU is not
            # why it makes no progress.
            if _is_starved(facts) and not self._talks(rank)
        }
        """Weak evidence: on a busy host many ranks are late by some seconds."""
        self.mute = tuple(
            rank for rank, facts in sorted(scene.facts.items()) if facts.asked and not facts.stack
        )
        self.ended = {rank: facts.ended for rank, facts in scene.facts.items() if facts.ended}
        """Such a rank could give neither a dump nor a stack, so that it gave none is no sign."""
        self.withheld = {rank for rank, facts in scene.facts.items() if facts.withheld}
        self.crowds = Counter(python_stacks.place(stack) for stack in self.stacks.values())

    def _harmless(self, facts: RankFacts) -> bool:
        """True if state D of a rank is no evidence against it."""
        # Either the wait was short, because the rank has since given a stack in which it waits for
        # others. Or the storage hangs to which a rank that was asked writes its stack.
        told = self._talks(facts.rank) if self.stacks.get(facts.rank) else not facts.asked
        return facts.process_state == "D" and told

    def _talks(self, rank: int) -> bool:
        """True if its stack is in a collective, so that it waits for other ranks."""
        stack = self.stacks.get(rank)
        return stack is not None and python_stacks.talks(stack)

    def how_it_is(self, ranks: Sequence[int]) -> str:
        """Why these processes do not run, if it is the same for all; else empty."""
        facts = [self.scene.facts[rank] for rank in ranks if rank in self.scene.facts]
        places = {one.place for one in facts}
        states = {self.odd_states.get(rank) for rank in ranks}
        alone = facts[0] if len(ranks) == 1 and facts else None
        # One kernel function for all of them, such as an NFS read, tells a person where to look.
        if states == {STATES["D"]} and len(places) == 1 and (place := places.pop()):
            return f"blocked in the kernel in {place} (state D){_for_how_long(alone)}"
        if len(states) == 1 and (state := states.pop()):
            return state
        # An empty set would count as starved, because a superset of nothing is always true.
        if not ranks or not self.starved.issuperset(ranks):
            return ""
        limit = any(one.throttled for one in facts)
        return f"{STARVED}{_without_processor(alone)}{THROTTLED if limit else ''}"

    def _all_ranks(self) -> set[int]:
        named = {*self.scene.dumps, *self.scene.facts, *range(self.scene.world or 0)}
        seen = {group for dump in self.scene.dumps.values() for group in dump.seats}
        named = named.union(*(group.members for group in seen))
        # A larger number than any rank comes from a date in a file name.
        known = self.scene.world is not None or not named or max(named) >= MOST_RANKS
        return named if known else set(range(max(named) + 1))

    def signs_against(self, rank: int) -> tuple[tuple[str, ...], int]:
        """Other evidence against a rank and its weight.

        Weight -1: the rank itself waits for others; 0: no evidence; 1: weak; 2: strong.
        """
        # A process that does not run explains the hang, whatever its stack is.
        if rank in self.odd_states:
            return (f"its process is {self.odd_states[rank]}",), 2
        if rank in self.starved:
            return (f"it is {STARVED}",), 1
        # If no rank gave a stack, the reason is shared, and silence tells nothing about this one.
        if rank in self.mute and len(self.mute) < len(self.scene.facts):
            return ("it gave no stack when asked",), 2
        stack = self.stacks.get(rank)
        if not stack:
            return (), 0
        if python_stacks.talks(stack):
            return (f"but its stack is in {stack[0]}, inside torch.distributed",), -1
        # The stack is taken without the GIL and the dump needs it. If many ranks wrote no dump, the
        # reason is shared, such as slow storage.
        if rank in self.withheld and 2 * len(self.withheld) < len(self.scene.dumps):
            return (f"its stack is in {stack[0]}, and it gave no dump: the GIL is held",), 2
        # A unique place tells something only if most other ranks are together.
        crowd = max(self.crowds.values())
        if (
            self.crowds[python_stacks.place(stack)] == 1
            and 2 * crowd >= len(self.stacks) > MOST_ALONE
        ):
            return (f"it is the only rank in {stack[0]}",), 1
        return (f"its stack is in {stack[0]}",), 0

    def blame(
        self,
        kind: Kind,
        ranks: tuple[int, ...],
        confidence: float,
        cause: str,
        evidence: tuple[str, ...],
        ops: Sequence[Stuck],
    ) -> Diagnosis:
        hosts = {self.scene.host(rank) for rank in ranks}
        # With half of the dumps missing, the culprit may be among those ranks. A process that does
        # not run is certain evidence even without dumps.
        thin = 2 * len(self.no_dump) >= len(self.ranks) and not set(ranks) & set(self.odd_states)
        # A program that returned says nothing against its host.
        thin = thin or any(self.ended.get(rank) == RETURNED for rank in ranks)
        sure = confidence >= SURE and len(hosts) == 1 and None not in hosts and not thin
        named = tuple(str(host) for host in hosts) if sure else ()
        return Diagnosis(
            kind=kind,
            scope="rank",
            ranks=ranks,
            hosts=named,
            confidence=round(confidence, 2),
            cause=cause,
            evidence=evidence,
            waiting=tuple(self.waiting(stuck) for stuck in ops[:SHOWN]),
            advice=self._advice(kind, ranks),
        )

    def _advice(self, kind: Kind, ranks: tuple[int, ...]) -> str:
        if kind == "left-inside":
            return "check the device and the links of its host"
        if set(ranks) <= set(self.no_dump):
            # torch ends the thread that writes dumps when a rank that raised destroys its groups.
            return (
                "read the log of the rank, because one that raised an exception may write no dump;"
                " or collect its dump, if there is one, and diagnose again"
            )
        return "check the stack of the rank and the kernel log of its host"

    def waiting(self, stuck: Stuck) -> Waiting:
        return Waiting(
            group=stuck.group.id.name,
            desc=stuck.group.id.desc,
            seq=stuck.seq,
            op=str(stuck.op),
            size=len(stuck.group.members),
            entered=tuple(sorted(stuck.entered)),
            missing=stuck.missing,
            unknown=stuck.unknown,
            open=stuck.group.open,
        )


def _is_starved(facts: RankFacts) -> bool:
    enough = facts.starved_s >= STARVED_SHARE * facts.still_s > 0
    return facts.process_state == "R" and enough


def _for_how_long(facts: RankFacts | None) -> str:
    return f", without progress for {facts.still_s:.0f} s" if facts and facts.still_s else ""


def _without_processor(facts: RankFacts | None) -> str:
    if facts is None:
        return ""
    times = f"{facts.starved_s:.0f} of {facts.still_s:.0f} s"
    return f" (ready to run but without a CPU for {times})"


def named(stuck: Stuck) -> str:
    name = stuck.group.id
    return f"operation {stuck.seq} of {name.desc} (group {name.name}, {stuck.op.kind})"
