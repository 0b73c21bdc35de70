"""Dumps of all ranks, matched per process group: who called what, and who did not."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from orchestrator.diagnosis.dumps.dump import ONE_SIDED, WORLD, Called, GroupId, Op, RankDump, Seat


@dataclass(slots=True)
class Group:
    id: GroupId
    members: tuple[int, ...]
    """Ranks; where no dump names them, those that used the group."""
    open: bool = False
    """Others may be in it: it is no axis of a mesh, and no dump names its members."""
    seats: dict[int, Seat] = field(default_factory=dict)
    stage: int = 0
    """Pipeline stage of its first member: stages do different work."""

    @property
    def kin(self) -> tuple[str, int, int]:
        """Groups of equal kin do the same at the same number: of one axis and one stage."""
        return label(self.id), len(self.members), self.stage


NAMELESS = ("undefined", "")
"""torch's description of groups that were made without one: they have no more in common."""
OF_A_MESH = "mesh_"
"""How torch's names for the groups of a device mesh begin."""


Work = tuple[int, frozenset[str]]
"""What ranks do: those of one stage that are in groups of the same kinds do the same."""


def label(group: GroupId) -> str:
    """What groups that do the same share: their axis. Those without a name share nothing."""
    return f"{group.desc} {group.name}" if group.desc in NAMELESS else group.desc


def work_of(
    groups: Iterable[Group],
    ranks: Iterable[int],
    stages: Mapping[int, int],
    axes: Mapping[str, tuple[tuple[int, ...], ...]],
) -> dict[int, Work]:
    """`axes` know members of groups as well that nobody used of whom there is a dump."""
    labels: dict[int, set[str]] = {rank: set() for rank in ranks}
    lines = [(desc, line) for desc, lines in axes.items() for line in lines]
    for name, members in [*((label(group.id), group.members) for group in groups), *lines]:
        for rank in members:
            labels.setdefault(rank, set()).add(name)
    same: dict[frozenset[str], frozenset[str]] = {}
    kinds = {rank: frozenset(found) for rank, found in labels.items()}
    return {
        rank: (stages.get(rank, 0), same.setdefault(kind, kind)) for rank, kind in kinds.items()
    }


def groups_of(
    dumps: Mapping[int, RankDump],
    ranks: set[int],
    stages: Mapping[int, int],
    axes: Mapping[str, tuple[tuple[int, ...], ...]],
) -> list[Group]:
    """All groups that dumps know of; `ranks` are those of the job, `axes` its known groups."""
    found: dict[GroupId, Group] = {}
    for rank, dump in dumps.items():
        for group_id, seat in dump.seats.items():
            group = found.get(group_id)
            if group is None:
                group = found[group_id] = Group(group_id, group_id.members)
            group.seats[rank] = seat
    groups = list(found.values())
    for group in groups:
        if not group.members:
            group.members = _known(group, axes)
    _complete(groups, ranks)
    for group in groups:
        if not is_pipeline(group.id.desc):
            group.stage = stages.get(min(group.members, default=0), 0)
    return groups


def stages_of(
    dumps: Mapping[int, RankDump], axes: Mapping[str, tuple[tuple[int, ...], ...]]
) -> dict[int, int]:
    """Rank -> pipeline stage, where groups of a pipeline name their members."""
    stages = {}
    seen = set()
    for desc, lines in axes.items():
        if is_pipeline(desc):
            stages.update({rank: stage for line in lines for stage, rank in enumerate(line)})
    for dump in dumps.values():
        ids = [*dump.seats, *(talk.group for talk in dump.talks)]
        for group in ids:
            if group.members and group not in seen and is_pipeline(group.desc):
                seen.add(group)
                stages.update({rank: stage for stage, rank in enumerate(group.members)})
    return stages


@cache
def is_pipeline(desc: str) -> bool:
    return desc.lower() in {"pp", "mesh_pp"} or "pipeline" in desc.lower()


def _known(group: Group, axes: Mapping[str, tuple[tuple[int, ...], ...]]) -> tuple[int, ...]:
    seen = set(group.seats)
    return next((m for m in axes.get(group.id.desc, ()) if seen <= set(m)), ())


