"""Dumps of all ranks, matched per process group: who called what, and who did not."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.diagnosis.dumps import Called, GroupId, Op, RankDump, Seat


@dataclass(slots=True)
class Group:
    id: GroupId
    members: tuple[int, ...]
    """Ranks; where no dump names them, those that used the group."""
    seats: dict[int, Seat] = field(default_factory=dict)
    stage: int = 0
    """Pipeline stage of its first member: stages do different work."""

    @property
    def kin(self) -> tuple[str, int, int]:
        """Groups of equal kin do the same at the same number: of one axis and one stage."""
        return self.id.desc, len(self.members), self.stage


def groups_of(dumps: Mapping[int, RankDump], stages: Mapping[int, int]) -> list[Group]:
    found: dict[GroupId, Group] = {}
    for rank, dump in dumps.items():
        for group_id, seat in dump.seats.items():
            group = found.get(group_id)
            if group is None:
                group = found[group_id] = Group(group_id, group_id.members)
            group.seats[rank] = seat
    groups = list(found.values())
    _complete(groups)
    for group in groups:
        if not _is_pipeline(group.id.desc):
            group.stage = stages.get(min(group.members, default=0), 0)
    return groups


def stages_of(dumps: Mapping[int, RankDump]) -> dict[int, int]:
    """Rank -> pipeline stage, where groups of a pipeline name their members."""
    stages = {}
    seen = set()
    for dump in dumps.values():
        ids = [*dump.seats, *(talk.group for talk in dump.talks)]
        for group in ids:
            if group.members and group not in seen and _is_pipeline(group.desc):
                seen.add(group)
                stages.update({rank: stage for stage, rank in enumerate(group.members)})
    return stages


def _is_pipeline(desc: str) -> bool:
    return desc.lower() in {"pp", "mesh_pp"} or "pipeline" in desc.lower()


def _complete(groups: list[Group]) -> None:
    """Members of groups that no dump names: from who used them, and the form of their kin."""
    by_desc: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if not group.members:
            group.members = tuple(sorted(group.seats))
            by_desc[group.id.desc].append(group)
    for kin in by_desc.values():
        forms = Counter(_form(group.members) for group in kin)
        full = max(forms, key=lambda form: (len(form), forms[form]))
        for group in kin:
            if len(group.members) < len(full):
                group.members = _stretched(group, full, kin)


def _form(members: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(member - members[0] for member in members)


def _stretched(group: Group, form: tuple[int, ...], kin: list[Group]) -> tuple[int, ...]:
    """The members that `group` has if it is made as its largest kin: where that is unambiguous."""
    taken = {rank for other in kin if other is not group for rank in other.members}
    known = set(group.members)
    bases = {group.members[0] - offset for offset in form}
    fits = [
        wanted
        for base in sorted(bases)
        if base >= 0
        and known <= (wanted := {base + offset for offset in form})
        and not wanted & taken
    ]
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

    @property
    def op(self) -> Op:
        return Counter(call.op for call in self.entered.values()).most_common(1)[0][0]


def stuck_operations(groups: Iterable[Group], dumps: Mapping[int, RankDump]) -> Iterator[Stuck]:
    for group in groups:
        pending = [seat.pending[0].seq for seat in group.seats.values() if seat.pending]
        if pending:
            yield _stuck(group, min(pending), dumps)


def _stuck(group: Group, seq: int, dumps: Mapping[int, RankDump]) -> Stuck:
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
    return Stuck(group, seq, entered, tuple(missing), tuple(unknown), tuple(out))


def odd_ones(stuck: Stuck, kin: Mapping[tuple[str, int, int], list[Group]]) -> tuple[int, ...]:
    """Members that called something else than the others; all of them where none is in the right.

    Two against each other are judged by what the groups of the same axis called at that number.
    """
    calls = _calls_at(stuck.group, stuck.seq)
    clusters = _clusters(calls)
    if len(clusters) < 2:
        return ()
    sizes = sorted((len(ranks) for _, ranks in clusters), reverse=True)
    if sizes[0] > sizes[1]:
        right = max(clusters, key=lambda cluster: len(cluster[1]))
    else:
        votes = [(_votes(op, stuck, kin), op, ranks) for op, ranks in clusters]
        best = max(vote for vote, _, _ in votes)
        winners = [(op, ranks) for vote, op, ranks in votes if vote == best]
        if len(winners) > 1:
            return tuple(sorted(calls))
        right = winners[0]
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


def _votes(op: Op, stuck: Stuck, kin: Mapping[tuple[str, int, int], list[Group]]) -> int:
    return sum(
        op.fits(other)
        for group in kin.get(stuck.group.kin, ())
        if group is not stuck.group
        for other in _calls_at(group, stuck.seq).values()
    )
