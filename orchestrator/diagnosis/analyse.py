"""Who is to blame when ranks stand still.

Ranks wait in operations, operations wait for ranks: the graph of both is followed to those who wait
for nobody. Process states and stacks confirm it, or stand in where dumps are missing. Where the
evidence does not single anybody out, that is the verdict, and no host is blamed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator.diagnosis import stacks
from orchestrator.diagnosis.dumps import RankDump
from orchestrator.diagnosis.facts import Diagnosis, Kind, RankFacts, Scene, Waiting
from orchestrator.diagnosis.groups import (
    Group,
    Stuck,
    groups_of,
    odd_ones,
    stages_of,
    stuck_operations,
)
from orchestrator.diagnosis.words import ranks_words, spans

SURE = 0.9
"""From here on a host may be left out."""
KNOWN = 0.5
GUESSED = 0.45
MOST_ALONE = 3
"""Among so few stacks being alone means nothing."""
MOST_GUESSES = 4
"""Ranks among which a verdict may leave it open who it was."""
SHOWN = 8
"""Operations that a verdict lists."""
PATHS = (
    "ranks took different ways through the program: look for a branch that depends on the rank or"
    " on its data before this operation"
)
STATES = {
    "T": "stopped by a signal (state T)",
    "t": "stopped by a debugger (state t)",
    "D": "in an uninterruptible wait of the kernel (state D)",
    "Z": "dead but not reaped (state Z)",
    "gone": "gone",
}


def analyse(scene: Scene) -> Diagnosis:
    """The verdict on a standstill."""
    return _Analysis(scene).verdict()


class _Analysis:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        dumps = scene.dumps
        self.stages = stages_of(dumps, scene.axes)
        self.ranks = self._all_ranks()
        self.groups = groups_of(dumps, self.ranks, self.stages, scene.axes)
        self.kin: dict[tuple[str, int, int], list[Group]] = defaultdict(list)
        for group in self.groups:
            self.kin[group.kin].append(group)
        self.stuck = list(stuck_operations(self.groups, dumps))
        self.waiters = {rank for rank, dump in dumps.items() if dump.waits}
        self.no_dump = tuple(sorted(self.ranks - set(dumps)))
        self.odd_states = {
            rank: STATES[facts.process_state]
            for rank, facts in scene.facts.items()
            if facts.process_state in STATES
        }
        self.mute = tuple(
            rank for rank, facts in sorted(scene.facts.items()) if facts.asked and not facts.stack
        )
        self.withheld = {rank for rank, facts in scene.facts.items() if facts.withheld}
        self.stacks = {
            rank: stack
            for rank, facts in scene.facts.items()
            if (stack := stacks.main_stack(facts.stack))
        }
        self.crowds = Counter(stacks.place(stack) for stack in self.stacks.values())

    def _all_ranks(self) -> set[int]:
        named = {*self.scene.dumps, *self.scene.facts, *range(self.scene.world or 0)}
        seen = {group for dump in self.scene.dumps.values() for group in dump.seats}
        return named.union(*(group.members for group in seen))

    def verdict(self) -> Diagnosis:
        found = (
            self._mismatch()
            or self._never_entered()
            or self._left_inside()
            or self._skipped()
            or self._never_entered(guess=True)
            or self._without_dumps()
            or self._network()
            or self._together()
            or self._not_known()
        )
        return replace(found, num_waiting=len(self.waiters), no_dump=self.no_dump)

    # Operations that do not fit each other.

    def _mismatch(self) -> Diagnosis | None:
        for stuck in self.stuck:
            odd = odd_ones(stuck, self.kin)
            if odd:
                return self._mismatched(stuck, odd)
        return None

    def _mismatched(self, stuck: Stuck, odd: tuple[int, ...]) -> Diagnosis:
        called = {
            rank: call.op
            for rank, seat in stuck.group.seats.items()
            for call in seat.calls
            if call.seq == stuck.seq
        }
        split = len(odd) == len(called)
        others = Counter(str(op) for rank, op in called.items() if rank not in odd)
        theirs = others.most_common(1)[0][0] if others else "something else"
        evidence = [f"rank {rank} called {called[rank]}" for rank in odd[:SHOWN]]
        evidence += [] if split else [f"the others called {theirs}"]
        where = _named(stuck)
        cause = (
            f"ranks {spans(odd)} called operations that do not fit each other as {where}"
            if split
            else f"{ranks_words(odd)} called another operation than its peers as {where}"
        )
        return Diagnosis(
            kind="mismatch",
            scope="user",
            ranks=odd,
            hosts=(),
            confidence=0.5 if split else 0.95 if len(odd) == 1 else 0.8,
            cause=cause,
            evidence=tuple(evidence),
            waiting=(self._waiting(stuck),),
            advice=PATHS,
        )

    # Those who wait for nobody, and whom others wait for.

    def _never_entered(self, guess: bool = False) -> Diagnosis | None:
        """With `guess`, also one of whom there is no dump and against whom nothing else speaks."""
        direct: Counter[int] = Counter()
        for stuck in self.stuck:
            for rank in stuck.missing:
                direct[rank] += len(stuck.entered)
        for peer in self._unanswered():
            direct[peer] += 1
        sources = [rank for rank in direct if rank not in self.waiters]
        dumped = [rank for rank in sources if rank in self.scene.dumps]
        lost = self._lost(direct)
        if not dumped and not lost:
            return None
        blamed, signs, confidence = self._single_out(dumped, lost, direct)
        if not blamed or (confidence < KNOWN and not guess):
            return None
        ops = [s for s in self.stuck if {*s.missing, *s.unknown} & set(blamed)]
        ops.sort(key=lambda s: (-len(s.entered), s.group.id))
        what = f"{ranks_words(blamed)} did not call what the others wait in"
        where = f": {_named(ops[0])}" if ops else ""
        return self._blame("never-entered", blamed, confidence, what + where, signs, ops)

    def _unanswered(self) -> Iterable[int]:
        """Ranks that another sends to or receives from, and that do not do their part."""
        dumps = self.scene.dumps
        parts = Counter(
            (rank, talk.peer, talk.sends) for rank, dump in dumps.items() for talk in dump.talks
        )
        for (rank, peer, sends), count in parts.items():
            if peer in dumps and parts.get((peer, rank, not sends), 0) < count:
                yield peer

    def _lost(self, direct: Counter[int]) -> list[int]:
        """Ranks without a dump that may be at the bottom of it.

        Of the operations that only they can be missing in, those count that come first in the
        program: a rank that waits does so before what it is missed in.
        """
        bare = [stuck for stuck in self.stuck if stuck.unknown and not stuck.missing]
        for stuck in bare:
            for rank in stuck.unknown:
                direct[rank] += len(stuck.entered)
        behind = {id(stuck): self._counts_at(stuck) for stuck in bare}
        first = [
            stuck
            for stuck in bare
            if not any(
                behind[id(stuck)].get(other.group.id.desc, 0) >= other.seq
                for other in bare
                if other is not stuck and other.group.id.desc != stuck.group.id.desc
            )
        ]
        missed = Counter(rank for stuck in first or bare for rank in stuck.unknown)
        for peer in self._unheard():
            missed[peer] += 1
            direct[peer] += 1
        most = max(missed.values(), default=0)
        if not self._speaks_against_any(missed):
            return sorted(rank for rank, times in missed.items() if times == most)
        return sorted(missed)

    def _counts_at(self, stuck: Stuck) -> dict[str, int]:
        """How many operations of each kind of group are complete for those who wait here first."""
        counts: dict[str, int] = {}
        for rank in stuck.entered:
            dump = self.scene.dumps[rank]
            if dump.first != stuck.group.id:
                continue
            for group, seat in dump.seats.items():
                counts[group.desc] = max(counts.get(group.desc, 0), seat.done)
        return counts

    def _unheard(self) -> Iterable[int]:
        """Ranks without a dump to which another sends, or from which it receives."""
        for dump in self.scene.dumps.values():
            for talk in dump.talks[:1]:
                if talk.peer not in self.scene.dumps:
                    yield talk.peer

    def _speaks_against_any(self, ranks: Iterable[int]) -> bool:
        return any(self._signs_against(rank)[1] > 0 for rank in ranks)

    def _single_out(
        self, dumped: Sequence[int], lost: Sequence[int], direct: Counter[int]
    ) -> tuple[tuple[int, ...], tuple[str, ...], float]:
        """The candidates that most speaks against; what, and how sure that is.

        One with a dump is known to wait for nobody; of one without a dump that is a guess.
        """
        weighed = {rank: self._signs_against(rank) for rank in dumped}
        for rank in lost:
            signs, weight = self._signs_against(rank)
            weighed[rank] = (signs if weight else (), max(0, weight))
        order = {rank: (weighed[rank][1], rank in set(dumped)) for rank in weighed}
        best = max(order.values())
        heaviest = [rank for rank in weighed if order[rank] == best]
        weight, has_dump = best
        if weight < 0:
            return (), (), 0.0
        first = heaviest[0]
        held = (
            f"its dump shows no operation under way; {direct[first]} ranks wait for it"
            if has_dump
            else f"there is no dump of it, and {direct[first]} ranks wait where it may be missing"
        )
        signs = (held, *weighed[first][0])
        if len(heaviest) == 1:
            sure = (0.92, 0.95, 0.98) if has_dump else (GUESSED, 0.8, 0.97)
            return (first,), signs, sure[weight]
        hosts = {self.scene.host(rank) for rank in heaviest}
        if len(hosts) == 1 and None not in hosts and weight > 0:
            return tuple(sorted(heaviest)), (*signs, f"all of them are on {hosts.pop()}"), SURE
        by_waiters = sorted(heaviest, key=lambda rank: (-direct[rank], rank))
        if has_dump:
            why = f"{len(heaviest)} ranks wait for nobody, and are waited for"
            return tuple(by_waiters), (why,), KNOWN
        if len(heaviest) > MOST_GUESSES:
            return (), (), 0.0
        return tuple(by_waiters), (f"one of {spans(heaviest)}, of whom there is no dump",), 0.3

    def _signs_against(self, rank: int) -> tuple[tuple[str, ...], int]:
        """What else speaks against a rank: -1 (it waits itself), 0 (nothing), 1 or 2."""
        if rank in self.odd_states:
            return (f"its process is {self.odd_states[rank]}",), 2
        if rank in self.mute and len(self.mute) < len(self.scene.facts):
            return ("it gave no stack when it was asked",), 2
        stack = self.stacks.get(rank)
        if not stack:
            return (), 0
        if stacks.talks(stack):
            return (f"but its stack is in {stack[0]}, inside torch.distributed",), -1
        if rank in self.withheld and 2 * len(self.withheld) < len(self.scene.dumps):
            return (f"its stack is in {stack[0]}, and it gave no dump: something held its GIL",), 2
        crowd = max(self.crowds.values())
        if self.crowds[stacks.place(stack)] == 1 and 2 * crowd >= len(self.stacks) > MOST_ALONE:
            return (f"it alone is in {stack[0]}",), 1
        return (f"its stack is in {stack[0]}",), 0

    # One that did not come out.

    def _left_inside(self) -> Diagnosis | None:
        for stuck in self.stuck:
            if stuck.missing or stuck.unknown or not stuck.out:
                continue
            if len(stuck.entered) < len(stuck.out) or len(stuck.entered) == 1:
                ranks = tuple(sorted(stuck.entered))
                what = f"{ranks_words(ranks)} did not come out of {_named(stuck)}"
                signs = (f"it is complete for the {len(stuck.out)} other members",)
                sure = SURE if len(ranks) == 1 and len(stuck.out) > 1 else 0.6
                return self._blame("left-inside", ranks, sure, what, signs, [stuck])
        for stuck in self.stuck:
            late = [rank for rank, call in stuck.entered.items() if not call.started]
            if stuck.missing or stuck.unknown or not late or 2 * len(late) >= len(stuck.entered):
                continue
            ranks = tuple(sorted(late))
            what = f"the device of {ranks_words(ranks)} did not start {_named(stuck)}"
            signs = (f"it runs on the {len(stuck.entered) - len(late)} other members",)
            if all(not self._waits_elsewhere(rank, stuck) for rank in ranks):
                return self._blame("left-inside", ranks, 0.8, what, signs, [stuck])
        return None

    def _waits_elsewhere(self, rank: int, stuck: Stuck) -> bool:
        return any(
            other is not stuck and rank in other.entered and other.entered[rank].started
            for other in self.stuck
        )

    # In a circle of ranks that wait for each other: one is past what its peers did first.

    def _skipped(self) -> Diagnosis | None:
        crowds: dict[tuple[str, int, int], list[RankDump]] = defaultdict(list)
        for rank, dump in self.scene.dumps.items():
            if dump.last is not None and dump.seats[dump.last].pending:
                place = (dump.last.desc, dump.seats[dump.last].entered, self.stages.get(rank, 0))
                crowds[place].append(dump)
        odd: dict[int, str] = {}
        for (desc, seq, _), crowd in crowds.items():
            usual = Counter(_counts(dump) for dump in crowd).most_common(2)
            if len(usual) < 2 or usual[0][1] <= usual[1][1]:
                continue
            common = dict(usual[0][0])
            for dump in crowd:
                for other, count in _counts(dump):
                    if count < common.get(other, 0):
                        odd[dump.rank] = (
                            f"it is at operation {seq} of {desc} after {count} of {other};"
                            f" its peers did {common[other]} of these first"
                        )
        if not odd or len(odd) > max(1, len(self.scene.dumps) // 4):
            return self._out_of_order()
        ranks = tuple(sorted(odd))
        ops = [stuck for stuck in self.stuck if {*stuck.missing, *stuck.unknown} & set(ranks)]
        return Diagnosis(
            kind="skipped",
            scope="user",
            ranks=ranks,
            hosts=(),
            confidence=0.9 if len(ranks) == 1 else 0.6,
            cause=f"{ranks_words(ranks)} left out an operation that its peers wait in"
            + (f": {_named(ops[0])}" if ops else ""),
            evidence=tuple(f"rank {rank}: {odd[rank]}" for rank in ranks[:SHOWN]),
            waiting=tuple(self._waiting(stuck) for stuck in ops[:SHOWN]),
            advice=PATHS,
        )

    def _out_of_order(self) -> Diagnosis | None:
        """All others of a group wait for one, which waits in another group: it went there first."""
        alone = {
            stuck.missing[0]: stuck
            for stuck in self.stuck
            if len(stuck.missing) == 1 and not stuck.unknown and len(stuck.entered) > 1
        }
        if len(alone) != 1:
            return None
        (rank, stuck), *_ = alone.items()
        theirs = [s for s in self.stuck if rank in s.entered and len(s.missing) > len(s.entered)]
        if not theirs:
            return None
        return Diagnosis(
            kind="skipped",
            scope="user",
            ranks=(rank,),
            hosts=(),
            confidence=0.9,
            cause=f"rank {rank} is in {_named(theirs[0])} while its peers are in {_named(stuck)}",
            evidence=(f"{len(stuck.entered)} ranks wait for it, and it for them",),
            waiting=(self._waiting(stuck), self._waiting(theirs[0])),
            advice=PATHS,
        )

    # Process states, stacks and heartbeats alone.

    def _without_dumps(self) -> Diagnosis | None:
        facts = self.scene.facts
        if self.stuck and not self.no_dump:
            return None
        suspects: list[tuple[tuple[int, ...], Kind, str, float]] = [
            (tuple(sorted(self.odd_states)), "stopped", "", 0.97),
            (self.mute, "stopped", "gave no stack when it was asked", 0.92),
            (stacks.outsiders(self.stacks), "alone", "is where no other rank is", 0.8),
            (_behind(facts.values()), "alone", "reported fewer steps than the others", 0.7),
        ]
        for ranks, kind, why, confidence in suspects:
            hosts = {self.scene.host(rank) for rank in ranks}
            single = len(ranks) == 1 or (len(hosts) == 1 and None not in hosts)
            if not ranks or len(ranks) >= len(facts) or not single:
                continue
            sign = why or f"is {self.odd_states[ranks[0]]}"
            extra = self._signs_against(ranks[0])[0] if kind == "alone" else ()
            what = f"{ranks_words(ranks)} {sign}"
            return self._blame(kind, ranks, confidence, what, extra, self.stuck)
        return None

    # Nobody.

    def _network(self) -> Diagnosis | None:
        inside = [s for s in self.stuck if not (s.missing or s.unknown or s.out)]
        idle = {rank for stuck in self.stuck for rank in stuck.missing} - self.waiters
        if not inside or idle or any(stuck.unknown for stuck in self.stuck):
            return None
        groups = [stuck for stuck in inside if len(stuck.entered) > 1]
        if not groups:
            return None
        return Diagnosis(
            kind="network",
            scope="fabric",
            ranks=(),
            hosts=(),
            confidence=0.5,
            cause=f"all members called {_named(groups[0])} and none came out:"
            " the network between them, or a device",
            evidence=(
                f"in {len(inside)} groups no member is missing, and all else waits for them",
            ),
            waiting=tuple(self._waiting(stuck) for stuck in inside[:SHOWN]),
            advice="look at the links of these hosts (ibstat, nvidia-smi nvlink -e, the kernel's"
            " log); a second time on the same hosts, check them together",
        )

    def _together(self) -> Diagnosis | None:
        known = {stacks.place(stack) for stack in self.stacks.values()}
        if self.stuck or len(known) != 1 or len(self.stacks) < 2:
            return None
        stack = next(iter(self.stacks.values()))
        return Diagnosis(
            kind="together",
            scope=None,
            ranks=(),
            hosts=(),
            confidence=0.6,
            cause=f"all {len(self.stacks)} ranks are in {stack[0]}, and none waits for another",
            evidence=("their stacks are the same",),
            advice="what they all wait for is shared: storage, a server, or the program itself",
        )

    def _not_known(self) -> Diagnosis:
        if not self.scene.dumps and not self.scene.facts:
            cause = "there is no evidence: no dump and no stack was found"
        elif not self.stuck:
            cause = "no rank waits in an operation that is recorded, and no stack stands out"
        else:
            cause = f"{len(self.waiters)} ranks wait, and no rank stands out as the one waited for"
        lost = f"no dump from {ranks_words(self.no_dump)}" if self.no_dump else ""
        return Diagnosis(
            kind="not-known",
            scope=None,
            ranks=(),
            hosts=(),
            confidence=0.0,
            cause=cause,
            evidence=(lost,) if lost else (),
            waiting=tuple(self._waiting(stuck) for stuck in self.stuck[:SHOWN]),
            advice="run with TORCH_FR_BUFFER_SIZE set, and dumps and stacks of all ranks gathered",
        )

    def _blame(
        self,
        kind: Kind,
        ranks: tuple[int, ...],
        confidence: float,
        cause: str,
        evidence: tuple[str, ...],
        ops: Sequence[Stuck],
    ) -> Diagnosis:
        hosts = {self.scene.host(rank) for rank in ranks}
        thin = 2 * len(self.no_dump) >= len(self.ranks) and not set(ranks) & set(self.odd_states)
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
            waiting=tuple(self._waiting(stuck) for stuck in ops[:SHOWN]),
            advice="look at the stack of the rank, and at its host's kernel log"
            if kind != "left-inside"
            else "look at the device and the links of its host",
        )

    def _waiting(self, stuck: Stuck) -> Waiting:
        return Waiting(
            group=stuck.group.id.name,
            desc=stuck.group.id.desc,
            seq=stuck.seq,
            op=str(stuck.op),
            size=len(stuck.group.members),
            entered=tuple(sorted(stuck.entered)),
            missing=stuck.missing,
            unknown=stuck.unknown,
        )


def _counts(dump: RankDump) -> tuple[tuple[str, int], ...]:
    """How many operations of each kind of group a rank has called."""
    return tuple(sorted((group.desc, seat.entered) for group, seat in dump.seats.items()))


def _behind(facts: Iterable[RankFacts]) -> tuple[int, ...]:
    steps = {fact.rank: fact.step for fact in facts if fact.step is not None}
    newest = max(steps.values(), default=0)
    return tuple(sorted(rank for rank, step in steps.items() if step < newest))


def _named(stuck: Stuck) -> str:
    name = stuck.group.id
    return f"operation {stuck.seq} of {name.desc} (group {name.name}, {stuck.op.kind})"
