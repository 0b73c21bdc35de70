"""Simulated jobs that hang: ranks run a program of collectives until a fault blocks them.

The result has the flight recorder dump of each rank, in torch's format, and the true culprit.
`blocking` simulates gloo: one operation at a time, and dumps without members and sends. Otherwise
NCCL is simulated, where the program runs ahead of the device.
"""

import dataclasses
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from orchestrator.diagnosis.dumps.dump import condense
from orchestrator.diagnosis.hang.verdicts import HangEvidence, RankFacts

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
Fault = Literal[
    "stopped", "busy", "loader", "checkpoint", "skip", "shape", "dtype", "kind", "order", "network"
]
STOPS: tuple[Fault, ...] = ("stopped", "busy", "loader", "checkpoint")
PROGRAM: tuple[Fault, ...] = ("skip", "shape", "dtype", "kind", "order")
FAULTS: tuple[Fault, ...] = (*STOPS, *PROGRAM)
"""Faults that have one culprit."""
TUNED = range(10_000, 20_000)
"""Seeds that may be inspected while the analysis is changed."""
JUDGED = range(50_000, 60_000)
"""Seeds that only measure the analysis. Nobody looks at single cases of these."""
MESHES = (
    (1, 1, 8, 1, 1),
    (1, 2, 4, 1, 1),
    (1, 1, 4, 1, 2),
    (1, 2, 2, 1, 4),
    (1, 1, 4, 2, 2),
    (2, 1, 2, 1, 2),
    (2, 1, 4, 1, 2),
    (4, 1, 2, 1, 2),
    (2, 2, 2, 1, 2),
    (1, 1, 8, 1, 4),
    (2, 1, 2, 2, 2),
    (1, 1, 2, 1, 8),
)
SENDS_PER_COLLECTIVE = 7
"""Number of sends and receives of a group per collective."""


@dataclass(frozen=True, slots=True)
class SimOp:
    group: int
    kind: str
    numel: int
    dtype: str = "BFloat16"
    peer: int | None = None
    """For a send or receive: index of the peer in the group."""
    site: str = ""
    """The place in the program that calls the operation."""


@dataclass(frozen=True, slots=True)
class SimGroup:
    name: str
    desc: str
    members: tuple[int, ...]


@dataclass(slots=True)
class Job:
    mesh: tuple[int, ...]
    groups: list[SimGroup]
    of_rank: list[dict[str, int]]
    """Rank -> axis -> index of the rank's group."""

    @property
    def world(self) -> int:
        return len(self.of_rank)


def make_job(mesh: Sequence[int], evaluator: bool = False) -> Job:
    """The process groups of a mesh. `evaluator` adds a rank outside the mesh: the other ranks have
    a group without it, and it has a group with rank 0. torch calls such groups `undefined`."""
    world = prod(mesh) + evaluator
    job = Job(tuple(mesh), [SimGroup("0", "default_pg", tuple(range(world)))], [])
    job.of_rank = [{"world": 0} for _ in range(world)]
    places = list(product(*(range(size) for size in mesh)))
    for axis, name in enumerate(AXES):
        if mesh[axis] == 1:
            continue
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, place in enumerate(places):
            found[place[:axis] + place[axis + 1 :]].append(rank)
        for members in found.values():
            for rank in members:
                job.of_rank[rank][name] = len(job.groups)
            job.groups.append(SimGroup(str(len(job.groups)), f"mesh_{name}", tuple(members)))
    if evaluator:
        others = {"trainers": tuple(range(world - 1)), "results": (0, world - 1)}
        for name, some in others.items():
            for rank in some:
                job.of_rank[rank][name] = len(job.groups)
            job.groups.append(SimGroup(str(len(job.groups)), "undefined", some))
    return job