def _complete(groups: list[Group], ranks: set[int]) -> None:
    """Members of groups that no dump names: from who used them, and the form of their kin.

    Groups of one axis of a mesh are equally large, and every rank is in one of them.
    """
    by_desc: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if not group.members:
            group.members = tuple(sorted(group.seats))
            by_desc[group.id.desc].append(group)
    for desc, kin in by_desc.items():
        if desc == WORLD and len(kin) == 1:
            kin[0].members = tuple(sorted(ranks))
            continue
        if not _is_axis(desc, kin):
            _leave_open(kin, ranks)
            continue
        left = ranks - {rank for group in kin for rank in group.members}
        size = max(len(group.members) for group in kin)
        if len(kin) * size < len(ranks) and len(ranks) % len(kin) == 0:
            size = len(ranks) // len(kin)
        small = [group for group in kin if len(group.members) < size]
        if len(small) == 1 and len(small[0].members) + len(left) == size:
            small[0].members = tuple(sorted({*small[0].members, *left}))
            continue
        forms = Counter(_form(group.members) for group in kin)
        full = max(forms, key=lambda form: (len(form), forms[form]))
        for group in kin:
            if len(group.members) < len(full):
                group.members = _stretched(group, full, left)


def _is_axis(desc: str, kin: Sequence[Group]) -> bool:
    return desc not in NAMELESS and (len(kin) > 1 or desc.startswith(OF_A_MESH))


def _leave_open(groups: Iterable[Group], ranks: set[int]) -> None:
    for group in groups:
        group.open = len(group.members) < len(ranks)


