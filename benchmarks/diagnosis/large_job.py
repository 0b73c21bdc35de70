"""Dumps of a large job with one stuck rank: is it named, in what time and memory?"""

import pickle
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from orchestrator.diagnosis.dumps.load_evidence import read_folder
from orchestrator.diagnosis.hang.analyse import analyse
from tests.diagnosis.simulated_hang import Job, make_job

OPERATIONS = 40
"""In each dump of the large job: the last ones."""
LAST = OPERATIONS // 4
"""Of a group's collectives there, the one that the culprit did not call."""


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