def program(job: Job, rank: int, steps: int, micro: int, layers: int) -> list[SimOp]:
    """The operations of a rank in `steps` steps: all micro batches forward, then all backward."""
    of, mesh = job.of_rank[rank], job.mesh
    stage = rank // prod(mesh[1:])
    ops: list[SimOp] = []

    def call(axis: str, kind: str, numel: int, peer: int | None = None, site: str = "") -> None:
        if axis in of:
            ops.append(SimOp(of[axis], kind, numel, peer=peer, site=f"{axis}_{site or kind}"))

    for _ in range(steps):
        for forward in (True, False) if rank < prod(mesh) else ():
            for _ in range(micro):
                before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
                if 0 <= before < mesh[0]:
                    call("pp", "recv", 4096, before)
                for layer in range(layers):
                    way = "forward" if forward else "backward"
                    call("dp_shard", "_all_gather_base", 1000 + layer, site=f"unshard_{way}")
                    call("tp", "all_reduce", 512, site=f"attention_{way}")
                    call("cp", "all_gather" if forward else "reduce_scatter", 2048)
                    call("tp", "all_reduce", 768, site=f"mlp_{way}")
                    if not forward:
                        call("dp_shard", "_reduce_scatter_base", 1000 + layer)
                if 0 <= after < mesh[0]:
                    call("pp", "send", 4096, after)
        call("dp_replicate", "all_reduce", 9000)
        call("trainers", "all_reduce", 3)
        call("results", "broadcast", 5)
        call("pp", "all_reduce", 2, site="norm")
        call("world", "all_reduce", 1)
    return ops


@dataclass(slots=True)
class SimulatedHang:
    job: Job
    fault: Fault
    culprit: int | None
    scene: HangEvidence
    raw: dict[int, dict[str, Any]]
    """Rank -> dump in torch's form."""


class CallNumbers(NamedTuple):
    """Numbers of an operation in its group, which torch counts separately for sends."""

    collectives: int
    sends: int

    def after(self, steps: int) -> "CallNumbers":
        """The numbers after `steps` more steps. A pipeline has more sends than collectives."""
        return CallNumbers(self.collectives + steps, self.sends + SENDS_PER_COLLECTIVE * steps)

    def of(self, op: SimOp) -> int:
        return self.collectives if op.peer is None else self.sends


@dataclass(slots=True)
class _SimRank:
    ops: list[SimOp]
    called: int = 0
    done: int = 0
    halt: int | None = None
    """Index of the first operation that the rank does not call."""
    calls: dict[tuple[int, bool], int] = field(default_factory=lambda: defaultdict(int))
    """(group, is a collective) -> number of calls."""
    numbers: list[CallNumbers] = field(default_factory=list)
    over: set[int] = field(default_factory=set)
    """Operations that ended before an older one, which is possible as each group has a stream."""

    def is_over(self, place: int) -> bool:
        return place < self.done or place in self.over

    def settle(self) -> None:
        while self.done in self.over:
            self.over.remove(self.done)
            self.done += 1

    def heads(self) -> Iterator[int]:
        """The oldest pending operation of each group."""
        seen: set[int] = set()
        for place in range(self.done, self.called):
            group = self.ops[place].group
            if group not in seen and place not in self.over:
                seen.add(group)
                yield place


