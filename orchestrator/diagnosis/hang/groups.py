"""Matches the dumps of all ranks per process group: which rank called which operation."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from orchestrator.diagnosis.dumps.dump import (
    ONE_SIDED,
    WORLD,
    Call,
    GroupId,
    GroupProgress,
    Op,
    RankDump,
)


@dataclass(slots=True)
class Group:
    id: GroupId
    members: tuple[int, ...]
    """Ranks. If no dump names the members: the ranks that used the group."""
    open: bool = False
    """The group may have more members: no dump names them, and it is no axis of a mesh."""
    seats: dict[int, GroupProgress] = field(default_factory=dict)
    stage: int = 0
    """Pipeline stage of its first member; stages call different operations."""

    @property
    def kin(self) -> tuple[str, int, int]:
        """Groups with equal kin (axis, size, stage) call the same operation at each number."""
        return label(self.id), len(self.members), self.stage


NAMELESS = ("undefined", "")
"""torch's descriptions of groups that were created without one."""
OF_A_MESH = "mesh_"
"""Prefix of torch's names of groups of a device mesh."""


Work = tuple[int, frozenset[str]]
"""Stage and kinds of groups of a rank. Ranks with equal work call the same operations."""


def label(group: GroupId) -> str:
    """The name of a group's axis. A group without a description has a label of its own."""
    return f"{group.desc} {group.name}" if group.desc in NAMELESS else group.desc


def work_of(
    groups: Iterable[Group],
    ranks: Iterable[int],
    stages: Mapping[int, int],
    axes: Mapping[str, tuple[tuple[int, ...], ...]],
) -> dict[int, Work]:
    """Rank -> work. `axes` adds groups that no rank with a dump used."""
    labels: dict[int, set[str]] = {rank: set() for rank in ranks}
    lines = [(desc, line) for desc, lines in axes.items() for line in lines]
    # A rank without a dump has work too. The mesh says which groups it uses.
    for name, members in [*((label(group.id), group.members) for group in groups), *lines]:
        for rank in members:
            labels.setdefault(rank, set()).add(name)
    same: dict[frozenset[str], frozenset[str]] = {}
    # Thousands of ranks share a few sets. One object for each keeps hashing and comparison cheap.
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
    """All groups in the dumps; `ranks`: all ranks of the job, `axes`: its known groups."""
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
            # gloo's dumps do not name members.
            group.members = _known(group, axes)
    _complete(groups, ranks)
    for group in groups:
        # A pipeline group reaches over all stages, so it belongs to none of them.
        if not is_pipeline(group.id.desc):
            group.stage = stages.get(min(group.members, default=0), 0)
    return groups


def stages_of(
    dumps: Mapping[int, RankDump], axes: Mapping[str, tuple[tuple[int, ...], ...]]
) -> dict[int, int]:
    """Rank -> pipeline stage, from pipeline groups whose members are known."""
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
    """Infers members that no dump names.

    All groups of one mesh axis have the same size, and each rank is in exactly one of them. So the
    ranks that used a group and the shape of the other groups of the axis determine the rest.
    """
    by_desc: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if not group.members:
            group.members = tuple(sorted(group.seats))
            by_desc[group.id.desc].append(group)
    for desc, kin in by_desc.items():
        # All ranks of the job are in the default group, including those that gave no dump.
        if desc == WORLD and len(kin) == 1:
            kin[0].members = tuple(sorted(ranks))
            continue
        # A group that the program created itself may have any members. To guess them would blame
        # ranks that do not belong to it.
        if not _is_axis(desc, kin):
            _leave_open(kin, ranks)
            continue
        left = ranks - {rank for group in kin for rank in group.members}
        size = max(len(group.members) for group in kin)
        # Each group that was seen misses a member, for example because the ranks of one host gave
        # no dumps. The ranks divided by the groups give the real size.
        if len(kin) * size < len(ranks) and len(ranks) % len(kin) == 0:
            size = len(ranks) // len(kin)
        small = [group for group in kin if len(group.members) < size]
        # Exactly one group has room, and exactly for the ranks that are left.
        if len(small) == 1 and len(small[0].members) + len(left) == size:
            small[0].members = tuple(sorted({*small[0].members, *left}))
            continue
        forms = Counter(_form(group.members) for group in kin)
        # The longest form has the fewest members missing; among equal ones the most frequent is the
        # least likely to be an accident.
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
    """The members of `group` if it has the shape `form`; unchanged if that is ambiguous."""
    known = set(group.members)
    fits = []
    for offset in form:
        base = group.members[0] - offset
        wanted = {base + each for each in form}
        # Each rank is in one group of the axis, so a rank of another group cannot complete this
        # one.
        if known <= wanted and wanted - known <= left:
            fits.append(wanted)
    return tuple(sorted(fits[0])) if len(fits) == 1 else group.members


@dataclass(slots=True)
class Stuck:
    """The oldest operation of a group that a rank called and that is not complete there."""

    group: Group
    seq: int
    entered: dict[int, Call]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    out: tuple[int, ...]
    """Members on which it is complete."""

    @property
    def lacks(self) -> bool:
        """All known users of the group wait, so an unknown member may be missing."""
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
        # The oldest pending number of any member: a member with a later one has completed this one,
        # and counts among `out`.
        if pending:
            yield _stuck(group, min(pending), dumps, silent)


