"""Decides after which steps ranks copy their state into the memory of their host, and does it.

All ranks copy after the same steps. Each has two slots and writes the older one. It begins only
when all ranks have completed their last copy, so at any moment there is a step of which all are
complete. Each rank says in the totals of a step whether its last copy is complete.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from orchestrator.contract.codec import decode
from orchestrator.contract.files.env import HostMemory
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.job_spec import MemoryCheckpointSpec
from trainer.checkpoint.memory.find import InMemory
from trainer.checkpoint.memory.room import available_bytes
from trainer.checkpoint.memory.slot import Header, Layout, Slot, layout_of, slots_of
from trainer.checkpoint.state import TrainingState
from trainer.rank.ranks import Ranks

LOG = logging.getLogger("trainer")

SHARE_ON_CPU, SHARE_ON_GPU = 0.02, 0.007
"""Part of the training time that copies may take with `every: auto`. On a CPU they compete with the
step for the bandwidth of the memory."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMemory:
    """The slots that the agent of this host gave to this rank."""

    memory: HostMemory
    slots: Sequence[Slot]
    spec: MemoryCheckpointSpec
    config: str
    """Digest of the trainer's configuration."""


def open_memory(spec: MemoryCheckpointSpec, ranks: Ranks, config: str) -> OpenMemory | None:
    """None on all ranks if the spec says `off`, or if one of them cannot have it."""
    if spec.every == "off":
        return None
    opened, why = None, ""
    try:
        opened = _open(spec, ranks, config)
    except OSError as exc:
        why = f"rank {ranks.env.rank} cannot open its memory on {ranks.env.host}: {exc}"
    if _said(why, ranks):
        return None
    return opened


def _open(spec: MemoryCheckpointSpec, ranks: Ranks, config: str) -> OpenMemory:
    if not ranks.env.memory:
        raise OSError("no agent of ndctl runs there")
    memory: HostMemory = decode(HostMemory, read_json(ranks.env.memory))
    slots = slots_of(memory, ranks.env.local_rank)
    return OpenMemory(memory=memory, slots=slots, spec=spec, config=config)


def _said(why: str, ranks: Ranks) -> bool:
    """Whether any rank gives a reason not to use the memory. Rank 0 logs the first one."""
    reasons: list[str] = [""] * ranks.env.world_size
    dist.all_gather_object(reasons, why)
    first = next((reason for reason in reasons if reason), "")
    if first and ranks.env.rank == 0:
        LOG.warning("no checkpoints in memory: %s", first)
    return bool(first)


@dataclass(slots=True)
class MemoryCheckpoints:
    """The copies that this rank makes. All ranks call each method at the same step."""

    opened: OpenMemory
    state: TrainingState
    lineage: int
    written: Callable[[Callable[[], None]], None]
    """Calls its argument once the records of all steps so far are written, in some thread."""
    layout: Layout
    every: int
    step_times: list[float] = field(default_factory=list)
    cost_s: float | None = None
    """Seconds that training waited for the last copy; None before the second, because the first one
    touches new memory."""
    kept: Slot | None = None
    """The slot that was written last, or that this attempt resumed from. The next copy goes into
    the other one."""
    newest: int | None = None
    """Step of the last copy that was begun."""
    done: int | None = None
    """Step of the last copy of this rank that is complete."""
    agreed: bool = True
    """All ranks have completed the last copy."""
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="memory-checkpoint")
    )

    @property
    def is_done(self) -> bool:
        """This rank has completed its last copy. The totals of the next step tell all ranks."""
        return self.done == self.newest

    @property
    def proposed_every(self) -> int:
        """New interval in steps that rank 0 proposes; 0: unchanged, or another rank."""
        if self.opened.spec.every != "auto" or self.state.ranks.env.rank or self.cost_s is None:
            return 0
        share = SHARE_ON_GPU if self.state.ranks.device.type == "cuda" else SHARE_ON_CPU
        wanted = interval(self.cost_s, median(self.step_times), share)
        # The cost of a copy varies. Change only if it matters.
        return wanted if wanted > self.every or 2 * wanted <= self.every else 0

    def after_step(self, step_s: float, all_done: bool, every: int) -> None:
        """Handle what the totals of a step said.

        Args:
            all_done: each rank has completed its last copy.
            every: new interval that rank 0 proposed; 0: unchanged.
        """
        self.agreed = all_done
        self.step_times = [*self.step_times[-31:], step_s]
        if every and every != self.every:
            if self.state.ranks.env.rank == 0:
                LOG.info("checkpoints in memory every %d steps, before every %d", every, self.every)
            self.every = every

    def due(self, step: int) -> bool:
        return self.agreed and (self.newest is None or step - self.newest >= self.every)

    def save(self, step: int) -> None:
        """Copy the state after `step`. Returns when training may continue."""
        begun = time.perf_counter()
        tensors = {**self.state.tensors(), **self.state.random()}
        slot = next(slot for slot in self.opened.slots if slot is not self.kept)
        slot.write(self.layout, tensors)
        if self.state.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        first, self.kept, self.newest = self.newest is None, slot, step
        progress = self.state.progress(step).to_json()
        self.thread.submit(self._complete, slot, step, progress)
        self.cost_s = None if first else time.perf_counter() - begun

    def _complete(self, slot: Slot, step: int, progress: str) -> None:
        table = self.layout.table
        header = Header(
            lineage=self.lineage,
            step=step,
            rank=self.state.ranks.env.rank,
            config=self.opened.config,
            digest=slot.digest(table),
            progress=progress,
            table=table,
        )

        def complete() -> None:
            try:
                slot.complete(header)
            except (OSError, ValueError) as exc:
                # No rank copies again, because this one is never done.
                LOG.warning("no more checkpoints in memory: %s", exc)
                return
            self.done = step

        # A step that is resumed from is never repeated, so its lines must be in the files.
        self.written(complete)