class Simulation:
    """Runs all ranks until no rank can advance. With `streams`, operations of one group do not wait
    for those of another, as on a device, so a later call may complete first.
    """

    def __init__(
        self, job: Job, programs: list[list[SimOp]], ahead: int, streams: bool = False
    ) -> None:
        self.streams = streams
        self.job = job
        self.ranks = [_SimRank(ops) for ops in programs]
        self.ahead = ahead
        self.broken: set[tuple[int, int]] = set()
        """Operations that never end: (group, number)."""
        self.arrived: dict[tuple[int, int], dict[int, SimOp]] = defaultdict(dict)
        self.places: dict[tuple[int, int, int], int] = {}
        """(group, number, rank) -> where in its program."""

    def run_until_blocked(self) -> bool:
        """Run; whether the job hangs, i.e. a rank did not finish its program."""
        work = deque(range(len(self.ranks)))
        while work:
            work.extend(self._advance(work.popleft()))
        return any(rank.done < len(rank.ops) for rank in self.ranks)

    def _advance(self, number: int) -> list[int]:
        rank = self.ranks[number]
        self._call(rank)
        if not self.streams:
            return self._advance_at(number, rank.done) if rank.done < rank.called else []
        for place in rank.heads():
            if moved := self._advance_at(number, place):
                return moved
        return []

    def _advance_at(self, number: int, place: int) -> list[int]:
        rank = self.ranks[number]
        op = rank.ops[place]
        seq = rank.numbers[place].of(op)
        if op.peer is not None:
            return self._match_send(number, place)
        here = self.arrived[op.group, seq]
        here[number] = op
        self.places[op.group, seq, number] = place
        members = self.job.groups[op.group].members
        if len(here) < len(members) or (op.group, seq) in self.broken:
            return []
        if len({(o.kind, o.numel, o.dtype) for o in here.values()}) > 1:
            return []
        for member in members:
            self._end(member, self.places[op.group, seq, member])
        return list(members)

    def _end(self, number: int, place: int) -> None:
        self.ranks[number].over.add(place)
        self.ranks[number].settle()

    def _call(self, rank: _SimRank) -> None:
        end = len(rank.ops) if rank.halt is None else rank.halt
        while rank.called < end and rank.called - rank.done < self.ahead:
            last = rank.called - 1
            if rank.called > rank.done and rank.ops[last].group == 0 and not rank.is_over(last):
                return  # The program reads the result of the last operation of a step.
            op = rank.ops[rank.called]
            rank.calls[op.group, op.peer is None] += 1
            counts = rank.calls[op.group, True], rank.calls[op.group, False]
            rank.numbers.append(CallNumbers(*counts))
            rank.called += 1

    def _match_send(self, number: int, place: int) -> list[int]:
        op = self.ranks[number].ops[place]
        assert op.peer is not None
        peer = self.job.groups[op.group].members[op.peer]
        other = self.ranks[peer]
        heads = other.heads() if self.streams else range(other.done, other.called)[:1]
        for there in heads:
            theirs = other.ops[there]
            if (
                theirs.peer is not None
                and {op.kind, theirs.kind} == {"send", "recv"}
                and self.job.groups[theirs.group].members[theirs.peer] == number
                and op.numel == theirs.numel
            ):
                self._end(number, place)
                self._end(peer, there)
                return [number, peer]
        return []


def random_hang(
    seed: int,
    fault: Fault,
    lost: float = 0.0,
    evaluator: bool = False,
    streams: bool = False,
) -> "SimulatedHang":
    """A hang on a mesh, with a backend and buffers that follow from the seed."""
    draw = random.Random(f"{seed} {fault}")
    return simulate_hang(
        seed,
        mesh=draw.choice(MESHES),
        fault=fault,
        blocking=draw.random() < 0.4,
        per_host=draw.choice((2, 4, 8)),
        buffer=draw.choice((60, 120, 2000)),
        lost=lost,
        known_mesh=lost > 0,
        evaluator=evaluator,
        streams=streams,
    )


def active_only(found: "SimulatedHang") -> "SimulatedHang":
    """The same hang with NCCL dumps of pending operations only. Dumps of gloo do not change,
    because gloo never marks an entry as completed.
    """
    dumps = {
        rank: condense(rank, {**raw, "entries": _pending(raw)}) for rank, raw in found.raw.items()
    }
    return dataclasses.replace(found, scene=replace(found.scene, dumps=dumps))


def _pending(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in raw["entries"] if entry["state"] != "completed"]


