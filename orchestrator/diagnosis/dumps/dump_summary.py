"""Encodes a reduced dump as text, small enough that dumps of all ranks can be sent to the leader.

Operations and groups that repeat are written once and referred to by position. Members of a group
are written as runs of equal stride: in a job of 16,384 ranks, a full list in each dump would be
most of what is sent.
"""

import json
from collections.abc import Sequence
from typing import Any

from orchestrator.contract.read_json import read_json
from orchestrator.diagnosis.dumps.dump import (
    Call,
    GroupId,
    GroupProgress,
    Op,
    PeerCall,
    RankDump,
    Unreadable,
)


def to_text(dump: RankDump) -> str:
    ids = dict.fromkeys([*dump.seats, *(talk.group for talk in dump.talks)])
    groups = {group: place for place, group in enumerate(ids)}
    ops: dict[Op, int] = {}
    seats = [
        [
            groups[group],
            seat.entered,
            seat.done,
            [
                [call.seq, ops.setdefault(call.op, len(ops)), int(call.started)]
                for call in seat.calls
            ],
        ]
        for group, seat in dump.seats.items()
    ]
    descs = dict.fromkeys(desc for path in dump.paths for desc, _ in path)
    kinds = {desc: place for place, desc in enumerate(descs)}
    body = {
        "rank": dump.rank,
        "groups": [[group.name, group.desc, runs(group.members)] for group in groups],
        "ops": list(ops),
        "seats": seats,
        "talks": [[groups[talk.group], int(talk.sends), talk.peer] for talk in dump.talks],
        "last": None if dump.last is None else groups[dump.last],
        "first": None if dump.first is None else groups.get(dump.first),
        "kinds": list(kinds),
        "paths": [[[kinds[desc], seq] for desc, seq in path] for path in dump.paths],
        "partial": dump.partial,
    }
    return json.dumps(body, separators=(",", ":"))


def from_text(text: str) -> RankDump:
    """Raises Unreadable if `to_text` did not write it."""
    try:
        return _dump(read_json(text))
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise Unreadable(f"not a reduced dump: {exc!r}") from exc


def _dump(body: dict[str, Any]) -> RankDump:
    groups = [GroupId(name, desc, _members(found)) for name, desc, found in body["groups"]]
    ops = [Op(*op) for op in body["ops"]]
    seats = {
        groups[place]: GroupProgress(
            entered, done, tuple(Call(seq, ops[op], bool(started)) for seq, op, started in calls)
        )
        for place, entered, done, calls in body["seats"]
    }
    talks = tuple(
        PeerCall(groups[place], bool(sends), peer) for place, sends, peer in body["talks"]
    )
    last, first = body["last"], body["first"]
    return RankDump(
        body["rank"],
        seats,
        talks,
        None if last is None else groups[last],
        None if first is None else groups[first],
        tuple(tuple((body["kinds"][kind], seq) for kind, seq in path) for path in body["paths"]),
        bool(body.get("partial", False)),
    )


def runs(members: Sequence[int]) -> list[list[int]]:
    """`[first, stride, count]` of each run of equal strides."""
    found: list[list[int]] = []
    for member in members:
        if found:
            first, stride, many = found[-1]
            if many == 1:
                found[-1] = [first, member - first, 2]
                continue
            if member == first + stride * many:
                found[-1][2] += 1
                continue
        found.append([member, 1, 1])
    return found


def _members(found: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(first + stride * i for first, stride, many in found for i in range(many))
