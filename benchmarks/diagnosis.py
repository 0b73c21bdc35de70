"""How often `ndctl diagnose` names the right rank, and how long it takes at 100,000 ranks.

    python -m benchmarks.diagnosis [FAULTS] [RANKS]

Faults are simulated (`tests/diagnosis/simulated_hang.py`): hangs, skipped, misordered and
mismatched operations over meshes of all axes, by seeds that the analysis was not made with. Limits:
the right rank first in 98 of 100, in 95 where a quarter of the dumps is missing, and at most one
wrong host in 100; 100,000 ranks in 60 s and 4 GiB.
"""

import pickle
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import machine
from orchestrator.diagnosis.dumps.load_evidence import read_folder
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence
from tests.diagnosis.simulated_hang import (
    FAULTS,
    JUDGED,
    MESHES,
    STOPS,
    Job,
    make_job,
    random_hang,
)

OPERATIONS = 40
"""In each dump of the large job: the last ones."""
LAST = OPERATIONS // 4
"""Of a group's collectives there, the one that the culprit did not call."""


def main(faults: int, ranks: int) -> int:
    print(machine())
    fine = True
    for lost, limit in ((0.0, 0.98), (0.25, 0.95)):
        fine &= score(faults, lost).within(limit)
    score(faults, 0.0, evaluator=True)
    return 0 if large(ranks) and fine else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    faults: int
    right: int
    """Whose culprit was named first."""
    wrong: int
    """For which hosts would be left out, and not the culprit's."""

    def within(self, limit: float) -> bool:
        return self.right >= limit * self.faults and 100 * self.wrong <= self.faults


def score(
    faults: int,
    lost: float,
    evaluator: bool = False,
    judge: Callable[[HangEvidence], Diagnosis] = analyse,
) -> Score:
    right: Counter[str] = Counter()
    all_: Counter[str] = Counter()
    named = wrong = 0
    for seed in JUDGED[:faults]:
        found = random_hang(seed, FAULTS[seed % len(FAULTS)], lost, evaluator)
        verdict = judge(found.scene)
        all_[found.fault] += 1
        right[found.fault] += verdict.ranks[:1] == (found.culprit,)
        named += bool(verdict.hosts)
        mine = None if found.culprit is None else found.scene.host(found.culprit)
        wrong += bool(verdict.hosts) and mine not in verdict.hosts
    share = right.total() / all_.total()
    stops = sum(right[fault] for fault in STOPS) / sum(all_[fault] for fault in STOPS)
    beside = " and a rank that evaluates" if evaluator else ""
    print(f"{faults} faults on {len(MESHES)} meshes{beside}, {lost:.0%} of the dumps missing:")
    print(f"  right rank first {share:.1%}; of ranks that stopped {stops:.1%}")
    print(f"  hosts left out {named}, wrong ones {wrong}")
    for fault in FAULTS:
        print(f"    {fault:<12}{right[fault]:>4} of {all_[fault]}")
    return Score(faults=all_.total(), right=right.total(), wrong=wrong)


