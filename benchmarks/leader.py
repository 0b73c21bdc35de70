"""How long the leader of many ranks cannot answer while all ranks hang, and while they stop.

    python -m benchmarks.leader [RANKS]

The detectors, the queue, `step` and the journal are the real ones. The journal is on a disk, and
the fence is read before each write. The ranks are digests that report the same step again.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks.measure.timing import machine
from orchestrator.contract.files.fence import Fence, check_leader, write_fence
from orchestrator.contract.messages.actions import Action, GatherEvidence, StartAttempt
from orchestrator.contract.messages.agent_protocol import Digest, RankDigest, StepTimes
from orchestrator.contract.messages.events import Event, HostStopped, Tick, stamped
from orchestrator.journal.journal import Journal
from orchestrator.journal.supervisor import Supervisor
from orchestrator.leader.event_queue import EventQueue
from orchestrator.leader.monitor import Monitor
from orchestrator.system import SystemClock
from tests.job.job_driver import Job, exited, host

RANKS = 16_384
EACH = 8
LOOK_S = 0.25
STEPS = StepTimes(count=20, total_s=20.0, longest_s=1.0)


def digests(ranks: int, still_s: float) -> Iterable[Digest]:
    """Of all hosts: every rank has been in the same step for so long."""
    for first in range(0, ranks, EACH):
        yield Digest(
            attempt=1,
            ranks=tuple(
                RankDigest(
                    rank=rank,
                    pid=rank,
                    step=20,
                    phase="train",
                    age_s=still_s,
                    still_s=still_s,
                    loss=1.0,
                    tokens_per_second=1.0,
                    steps=STEPS if rank == first and not still_s else None,
                )
                for rank in range(first, first + EACH)
            ),
        )


def standstill(supervisor: Supervisor, ranks: int, at: float) -> list[Event]:
    """What the detectors make of it, up to the look that finds the hang."""
    job = supervisor.run.job
    assert job is not None
    lookout = Monitor(job)
    lookout.begin(1, supervisor.run, at)
    events: list[Event] = []
    now = at
    while lookout.hang is None:
        if (now - at) % 1 == 0:
            for digest in digests(ranks, now - at):
                events += (stamped(event, now) for event in lookout.hear(digest, now))
        events += (stamped(event, now) for event in lookout.look(lambda: True, now))
        events.append(Tick(at=now))
        now += LOOK_S
    return events


def stop(ranks: int, at: float) -> list[Event]:
    ends: list[Event] = [
        exited(rank, at=at, stopped=True, host=host(rank // EACH)) for rank in range(ranks)
    ]
    hosts = range(ranks // EACH)
    gone = [HostStopped(at=at + 1, attempt=1, host=host(n), finished=False) for n in hosts]
    return [*ends, *gone]


async def measure(ranks: int, folder: Path, what: str, kind: type[Action]) -> None:
    """From the queue to the first action of `kind`."""
    fence, path, clock = folder / "fence.json", folder / f"{kind.__name__}.jsonl", SystemClock()
    write_fence(fence, Fence(leader="me", attempt=1))
    done: list[Action] = []

    async def perform(action: Action) -> None:
        done.append(action)

    with Journal(path, clock, guard=partial(check_leader, fence, "me")) as journal:
        supervisor = Supervisor(journal)
        job = Job(hosts=ranks // EACH, each=EACH)
        job.leads()
        for name in job.all_hosts:
            job.at -= 1  # all come in the same second
            job.registers(name)
        job.trains()
        for event, _ in job.all:
            supervisor.feed(event)
        if kind is StartAttempt:
            supervisor.feed(exited(0, at=job.at))
            events = stop(ranks, job.at)
        else:
            events = standstill(supervisor, ranks, job.at)
        lines, size = journal.seq, path.stat().st_size
        deciding = EventQueue(supervisor, perform)
        for event in events:
            deciding.happened(event)
        begun, cpu = time.perf_counter(), time.process_time()
        while not any(isinstance(action, kind) for action in done):
            await deciding.decide()
        took, cpu = time.perf_counter() - begun, time.process_time() - cpu
        lines, size = journal.seq - lines, path.stat().st_size - size
    begun = time.perf_counter()
    with Journal(path, clock) as journal:
        Supervisor(journal)
    folded = time.perf_counter() - begun
    print(f"{ranks} ranks {what} after {took:.2f} s ({cpu:.2f} s of CPU)")
    print(f"    {lines} lines, {size:,} bytes; the next leader has folded all in {folded:.2f} s")


def main(ranks: int) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(ranks, Path(folder), "stand still, looked into", GatherEvidence))
        asyncio.run(measure(ranks, Path(folder), "have stopped, started again", StartAttempt))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else RANKS)