def _stuck(group: Group, seq: int, dumps: Mapping[int, RankDump], silent: Sequence[int]) -> Stuck:
    entered: dict[int, Call] = {}
    missing: list[int] = []
    unknown: list[int] = []
    out: list[int] = []
    for member in group.members:
        seat = group.seats.get(member)
        if seat is None:
            # A rank with a dump did not call it, because the buffer keeps pending operations.
            (missing if member in dumps else unknown).append(member)
        elif seat.entered < seq:
            missing.append(member)
        elif seat.done >= seq:
            out.append(member)
        else:
            # The exact number may be lost in a full buffer, so the next call that is left stands
            # for it.
            entered[member] = next(call for call in seat.calls if call.seq >= seq)
    # Members whose partial dumps do not show whether it is complete on them.
    unsure = _complete_or_missing(missing, entered, group, dumps)
    missing = [member for member in missing if member not in unsure]
    if group.open and not (missing or unknown or out):
        unknown = list(silent)  # all known users wait, so an unknown member is missing
    return Stuck(group, seq, entered, tuple(missing), tuple(unknown), tuple(out))


def _complete_or_missing(
    missing: Iterable[int],
    entered: Mapping[int, Call],
    group: Group,
    dumps: Mapping[int, RankDump],
) -> list[int]:
    """Members with partial dumps that either completed the operation or did not call it."""
    # A partial dump has only pending operations. If all members must take part before it completes
    # on one, then it is complete on none, so a rank without it did not call it. A rank without any
    # pending operation did not call it either: nothing kept it from going on.
    if not any(call.op.kind in ONE_SIDED for call in entered.values()):
        return []
    return [
        rank
        for rank in missing
        if rank not in group.seats and dumps[rank].partial and dumps[rank].waits
    ]


def ended_in(groups: Iterable[Group], dumps: Mapping[int, RankDump]) -> Iterator[Stuck]:
    """The last operation of each rank, even if its recorder marks it as complete."""
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
    """Operations of other groups of the same axis and stage at the same number."""
    # A group must not vote for its own members.
    others = (group for group in kin.get(stuck.group.kin, []) if group is not stuck.group)
    return [op for group in others for op in _calls_at(group, stuck.seq).values()]


def odd_ones(stuck: Stuck, kin: Mapping[tuple[str, int, int], list[Group]]) -> tuple[int, ...]:
    """Members that called another operation than the rest; all members if it is undecided.

    With equal numbers on both sides, groups of the same axis decide by their operation there.
    """
    calls = _calls_at(stuck.group, stuck.seq)
    clusters = _clusters(calls)
    # If most members gave no dump, those that agree may still be the wrong ones. Example: a pair in
    # which only the wrong rank wrote a dump.
    alone = len(calls) <= len(stuck.unknown)
    if len(clusters) == 1 and alone and _unusual(clusters[0][0], stuck, kin):
        return tuple(sorted(calls))
    if len(clusters) < 2:
        return ()
    sizes = sorted((len(ranks) for _, ranks in clusters), reverse=True)
    # A clear majority within the group is right. Other groups are asked only on a tie, such as in a
    # pair.
    if sizes[0] > sizes[1]:
        right = max(clusters, key=lambda cluster: len(cluster[1]))
    else:
        votes = _votes([op for op, _ in clusters], stuck, kin)
        best = max(votes)
        # Nothing shows which side is right, and to name one by chance would blame a correct rank.
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
    """Votes for each of `ops`: groups of equal kin that called it at the same number.

    On a tie: how often it followed the same preceding operations, longest context first.
    """
    groups = kin.get(stuck.group.kin, [])
    there = calls_of_kin(stuck, kin)
    votes = [sum(op.fits(other) for other in there) for op in ops]
    # Other groups of the axis have called it at the same number, the most direct comparison.
    if votes.count(max(votes)) == 1:
        return votes
    before = _before(stuck)
    for length in CONTEXTS:
        context = before[-length:] if length else ()
        # The buffer does not reach back this far.
        if len(context) < length:
            continue
        usual = Counter(_followers(groups, context, stuck.seq))
        votes = [sum(count for other, count in usual.items() if op.fits(other)) for op in ops]
        if votes.count(max(votes)) == 1:
            return votes
    return votes


def _unusual(op: Op, stuck: Stuck, kin: Mapping[tuple[str, int, int], list[Group]]) -> bool:
    """True if groups of equal kin called another operation here or after the same operations."""
    groups = kin.get(stuck.group.kin, [])
    there = calls_of_kin(stuck, kin)
    if there:
        return not any(op.fits(other) for other in there)
    before = _before(stuck)
    # Only long contexts: after one or two operations many different ones may follow, so an unusual
    # one proves nothing.
    for length in CONTEXTS[:3]:
        if len(before) >= length:
            usual = list(_followers(groups, before[-length:], stuck.seq))
            if len(usual) >= SEEN:
                return not any(op.fits(other) for other in usual)
    return False


SEEN = 3
"""A successor is usual if it was seen so often."""
CONTEXTS = (12, 6, 3, 2, 1, 0)
"""Numbers of preceding operations to compare, longest first."""


def _before(stuck: Stuck) -> tuple[Op, ...]:
    """Operations that the group called before its stuck operation."""
    histories = [
        tuple(call.op for call in seat.calls if call.seq < stuck.seq)
        for seat in stuck.group.seats.values()
    ]
    # Buffers wrap at different places, and the longest history allows the longest comparison.
    return max(histories, key=len, default=())


def _followers(groups: Iterable[Group], context: tuple[Op, ...], before: int) -> Iterator[Op]:
    """Completed operations that followed `context` in `groups`."""
    length = len(context)
    for group in groups:
        for seat in group.seats.values():
            # The doubtful operation itself must not count as usual, nor one that is pending.
            ops = [call.op for call in seat.calls if call.seq <= seat.done and call.seq != before]
            for i in range(length, len(ops)):
                if tuple(ops[i - length : i]) == context:
                    yield ops[i]