def large(ranks: int) -> bool:
    """One rank of a large job is stuck in its data loader."""
    # pp 8, dp_replicate as it comes, dp_shard 16, tp 8
    job = make_job((8, max(2, ranks // 1024), 16, 1, 8))
    culprit = random.Random(1).randrange(job.world)
    with tempfile.TemporaryDirectory() as folder:
        size = write(job, culprit, Path(folder))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        own = usage.ru_utime + usage.ru_stime
        begun = time.perf_counter()
        scene = read_folder(Path(folder))
        read = time.perf_counter() - begun
        verdict = analyse(scene)
        took = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    total = peak + 2 * child
    cpu = sum(
        used.ru_utime + used.ru_stime - before
        for used, before in (
            (resource.getrusage(resource.RUSAGE_SELF), own),
            (resource.getrusage(resource.RUSAGE_CHILDREN), 0.0),
        )
    )
    print(
        f"{job.world:,} dumps of {OPERATIONS} operations ({size / 2**30:.1f} GiB):"
        f" read in {read:.1f} s, judged in {took - read:.1f} s"
        f" ({cpu:.1f} s of CPU in all); {peak:.2f} GiB,"
        f" and {child:.2f} GiB in each process that read"
    )
    print(f"  {verdict.kind} {verdict.ranks} (it was {culprit}), {verdict.confidence:.0%}")
    return verdict.ranks == (culprit,) and took <= 60 and total <= 4


def write(job: Job, culprit: int, folder: Path) -> int:
    """Dumps as torch writes them; the bytes written."""
    size = 0
    reached = set(job.of_rank[culprit].values())
    for rank in range(job.world):
        data = pickle.dumps(_dump(job, rank, culprit, reached), protocol=2)
        (folder / f"flight-{rank}").write_bytes(data)
        size += len(data)
    return size


def _dump(job: Job, rank: int, culprit: int, reached: set[int]) -> dict[str, Any]:
    """The culprit did not call the last operation of any of its groups; others wait in theirs that
    it is in, or in their last. What a rank did last with its neighbours in the pipeline were sends
    and receives."""
    groups = [job.of_rank[rank][axis] for axis in ("dp_shard", "tp", "dp_replicate", "pp")]
    entries = []
    for i in range(OPERATIONS - 1):
        done, kind = i // len(groups), i % len(groups)
        make = _talk if groups[kind] == groups[-1] else _collective
        entries.append(make(job, groups[kind], rank, done) | {"record_id": i})
    if rank != culprit:
        shared = [group for group in groups if group in reached]
        last = _collective(job, (shared or groups)[0], rank, LAST)
        entries.append(last | {"record_id": OPERATIONS, "state": "scheduled", "retired": False})
    config = {
        job.groups[group].name: {
            "name": job.groups[group].name,
            "desc": job.groups[group].desc,
            "ranks": str(list(job.groups[group].members)),
        }
        for group in groups
    }
    return {
        "version": "2.10",
        "pg_config": config,
        "pg_status": {str(group): _status(group, entries) for group in groups},
        "entries": entries,
    }


def _status(group: int, entries: list[dict[str, Any]]) -> dict[str, int]:
    """As NCCL's watchdog has it: of whatever was last, the number of its kind."""
    numbers = [
        (entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"], entry["retired"])
        for entry in entries
        if entry["pg_id"] == group
    ]
    return {
        "last_enqueued_collective": numbers[-1][0],
        "last_started_collective": -1,
        "last_completed_collective": max(number for number, done in numbers if done),
    }


def _collective(job: Job, group: int, rank: int, number: int) -> dict[str, Any]:
    return _entry(job, group, "all_reduce", (1000 + number, 0), talks=False)


def _talk(job: Job, group: int, rank: int, number: int) -> dict[str, Any]:
    """From each even stage to the next."""
    stage = job.groups[group].members.index(rank)
    sends = stage % 2 == 0
    kind = f"send {stage}->{stage + 1}" if sends else f"recv {stage}<-{stage - 1}"
    return _entry(job, group, kind, (1000 + LAST - 1, 7000 + number), talks=True)


def _entry(
    job: Job, group: int, kind: str, numbers: tuple[int, int], *, talks: bool
) -> dict[str, Any]:
    return {
        "pg_id": group,
        "process_group": (job.groups[group].name, job.groups[group].desc),
        "thread_name": "python",
        "thread_id": "140269789105024",
        "collective_seq_id": numbers[0],
        "p2p_seq_id": numbers[1],
        "op_id": sum(numbers),
        "profiling_name": f"nccl:{kind}",
        "time_created_ns": 1795325575486892365,
        "input_sizes": [[4096, 8192]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 8192]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": talks,
    }


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(arguments + [600, 100_000][len(arguments) :])))