def interval(cost_s: float, step_s: float, share: float) -> int:
    """Steps between two copies that each take `cost_s`, so that they take `share` of the time."""
    return max(1, math.ceil(cost_s / (share * step_s)))


def start_saving(
    opened: OpenMemory | None,
    state: TrainingState,
    written: Callable[[Callable[[], None]], None],
    found: InMemory | None,
) -> MemoryCheckpoints | None:
    """Reserve the memory on all ranks; None if one of them cannot have it.

    Args:
        written: as in `MemoryCheckpoints`.
        found: what this attempt resumed from, if that was in memory. Its copies continue the
            lineage of that.
    """
    if opened is None:
        return None
    layout = layout_of({**state.tensors(), **state.random()})
    ranks = state.ranks
    for slot in opened.slots:
        # What is later than the state that was loaded is trained again now.
        if found is None or slot is not found.slot:
            slot.clear()
    if _said(_too_little(opened, layout, ranks), ranks) or _said(_refused(opened, layout), ranks):
        for slot in opened.slots:
            slot.free()
        return None
    if ranks.env.rank == 0:
        LOG.info("checkpoints in memory: %s", _words(opened, layout, ranks))
    return MemoryCheckpoints(
        opened=opened,
        state=state,
        lineage=ranks.env.attempt if found is None else found.header.lineage,
        written=written,
        layout=layout,
        kept=None if found is None else found.slot,
        every=1 if opened.spec.every == "auto" else int(opened.spec.every),
    )


def _too_little(opened: OpenMemory, layout: Layout, ranks: Ranks) -> str:
    """All ranks of the host look before one of them takes memory."""
    wanted = sum(layout.num_bytes for slot in opened.slots if slot.size != layout.num_bytes)
    need, have = wanted * ranks.env.local_world_size, available_bytes()
    if need <= have:
        return ""
    needed, there = f"{need / GIB:.1f} GiB on {ranks.env.host}", f"{have / GIB:.1f} GiB"
    return f"they need {needed}, and {there} are available"


def _refused(opened: OpenMemory, layout: Layout) -> str:
    try:
        for slot in opened.slots:
            slot.reserve(layout)
    except OSError as exc:
        return f"the kernel refuses {layout.num_bytes / GIB:.1f} GiB: {exc.strerror}"
    return ""


def _words(opened: OpenMemory, layout: Layout, ranks: Ranks) -> str:
    whole = len(opened.slots) * layout.num_bytes * ranks.env.local_world_size
    return f"{whole / GIB:.2f} GiB on each host"
