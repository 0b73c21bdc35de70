"""Training of one attempt by the ranks on all its hosts.

A step is one event for all ranks, because a collective keeps them together. Ranks read the fence
before they save a checkpoint, as the trainer does; here both happen at one moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from msgspec import Struct

from ndctl.rank.phases import Phase
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.memory.peers import CopyPlan
from orchestrator.contract.messages.events import (
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    MemoryCheckpointsSet,
    TrainingResumed,
)
from orchestrator.contract.skipped_batches import Window, batch_of, merge_windows
from orchestrator.simulation.clock import EPOCH, Timeline
from orchestrator.simulation.world.host_memory import (
    ALONE,
    WITH_PARTNERS,
    Copy,
    HostMemory,
    Memories,
)
from orchestrator.simulation.world.network import Network
from orchestrator.simulation.world.partners import PartnerOf, Partners
from orchestrator.simulation.world.storage import Checkpoint, Storage
from orchestrator.simulation.world.training_faults import (
    OUT_OF_MEMORY,
    RankFailure,
    TrainingFaults,
    not_finite,
)

INIT_S = 8.0
SAVE_S = 2.0
STALL_POLL_S = 2.0
"""Seconds between two checks whether stalled ranks can continue."""
LATE_AT_STOP = 0.3
"""Part of the stops in which partners do not get the last step in time."""
PEER_CLOSED_S = 3.0
"""Longest time until a rank sees that the connection to a dead peer is closed."""


INTERVALS = (2, 3, 5, 8)
"""Checkpoint intervals in steps that ranks may choose."""

NO_ROOM_AT_START, NO_ROOM_AT_STEP = 0.05, 0.001
"""Probabilities that a host has too little memory for checkpoints."""
TrainingNews = (
    TrainingResumed
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointIntervalChanged
    | MemoryCheckpointsSet
)


class Ranks(Protocol):
    """The ranks of one host, as `Training` uses them."""

    @property
    def host(self) -> str: ...
    @property
    def hung(self) -> bool: ...
    @property
    def slow_s(self) -> float: ...
    @property
    def memory(self) -> HostMemory: ...
    @property
    def copies(self) -> CopyPlan: ...

    def end_all(self, exit_code: int) -> None: ...
    def fail_one(self, failure: RankFailure) -> None: ...
    def lose_peer(self) -> None: ...
    def report_news(self, news: TrainingNews) -> None: ...
    def first_step(self) -> None: ...


class Work(Struct, frozen=True):
    """The work of an attempt."""

    steps: int
    step_s: float
    save_every: int
    auto_interval: bool
    skip: tuple[Window, ...]
    """Data that must be skipped."""
    peak_bytes: int
    """Device memory that the plan takes."""
    config: str | None
    """Names the plan of the checkpoints in memory; None: there are none."""
    lineage: int
    """Of the checkpoints in memory that may be used."""


class MemoryWatch(Protocol):
    """Checks checkpoints in memory (`laws/memory_laws.py`)."""

    def resumes(self, attempt: int, config: str, copies: Sequence[Copy]) -> None: ...
    def repairs(self, attempt: int, steps_without: int) -> None: ...


@dataclass(slots=True, eq=False)
class Training:
    attempt: int
    nodes: int
    work: Work
    timeline: Timeline
    random: Random
    network: Network
    storage: Storage
    training_faults: TrainingFaults
    on_checkpoint: Callable[[Checkpoint], None]
    """Called with each saved checkpoint."""
    partner_of: PartnerOf
    memory_watch: MemoryWatch
    members: dict[int, Ranks] = field(default_factory=dict)
    """Key: node rank."""
    step: int = 0
    interval: int = 0
    step_length_s: float = 0.0
    """Seconds of the last step."""
    batches: tuple[int, ...] = ()
    """Batches that the weights were trained on."""
    skipped: tuple[Window, ...] = ()
    bad_steps: tuple[int, ...] = ()
    from_memory: bool = False
    """It resumed from checkpoints in memory."""
    memories: Memories | None = None
    partners: Partners | None = None
    phase: Phase = "init"
    progress_at: float = 0.0
    begun: bool = False
    has_stepped: bool = False
    """A step was done."""
    has_ended: bool = False
    exit_requested: bool = False
    """A rank was told to save a checkpoint and exit. All agree on this at the end of a step."""
    exit_on_disk: bool = False
    """And the checkpoint must be on the disk."""
    save_requested: bool = False
    """A rank was told to save a checkpoint and go on."""

    def join(self, node_rank: int, ranks: Ranks) -> None:
        self.members[node_rank] = ranks
        if len(self.members) == self.nodes:
            self._later(INIT_S, self._begin)

    def host_exited(self, ranks: Ranks) -> None:
        """The ranks of a host have exited. Other ranks lose the connection or wait forever."""
        self.has_ended = True
        for other in self.members.values():
            if other is not ranks and self.random.randrange(10) < 7:
                self.timeline.after(PEER_CLOSED_S * self.random.random(), other.lose_peer)

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timeline.after(seconds, partial(self._when_all_connected, callback))

    def _when_all_connected(self, callback: Callable[[], None]) -> None:
        """Run `happen` when all ranks run and reach each other."""
        if self.has_ended:
            return
        hosts = [ranks.host for ranks in self.members.values()]
        is_partitioned = any(not self.network.reaches(hosts[0], host) for host in hosts)
        if is_partitioned or any(ranks.hung for ranks in self.members.values()):
            self.timeline.after(STALL_POLL_S, partial(self._when_all_connected, callback))
            return
        callback()

    def _begin(self) -> None:
        if not self.storage.reachable_from(self.members[0].host):
            self._later(STALL_POLL_S, self._begin)
            return
        self.begun = True
        found = self.storage.newest_checkpoint(self.work.skip)
        remembered = self._newest_in_memory(found)
        self.from_memory = remembered is not None
        self._resume(remembered or found)
        self._enter_phase("train")
        resumed = TrainingResumed(
            attempt=self.attempt, step=self.step, in_memory=remembered is not None
        )
        self.members[0].report_news(resumed)
        if self._has_no_room(NO_ROOM_AT_START):
            self._forget()
        if not self._fail_one(self.training_faults.failure_at_start(self.timeline.now)):
            self._next()

    def _newest_in_memory(self, found: Checkpoint | None) -> Checkpoint | None:
        """The newest checkpoint that all hosts have in memory, if it is as new as `found`."""
        if self.work.config is None:
            return None
        ranks = [self.members[number] for number in range(self.nodes)]
        hosts, plan = [one.memory for one in ranks], ranks[0].copies
        self.memories = Memories(
            self.random, self.work.config, self.attempt, hosts, self.work.lineage, plan.resumed
        )
        newest = self.memories.newest(self.work.skip)
        if newest and found is not None and found.step > newest[0].made.step:
            newest = ()
        self.memory_watch.resumes(self.attempt, self.work.config, newest)
        names = [[peer.host for peer in one.copies.partners] for one in ranks]
        shared = None
        if newest:
            made = newest[0].made
            fetched = made == plan.restored or newest[0].place.config != self.work.config
            shared = made if fetched else newest[0].shared
        self.partners = Partners(
            self.random, [one.host for one in ranks], hosts, names, self.partner_of, shared
        )
        self.memories.resume(newest, WITH_PARTNERS if self.partners.copies else ALONE)
        return newest[0].content if newest else None

    def _resume(self, found: Checkpoint | None) -> None:
        self.interval = self.work.save_every
        if found is not None:
            self.step, self.batches, self.bad_steps = found.step, found.batches, found.bad_steps
            self.skipped = found.skipped
        self.skipped = merge_windows(self.skipped, self.work.skip)

    def _fail_one(self, failure: RankFailure | None) -> bool:
        """Whether a rank fails now."""
        if failure is not None:
            self.random.choice(list(self.members.values())).fail_one(failure)
        return failure is not None

    def _enter_phase(self, phase: Phase) -> None:
        self.phase, self.progress_at = phase, self.timeline.now

    def _next(self) -> None:
        if self.step >= self.work.steps:
            self._enter_phase("exit")
            self._later(1.0, partial(self._exit_all, exit_codes.OK))
        else:
            self.step_length_s = self.work.step_s + max(
                ranks.slow_s for ranks in self.members.values()
            )
            self._later(self.step_length_s, self._finish_step)

    def _finish_step(self) -> None:
        if self.training_faults.runs_out_of_memory(self.work.peak_bytes):
            self._fail_one(OUT_OF_MEMORY)
            return
        self.step += 1
        batch = batch_of(self.step, self.skipped)
        self.batches += (batch,)
        if self.storage.reachable_from(self.members[0].host):
            self.storage.reached = Reached(
                attempt=self.attempt, step=self.step, at=EPOCH + self.timeline.now
            )
        self._enter_phase("train")
        self.bad_steps = (
            (*self.bad_steps, self.step) if self.training_faults.makes_nan(self.step, batch) else ()
        )
        if len(self.bad_steps) >= self.training_faults.bad_steps_allowed:
            self._fail_one(not_finite(self.step, self.bad_steps[0]))
            return
        self._copy_to_memory()
        if not self.has_stepped:
            self.has_stepped = True
            self.members[0].first_step()
        due = self.step % self.interval == 0 or self.step == self.work.steps
        if self.exit_requested and not (due or self.exit_on_disk) and self._stays_in_memory():
            self._exit_all(exit_codes.CHECKPOINTED)
        elif self.exit_requested or self.save_requested or due:
            self.save_requested = False
            self._enter_phase("checkpoint")
            self._later(SAVE_S + self.storage.delay, self._save)
        else:
            self._next()

    def _has_no_room(self, probability: float) -> bool:
        """Whether a host has too little memory now. Other random choices do not depend on it."""
        if self.memories is None:
            return False
        return Random(f"{self.attempt} {self.timeline.now}").random() < probability

    def _forget(self) -> None:
        """A host has too little memory, so no rank keeps anything there."""
        assert self.memories is not None
        for memory in self.memories.hosts:
            memory.give_back()
        self.memories = self.partners = None
        said = MemoryCheckpointsSet(attempt=self.attempt, copies=None, why="no memory is left")
        self.members[0].report_news(said)

    def _copy_to_memory(self) -> None:
        if self._has_no_room(NO_ROOM_AT_STEP):
            self._forget()
        if self.memories is None or self.partners is None:
            return
        shared, unstable = self.partners.shared, bool(self.bad_steps)
        if self.memories.begins(self._content(), shared, unstable=unstable):
            self.partners.begin()
        self.partners.after_step()
        self.memory_watch.repairs(self.attempt, self.partners.steps_without)

    def _stays_in_memory(self) -> bool:
        """Whether the hosts and their partners have the present step, in time."""
        if self.memories is None or self.partners is None or self.bad_steps:
            return False
        if not self.partners.copies or self.random.random() < LATE_AT_STOP:
            return False
        self.memories.begin_last(self._content(), self.partners.shared)
        self.partners.end_all()  # an earlier step may be on its way
        self.partners.begin()
        return self.partners.end_all()

    def _save(self) -> None:
        self._enter_phase("train")
        fence, first = self.storage.fence, self.members[0]
        if not self.storage.reachable_from(first.host):
            self._enter_phase("checkpoint")
            self._later(STALL_POLL_S, self._save)  # the write blocks
            return
        if fence is not None and fence.attempt > self.attempt:
            first.end_all(exit_codes.FAILED)
            return
        if self.storage.full:
            first.report_news(
                CheckpointFailed(attempt=self.attempt, step=self.step, why="no space left")
            )
        else:
            self._record_checkpoint()
        if self.exit_requested:
            self._exit_all(exit_codes.CHECKPOINTED)
        else:
            self._next()

    def _content(self) -> Checkpoint:
        """What a checkpoint of now holds."""
        now, done = self.timeline.now, self.step
        return Checkpoint(now, done, self.attempt, self.batches, self.skipped, self.bad_steps)

    def _record_checkpoint(self) -> None:
        first, saved = self.members[0], self._content()
        self.on_checkpoint(saved)
        self.storage.checkpoints.append(saved)
        first.report_news(CheckpointSaved(attempt=self.attempt, step=self.step))
        new = self.random.choice(INTERVALS) if self.work.auto_interval else self.interval
        if new != self.interval:
            changed = CheckpointIntervalChanged(
                attempt=self.attempt, step=self.step, old=self.interval, new=new, why="saves"
            )
            self.interval = new
            first.report_news(changed)

    def _exit_all(self, exit_code: int) -> None:
        self.has_ended = True
        for ranks in list(self.members.values()):
            ranks.end_all(exit_code)
