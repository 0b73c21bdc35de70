"""Training of one attempt by the ranks on all its hosts.

A step is one event for all ranks, because a collective keeps them together. Ranks read the fence
before they save a checkpoint, as the trainer does; here both happen at one moment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.events import (
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    TrainingResumed,
)
from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.skipped_batches import Window, batch_of, merge_windows
from orchestrator.simulation.clock import Timeline
from orchestrator.simulation.world.network import Network
from orchestrator.simulation.world.storage import Checkpoint, Storage
from orchestrator.simulation.world.training_faults import OUT_OF_MEMORY, Troubles, Words, not_finite

INIT_S = 8.0
SAVE_S = 2.0
STALL_LOOK_S = 2.0
"""Seconds between two checks whether stalled ranks can continue."""
PEER_SEES_S = 3.0
"""Longest time until a rank sees that the connection to a dead peer is closed."""


PACES = (2, 3, 5, 8)
"""Checkpoint intervals in steps that ranks may choose."""

Word = TrainingResumed | CheckpointSaved | CheckpointFailed | CheckpointIntervalChanged


class Ranks(Protocol):
    """The ranks of one host, as `Training` uses them."""

    @property
    def host(self) -> str: ...
    @property
    def hung(self) -> bool: ...
    @property
    def slow_s(self) -> float: ...

    def end_all(self, exit_code: int) -> None: ...
    def fails(self, words: Words) -> None: ...
    def lose_peer(self) -> None: ...
    def tell(self, word: Word) -> None: ...
    def first_step(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an attempt."""

    steps: int
    step_s: float
    save_every: int
    paced: bool
    skip: tuple[Window, ...]
    """Data that must be skipped."""
    peak_bytes: int
    """Device memory that the plan takes."""


@dataclass(slots=True, eq=False)
class Training:
    attempt: int
    nodes: int
    work: Work
    timeline: Timeline
    random: Random
    network: Network
    storage: Storage
    troubles: Troubles
    marked: Callable[[Checkpoint], None]
    """Called with each saved checkpoint."""
    members: dict[int, Ranks] = field(default_factory=dict)
    """Key: node rank."""
    step: int = 0
    every: int = 0
    length: float = 0.0
    """Seconds of the last step."""
    read: tuple[int, ...] = ()
    """Batches that the weights were trained on."""
    skipped: tuple[Window, ...] = ()
    bad: tuple[int, ...] = ()
    phase: Phase = "init"
    moved: float = 0.0
    begun: bool = False
    trained: bool = False
    """A step was done."""
    over: bool = False
    asked: bool = False
    """A rank was told to save a checkpoint and exit. All agree on this at the end of a step."""

    def join(self, node_rank: int, ranks: Ranks) -> None:
        self.members[node_rank] = ranks
        if len(self.members) == self.nodes:
            self._later(INIT_S, self._begin)

    def break_up(self, ranks: Ranks) -> None:
        """The ranks of a host have exited. Other ranks lose the connection or wait forever."""
        self.over = True
        for other in self.members.values():
            if other is not ranks and self.random.randrange(10) < 7:
                self.timeline.after(PEER_SEES_S * self.random.random(), other.lose_peer)

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        self.timeline.after(seconds, partial(self._if_sound, happen))

    def _if_sound(self, happen: Callable[[], None]) -> None:
        """Run `happen` when all ranks run and reach each other."""
        if self.over:
            return
        hosts = [ranks.host for ranks in self.members.values()]
        apart = any(not self.network.reaches(hosts[0], host) for host in hosts)
        if apart or any(ranks.hung for ranks in self.members.values()):
            self.timeline.after(STALL_LOOK_S, partial(self._if_sound, happen))
            return
        happen()

    def _begin(self) -> None:
        if not self.storage.serves(self.members[0].host):
            self._later(STALL_LOOK_S, self._begin)
            return
        self.begun = True
        self._resume(self.storage.newest_checkpoint(self.work.skip))
        self._moves("train")
        self.members[0].tell(TrainingResumed(attempt=self.attempt, step=self.step))
        if not self._fails(self.troubles.at_start(self.timeline.now)):
            self._next()

    def _resume(self, found: Checkpoint | None) -> None:
        self.every = self.work.save_every
        if found is not None:
            self.step, self.read, self.bad = found.step, found.read, found.bad
            self.skipped = found.skipped
        self.skipped = merge_windows(self.skipped, self.work.skip)

    def _fails(self, words: Words | None) -> bool:
        """Whether a rank fails now."""
        if words is not None:
            self.random.choice(list(self.members.values())).fails(words)
        return words is not None

    def _moves(self, phase: Phase) -> None:
        self.phase, self.moved = phase, self.timeline.now

    def _next(self) -> None:
        if self.step >= self.work.steps:
            self._moves("exit")
            self._later(1.0, partial(self._leave, exit_codes.OK))
        else:
            self.length = self.work.step_s + max(ranks.slow_s for ranks in self.members.values())
            self._later(self.length, self._stepped)

    def _stepped(self) -> None:
        if self.troubles.too_large(self.work.peak_bytes):
            self._fails(OUT_OF_MEMORY)
            return
        self.step += 1
        batch = batch_of(self.step, self.skipped)
        self.read += (batch,)
        self._moves("train")
        self.bad = (*self.bad, self.step) if self.troubles.spoils(self.step, batch) else ()
        if len(self.bad) >= self.troubles.patience:
            self._fails(not_finite(self.step, self.bad[0]))
            return
        if not self.trained:
            self.trained = True
            self.members[0].first_step()
        if self.asked or self.step % self.every == 0 or self.step == self.work.steps:
            self._moves("checkpoint")
            self._later(SAVE_S + self.storage.delay, self._save)
        else:
            self._next()

    def _save(self) -> None:
        self._moves("train")
        fence, first = self.storage.fence, self.members[0]
        if not self.storage.serves(first.host):
            self._moves("checkpoint")
            self._later(STALL_LOOK_S, self._save)  # the write blocks
            return
        if fence is not None and fence.attempt > self.attempt:
            first.end_all(exit_codes.FAILED)
            return
        if self.storage.full:
            first.tell(CheckpointFailed(attempt=self.attempt, step=self.step, why="no space left"))
        else:
            self._mark()
        if self.asked:
            self._leave(exit_codes.CHECKPOINTED)
        else:
            self._next()

    def _mark(self) -> None:
        now, first = self.timeline.now, self.members[0]
        made = Checkpoint(now, self.step, self.attempt, self.read, self.skipped, self.bad)
        self.marked(made)
        self.storage.checkpoints.append(made)
        first.tell(CheckpointSaved(attempt=self.attempt, step=self.step))
        new = self.random.choice(PACES) if self.work.paced else self.every
        if new != self.every:
            changed = CheckpointIntervalChanged(
                attempt=self.attempt, step=self.step, old=self.every, new=new, why="saves"
            )
            self.every = new
            first.tell(changed)

    def _leave(self, exit_code: int) -> None:
        self.over = True
        for ranks in list(self.members.values()):
            ranks.end_all(exit_code)
