"""What a seed chooses: a job, a cluster, and when what breaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

KINDS: dict[str, str] = {
    "rank": "a rank is killed, raises, or leaves",
    "hang": "a rank stops moving",
    "stuck": "a host's ranks cannot be killed for a while",
    "agent": "an agent is killed with its ranks",
    "host": "a host goes off",
    "leader": "the leader dies at a line of the journal, within it, or between two actions",
    "pause": "the leader's machine stands still for a while",
    "switch": "all hosts under a leaf are cut off for a while",
    "partition": "some hosts are cut off, from the scheduler and the storage too or not",
    "storage-slow": "writes take seconds",
    "storage-full": "writes fail",
    "storage-stale": "hosts read what was there a while ago",
    "messages": "messages are lost, doubled, late and overtaken",
    "clock": "the wall clock of a host jumps",
    "preemption": "the scheduler wants the hosts for another job",
    "time-limit": "the allocation ends soon",
    "drain": "an administrator wants a host back",
    "scheduler": "the scheduler does not answer for a while",
    "amnesia": "the scheduler starts again and has forgotten the job, or whom to leave out",
    "dead-spare": "a host that comes next never gets an agent, or is found broken",
    "cancel": "a person cancels the job, at ndctl or in the scheduler",
    "double": "two of the others at once",
}
SINGLE = tuple(kind for kind in KINDS if kind != "double")


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    at: float
    pick: float
    """Which of all that it may strike, from 0 to 1."""
    size: float
    """How long or how much, from 0 to 1."""

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    seed: int
    scheduled: bool
    """By a scheduler that chooses the hosts; else they are given."""
    hosts: int
    spares: int
    ranks_per_host: int
    steps: int
    step_s: float
    save_every: int
    max_restarts: int
    hang_timeout: float | None
    init_timeout: float
    agent_timeout: float
    stop_grace: float
    shrink: bool
    min_hosts: int
    preflight: bool
    resubmitted: bool
    """A person submits it once more if it fails."""
    faults: tuple[Fault, ...]

    @property
    def words(self) -> str:
        where = "of a scheduler" if self.scheduled else "of this machine"
        return (
            f"{self.hosts}+{self.spares} hosts {where}, {self.steps} steps of {self.step_s} s,"
            f" a checkpoint each {self.save_every}, max_restarts {self.max_restarts},"
            f" shrink {self.shrink}, preflight {self.preflight};"
            f" {', '.join(map(str, self.faults)) or 'no fault'}"
        )


def scenario(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Scenario:
    """The same for the same seed and kinds of faults."""
    random = Random(seed)
    scheduled = random.random() < 0.7
    hosts = random.choice((1, 2, 2, 3, 4))
    return Scenario(
        seed=seed,
        scheduled=scheduled,
        hosts=hosts,
        spares=random.choice((0, 0, 1, 2)),
        ranks_per_host=random.choice((1, 2)),
        steps=random.randint(6, 24),
        step_s=random.choice((1.0, 3.0, 8.0)),
        save_every=random.choice((2, 4, 6)),
        max_restarts=random.choice((0, 1, 2, 3, 5)),
        hang_timeout=random.choice((None, None, 20.0)),
        init_timeout=random.choice((120.0, 600.0)),
        agent_timeout=random.choice((10.0, 10.0, 30.0)),
        stop_grace=random.choice((10.0, 30.0)),
        shrink=random.random() < 0.4,
        min_hosts=random.randint(1, hosts),
        preflight=scheduled and random.random() < 0.7,
        resubmitted=random.random() < 0.2,
        faults=_faults(random, kinds),
    )


def _faults(random: Random, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """One to six, the first ones while the job is young; or two at once."""
    faults: list[Fault] = []
    single = [kind for kind in kinds if kind != "double"] or list(SINGLE)
    horizon = random.choice((40.0, 90.0, 200.0))
    for _ in range(random.choice((1, 2, 3, 4, 6))):
        kind, at = random.choice(list(kinds)), 5.0 + random.random() * horizon
        struck = [random.choice(single), random.choice(single)] if kind == "double" else [kind]
        faults += [Fault(one, at, random.random(), random.random()) for one in struck]
    return tuple(sorted(faults, key=lambda fault: fault.at))