def simulate_hang(
    seed: int,
    *,
    mesh: Sequence[int],
    fault: Fault,
    blocking: bool = False,
    per_host: int = 8,
    buffer: int = 60,
    lost: float = 0.0,
    lost_stacks: float = 0.0,
    known_mesh: bool = False,
    evaluator: bool = False,
    streams: bool = False,
) -> SimulatedHang:
    """A job that hangs because of `fault`. It is drawn again until it hangs."""
    draw = random.Random(seed)
    job = make_job(mesh, evaluator)
    while True:
        run, culprit = _hang(draw, job, fault, blocking, streams and not blocking)
        if run.run_until_blocked():
            break
    bases = {group.desc: draw.randrange(50_000) for group in job.groups}
    base = [bases[group.desc] for group in job.groups]
    raw = {
        rank: _dump(job, run.ranks[rank], rank, base, buffer, blocking)
        for rank in range(job.world)
        if not (fault in ("stopped", "busy") and rank == culprit)
    }
    raw = {rank: dump for rank, dump in raw.items() if draw.random() >= lost}
    facts = {
        rank: _facts(run.ranks[rank], rank, fault, culprit, blocking, per_host)
        for rank in range(job.world)
    }
    facts = {
        rank: replace(fact, stack=(), asked=False) if draw.random() < lost_stacks else fact
        for rank, fact in facts.items()
    }
    dumps = {rank: condense(rank, dump) for rank, dump in raw.items()}
    axes: dict[str, tuple[tuple[int, ...], ...]] = defaultdict(tuple)
    for group in job.groups if known_mesh else ():
        if group.desc != "undefined":
            axes[group.desc] += (group.members,)
    scene = HangEvidence(dumps=dumps, facts=facts, world=job.world, axes=axes)
    return SimulatedHang(job, fault, culprit, scene, raw)


def _hang(
    draw: random.Random, job: Job, fault: Fault, blocking: bool, streams: bool
) -> tuple[Simulation, int | None]:
    shape = (draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 2))
    programs = [program(job, rank, *shape) for rank in range(job.world)]
    run = Simulation(job, programs, 1 if blocking else draw.choice((4, 16, 48)), streams)
    odd = (
        job.world > prod(job.mesh) and fault in PROGRAM
    )  # no evidence shows which of the two it was
    culprit = draw.randrange(1, job.world - 1) if odd else draw.randrange(job.world)
    ops = programs[culprit]
    at = draw.randrange(len(ops))
    collective = [i for i, op in enumerate(ops) if op.peer is None]
    if fault in STOPS:
        run.ranks[culprit].halt = at
    elif fault == "network":
        at = draw.choice(collective)
        seq = sum(op.group == ops[at].group and op.peer is None for op in ops[: at + 1])
        run.broken.add((ops[at].group, seq))
        return run, None
    else:
        _spoil(draw, ops, draw.choice(collective), fault)
    return run, culprit


def _spoil(draw: random.Random, ops: list[SimOp], at: int, fault: Fault) -> None:
    if fault == "skip":
        del ops[at]
    elif fault == "shape":
        ops[at] = dataclasses.replace(ops[at], numel=ops[at].numel + 1)
    elif fault == "dtype":
        ops[at] = dataclasses.replace(ops[at], dtype="Float")
    elif fault == "kind":
        ops[at] = dataclasses.replace(ops[at], kind="broadcast")
    elif at + 1 < len(ops):
        ops[at], ops[at + 1] = ops[at + 1], ops[at]


def _dump(
    job: Job, rank: _SimRank, number: int, base: list[int], buffer: int, blocking: bool
) -> dict[str, Any]:
    entries = []
    for i in range(rank.called):
        op, done = rank.ops[i], rank.is_over(i)
        if op.peer is not None and blocking:
            continue
        at = rank.numbers[i].after(base[op.group])
        entries.append(_entry(job, op, number, at, done, blocking))
        entries[-1]["record_id"] = len(entries) - 1
    config = {
        job.groups[group].name: {
            "name": job.groups[group].name,
            "desc": job.groups[group].desc,
            "ranks": str(list(job.groups[group].members)),
        }
        for group in sorted(job.of_rank[number].values())
    }
    return {
        "version": "2.10",
        "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}} if blocking else config,
        "pg_status": _status(rank, base, blocking),
        "entries": entries[-buffer:],
    }