def _form(members: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(member - members[0] for member in members)


def _stretched(group: Group, form: tuple[int, ...], left: set[int]) -> tuple[int, ...]:
    """The members that `group` has if it is made as its largest kin: where that is unambiguous."""
    known = set(group.members)
    fits = []
    for offset in form:
        base = group.members[0] - offset
        wanted = {base + each for each in form}
        if known <= wanted and wanted - known <= left:
            fits.append(wanted)
    return tuple(sorted(fits[0])) if len(fits) == 1 else group.members


@dataclass(slots=True)
class Stuck:
    """The oldest operation of a group that somebody called and that is not complete there."""

    group: Group
    seq: int
    entered: dict[int, Called]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    out: tuple[int, ...]
    """Members for whom it is complete."""
    unsure: tuple[int, ...] = ()
    """Members that wait elsewhere, and whose dumps do not say whether this is complete for them."""

    @property
    def lacks(self) -> bool:
        """All that are known to use the group wait: others may be missing, whoever they are."""
        return self.group.open and not (self.missing or self.out)

    @property
    def op(self) -> Op:
        return Counter(call.op for call in self.entered.values()).most_common(1)[0][0]


def stuck_operations(
    groups: Iterable[Group], dumps: Mapping[int, RankDump], silent: Sequence[int]
) -> Iterator[Stuck]:
    """`silent`: ranks without a dump."""
    for group in groups:
        pending = [seat.pending[0].seq for seat in group.seats.values() if seat.pending]
        if pending:
            yield _stuck(group, min(pending), dumps, silent)


def _stuck(group: Group, seq: int, dumps: Mapping[int, RankDump], silent: Sequence[int]) -> Stuck:
    entered: dict[int, Called] = {}
    missing: list[int] = []
    unknown: list[int] = []
    out: list[int] = []
    for member in group.members:
        seat = group.seats.get(member)
        if seat is None:
            # One that has a dump did not call it: what is pending stays in the buffer.
            (missing if member in dumps else unknown).append(member)
        elif seat.entered < seq:
            missing.append(member)
        elif seat.done >= seq:
            out.append(member)
        else:
            entered[member] = next(call for call in seat.calls if call.seq >= seq)
    unsure = _complete_or_missing(missing, entered, group, dumps)
    missing = [member for member in missing if member not in unsure]
    if group.open and not (missing or unknown or out):
        unknown = list(silent)  # all that used it wait: for a member that nobody knows of
    return Stuck(group, seq, entered, tuple(missing), tuple(unknown), tuple(out), tuple(unsure))


def _complete_or_missing(
    missing: Iterable[int],
    entered: Mapping[int, Called],
    group: Group,
    dumps: Mapping[int, RankDump],
) -> list[int]:
    """Of a rank whose dump holds what is under way alone, an operation that is not in it was not
    called, or is complete. If all members have to take part before it is complete for one, then
    it was not called. Nor by a rank that is in no operation at all: it would have gone on."""
    if not any(call.op.kind in ONE_SIDED for call in entered.values()):
        return []
    return [
        rank
        for rank in missing
        if rank not in group.seats and dumps[rank].partial and dumps[rank].waits
    ]


def ended_in(groups: Iterable[Group], dumps: Mapping[int, RankDump]) -> Iterator[Stuck]:
    """The operations that ranks called last, whether or not their recorders take them for over."""
    last = {(dump.last, dump.seats[dump.last].entered) for dump in dumps.values() if dump.last}
    for group in groups:
        for seq in sorted(seq for name, seq in last if name == group.id):
            called = {
                rank: next((call for call in seat.calls if call.seq == seq), None)
                for rank, seat in group.seats.items()
            }
            entered = {rank: call for rank, call in called.items() if call is not None}
            away = [member for member in group.members if member not in entered]
            missing = tuple(member for member in away if member in dumps)
            unknown = tuple(member for member in away if member not in dumps)
            yield Stuck(group, seq, entered, missing, unknown, ())


def calls_of_kin(stuck: Stuck, kin: Mapping[tuple[str, int, int], list[Group]]) -> list[Op]:
    """What other groups of the same axis and stage called at the same number."""
    others = (group for group in kin.get(stuck.group.kin, []) if group is not stuck.group)
    return [op for group in others for op in _calls_at(group, stuck.seq).values()]


def odd_ones(stuck: Stuck, kin: Mapping[tuple[str, int, int], list[Group]]) -> tuple[int, ...]:
    """Members that called something else than the others; all of them where none is in the right.

    Two against each other are judged by what the groups of the same axis called at that number.
    """
    calls = _calls_at(stuck.group, stuck.seq)
    clusters = _clusters(calls)
    alone = len(calls) <= len(stuck.unknown)
    if len(clusters) == 1 and alone and _unusual(clusters[0][0], stuck, kin):
        return tuple(sorted(calls))
    if len(clusters) < 2:
        return ()
    sizes = sorted((len(ranks) for _, ranks in clusters), reverse=True)
    if sizes[0] > sizes[1]:
        right = max(clusters, key=lambda cluster: len(cluster[1]))
    else:
        votes = _votes([op for op, _ in clusters], stuck, kin)
        best = max(votes)
        if votes.count(best) > 1:
            return tuple(sorted(calls))
        right = clusters[votes.index(best)]
    return tuple(sorted(rank for op, ranks in clusters if op is not right[0] for rank in ranks))


def _calls_at(group: Group, seq: int) -> dict[int, Op]:
    return {
        rank: call.op
        for rank, seat in group.seats.items()
        for call in seat.calls
        if call.seq == seq
    }


def _clusters(calls: Mapping[int, Op]) -> list[tuple[Op, list[int]]]:
    clusters: list[tuple[Op, list[int]]] = []
    for rank, op in calls.items():
        for known, ranks in clusters:
            if known.fits(op):
                ranks.append(rank)
                break
        else:
            clusters.append((op, [rank]))
    return clusters


def _votes(
    ops: list[Op], stuck: Stuck, kin: Mapping[tuple[str, int, int], list[Group]]
) -> list[int]:
    """How much speaks for each of `ops`: kin at the same number, else what is usual after what was
    called before, of as much of that as was ever seen."""
    groups = kin.get(stuck.group.kin, [])
    there = calls_of_kin(stuck, kin)
    votes = [sum(op.fits(other) for other in there) for op in ops]
    if votes.count(max(votes)) == 1:
        return votes
    before = _before(stuck)
    for length in CONTEXTS:
        context = before[-length:] if length else ()
        if len(context) < length:
            continue
        usual = Counter(_followers(groups, context, stuck.seq))
        votes = [sum(count for other, count in usual.items() if op.fits(other)) for op in ops]
        if votes.count(max(votes)) == 1:
            return votes
    return votes


def _unusual(op: Op, stuck: Stuck, kin: Mapping[tuple[str, int, int], list[Group]]) -> bool:
    """Whether kin at this number, or after what was called before, called something else."""
    groups = kin.get(stuck.group.kin, [])
    there = calls_of_kin(stuck, kin)
    if there:
        return not any(op.fits(other) for other in there)
    before = _before(stuck)
    for length in CONTEXTS[:3]:
        if len(before) >= length:
            usual = list(_followers(groups, before[-length:], stuck.seq))
            if len(usual) >= SEEN:
                return not any(op.fits(other) for other in usual)
    return False


SEEN = 3
"""So often makes it usual."""
CONTEXTS = (12, 6, 3, 2, 1, 0)
"""Of what was called before, so many."""


def _before(stuck: Stuck) -> tuple[Op, ...]:
    """What the group called before its stuck operation."""
    histories = [
        tuple(call.op for call in seat.calls if call.seq < stuck.seq)
        for seat in stuck.group.seats.values()
    ]
    return max(histories, key=len, default=())


def _followers(groups: Iterable[Group], context: tuple[Op, ...], before: int) -> Iterator[Op]:
    """What ranks of `groups` called after calling `context`, where that is complete."""
    length = len(context)
    for group in groups:
        for seat in group.seats.values():
            ops = [call.op for call in seat.calls if call.seq <= seat.done and call.seq != before]
            for i in range(length, len(ops)):
                if tuple(ops[i - length : i]) == context:
                    yield ops[i]