def _status(rank: _SimRank, base: list[int], blocking: bool) -> dict[str, dict[str, int]]:
    """`pg_status` of a dump. NCCL reports the number of its last operation, even if it is a send,
    which has its own count. gloo has one count for all operations.
    """
    status: dict[str, dict[str, int]] = {}
    for i in range(rank.called):
        op = rank.ops[i]
        if op.peer is not None and blocking:
            continue
        at = rank.numbers[i].after(base[op.group])
        group = status.setdefault(
            str(op.group),
            {
                "last_enqueued_collective": -1,
                "last_started_collective": -1,
                "last_completed_collective": -1,
            },
        )
        group["last_enqueued_collective"] = sum(at) if blocking else at.of(op)
        if rank.is_over(i):
            group["last_completed_collective"] = group["last_enqueued_collective"]
    return status


def _entry(
    job: Job, op: SimOp, number: int, at: CallNumbers, done: bool, blocking: bool
) -> dict[str, Any]:
    group = job.groups[op.group]
    name = op.kind
    if op.peer is not None:
        me = group.members.index(number)
        arrow = "->" if op.kind == "send" else "<-"
        name = f"{op.kind} {me}{arrow}{op.peer}"
    return {
        "pg_id": op.group,
        "process_group": (group.name, group.desc),
        "collective_seq_id": at.collectives,
        "p2p_seq_id": 0 if blocking else at.sends,
        "op_id": sum(at),
        "profiling_name": f"{'gloo' if blocking else 'nccl'}:{name}",
        "time_created_ns": 0,
        "input_sizes": [[op.numel]],
        "input_dtypes": [op.dtype],
        "output_sizes": [[op.numel]],
        "output_dtypes": [op.dtype],
        "state": "completed" if done and not blocking else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": op.peer is not None,
    }


TOP = '  File "/job/trainer/main.py", line 40 in <module>'
IN_GLOO = (
    '  File "/venv/torch/distributed/distributed_c10d.py", line 3245 in {}',
    '  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper',
    '  File "/job/trainer/step.py", line 71 in run',
    TOP,
)
CALLED = '  File "/job/trainer/parallel/calls.py", line 9 in {}'
"""Each place that calls an operation is a separate function."""
AT_EXIT = ('  File "/venv/multiprocessing/util.py", line 300 in _exit_function', TOP)
AT_SYNC = ('  File "/job/trainer/step.py", line 90 in agree', TOP)
ELSEWHERE: dict[Fault, tuple[str, ...]] = {
    "busy": ('  File "/job/trainer/data/mask.py", line 12 in spin', TOP),
    "loader": ('  File "/job/trainer/data/loader.py", line 31 in read', TOP),
    "checkpoint": ('  File "/venv/torch/distributed/checkpoint/filesystem.py", line 9 in w', TOP),
}


def _facts(
    rank: _SimRank, number: int, fault: Fault, culprit: int | None, blocking: bool, per_host: int
) -> RankFacts:
    stack: tuple[str, ...] = AT_SYNC
    if rank.done == len(rank.ops):
        stack = AT_EXIT
    elif blocking:
        op = rank.ops[rank.done]
        stack = (IN_GLOO[0].format(op.kind), IN_GLOO[1], CALLED.format(op.site), *IN_GLOO[2:])
    state = "S"
    if number == culprit and fault in STOPS:
        stack = ELSEWHERE.get(fault, ())
        state = {"stopped": "T", "busy": "R"}.get(fault, "S")
    return RankFacts(
        rank=number,
        host=f"host-{number // per_host}",
        process_state=state,
        asked=True,
        stack=stack,
        step=4,
        phase="train",
    )
