"""Decides after which steps ranks copy their state into the memory of their host, and does it.

All ranks copy after the same steps. Each has two slots and writes the older one. It begins only
when all ranks have completed their last copy, so at any moment there is a step of which all are
complete. Each rank says in the totals of a step whether its last copy is complete.

With partners a rank has one more slot. After a copy the agents of all hosts send that one to
partner hosts, while ranks go on with the others. When the agents of all ranks have ended that, the
next copy is sent. So at any moment there is also a step of which partners have the slots of all
ranks.

A checkpoint on the disk is written from a slot too, so that training waits for no second copy. For
that one a rank has one more slot. It takes the place of the buffer that the save would need.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch.distributed as dist

from ndctl.rank.memory.available import host_room
from orchestrator.contract.checkpoint_interval import MEMORY_ON_CPU, MEMORY_ON_GPU, memory_steps
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import HostMemory
from trainer.checkpoint.memory.agreement import GIB, Agreed, agree, num_slots, rooms_of
from trainer.checkpoint.memory.copying import Copying, Digest, copying_of
from trainer.checkpoint.memory.find import InMemory
from trainer.checkpoint.memory.opened import OpenMemory, is_off, say_off
from trainer.checkpoint.memory.partners import Partners
from trainer.checkpoint.memory.slot import Header, Layout, Slot, layout_of
from trainer.checkpoint.state import PROGRESS, TrainingState
from trainer.rank.ranks import Ranks
from trainer.rank.reporter import Reporter
from trainer.step import News, Totals

LOG = logging.getLogger("trainer")

STOP_S = 10.0
"""Longest wait for copies on partners at a stop: a third of the usual `resilience.stop_grace`, in
the rest of which the disk must be written if they do not come."""
LOOK_S = 0.01
PRESSURE_S = 1.0
"""Seconds between two looks at how much memory the host has left."""


@dataclass(slots=True)
class MemoryCheckpoints:
    """The copies that this rank makes. All ranks call each method at the same step."""

    opened: OpenMemory
    state: TrainingState
    lineage: int
    written: Callable[[Callable[[], None]], None]
    """Calls its argument once the records of all steps so far are written, in some thread."""
    layout: Layout
    copying: Copying
    partners: Partners
    reporter: Reporter
    slots: list[Slot]
    """Those in use, the one that was written longest ago first."""
    every: int
    step_times: list[float] = field(default_factory=list)
    cost_s: float | None = None
    """Seconds that training waited after a step for the last copy; None before the second, because
    the first one touches new memory."""
    common: Slot | None = None
    """The slot of the newest copy that all ranks have completed, or the one that this attempt
    resumed from. The next copy goes into another one."""
    holds: dict[str, int] = field(default_factory=dict)
    """Path of a slot -> step of the copy that it has, complete or not."""
    written_to_disk: Slot | None = None
    """What the last save to the disk wrote, or still writes. It is overwritten only after the next
    one has begun."""
    newest: int | None = None
    """Step of the last copy that was begun."""
    done: int | None = None
    """Step of the last copy of this rank that is complete."""
    agreed: bool = True
    """All ranks have completed the last copy."""
    trouble: str = ""
    """Why this rank can keep no more of them. All ranks give up then."""
    off: bool = False
    """All ranks have given up."""
    looked: float = 0.0
    """When this rank last looked at the memory of its host (monotonic)."""
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
        fixed = isinstance(self.opened.spec.every, int)
        if fixed or self.state.ranks.env.rank or self.cost_s is None:
            return 0
        share = MEMORY_ON_GPU if self.state.ranks.device.type == "cuda" else MEMORY_ON_CPU
        cost_s = self.cost_s + self.copying.waited_s
        wanted = memory_steps(cost_s, median(self.step_times), share)
        # The cost of a copy varies. Change only if it matters.
        return wanted if wanted > self.every or 2 * wanted <= self.every else 0

    def news(self, news: News) -> News:
        """`news` with what this rank tells all others about its copies in memory."""
        if self.off:
            return news
        self.partners.announce(self.done)
        self._look_at_host()
        return replace(
            news,
            forgets=bool(self.trouble),
            remembered=self.is_done,
            remember_every=self.proposed_every,
            share_ended=self.partners.has_ended,
            share_failed=self.partners.has_failed,
        )

    @property
    def _name(self) -> str:
        return f"rank {self.state.ranks.env.rank} on {self.state.ranks.env.host}"

    def _look_at_host(self) -> None:
        """The kernel kills a process if memory runs out, and that may be a rank."""
        now = time.monotonic()
        # The ranks of a host see the same.
        if self.state.ranks.env.local_rank or now - self.looked < PRESSURE_S:
            return
        self.looked, room = now, host_room()
        if room.is_short:
            host = self.state.ranks.env.host
            self.trouble = (
                f"{host} has only {room.free / GIB:.1f} of {room.total / GIB:.1f} GiB left"
            )

    def after_step(self, step_s: float, totals: Totals) -> None:
        """Handle what the totals of a step said."""
        if self.off:
            return
        if totals.forgets:
            self._give_up()
            return
        every = totals.remember_every
        self.agreed = totals.remembered
        if self.agreed and self.newest is not None:
            self.common = self.slots[-1]
            if not self.partners.copies:
                self._free_others()
        self.partners.after_step(all_ended=totals.share_ended, failed=totals.share_failed)
        self.step_times = [*self.step_times[-31:], step_s]
        if every and every != self.every:
            if self.state.ranks.env.rank == 0:
                LOG.info("checkpoints in memory every %d steps, before every %d", every, self.every)
            self.every = every

    def _free_others(self) -> None:
        """All ranks have a copy of this attempt, so what other meshes left here is of no use. With
        partners the agent frees it, once they have copies too."""
        for slot in self.opened.others:
            slot.free()
            slot.close()
        self.opened.others.clear()

    def _give_up(self) -> None:
        """Give the memory back. Training goes on, and the disk has the checkpoints."""
        self.off = True
        self.holds.clear()  # what is being completed is not declared complete
        for slot in self.slots:
            # A save to the disk may still read it, and would be killed.
            if slot is not self.written_to_disk:
                self.thread.submit(slot.free)
        self.common = None
        say_off(self.trouble, self.opened.spec, self.state.ranks, self.reporter)

    def due(self, step: int) -> bool:
        return (
            not self.off
            and self.agreed
            and (self.newest is None or step - self.newest >= self.every)
        )

    def save(self, step: int) -> bool:
        """Begin to copy the state after `step`, and return when training may continue. False: no
        memory."""
        begun = time.perf_counter()
        tensors = {**self.state.tensors(), **self.state.random()}
        slot = self._to_overwrite()
        self.holds[slot.path] = step
        try:
            digest = self.copying.start(slot, self.layout, tensors)
        except OSError as exc:
            self.trouble = f"{self._name}: the kernel refuses the memory: {exc}"
            self.newest = step  # no rank copies again, because this copy is never done
            return False
        first, self.newest = self.newest is None, step
        self.slots = [*(one for one in self.slots if one is not slot), slot]
        self.partners.begin(slot, Made(step=step, attempt=self.state.ranks.env.attempt))
        progress = self.state.progress(step).to_json()
        self.thread.submit(self._complete, slot, step, progress, self.partners.shared, digest)
        self.cost_s = None if first else time.perf_counter() - begun
        return True

    def save_for_stop(self, step: int) -> bool:
        """Copy the state after `step`, the last one of this attempt, and wait for the copies on
        partner hosts. Whether all ranks have both. A collective; no save to the disk is in
        progress.

        What is being sent to partners goes first. If it takes too long, the disk is the way.
        """
        if not self.partners.copies or self.off:
            return False
        self.written_to_disk = None
        until = time.monotonic() + STOP_S
        ended, failed = self._wait_for_partners(until)
        if not ended:
            return False
        self.partners.after_step(all_ended=True, failed=failed)
        if not self.save(step):
            until = 0.0  # the other ranks must hear of it
        ended, failed = self._wait_for_partners(until)
        if self.state.ranks.env.rank == 0 and ended and not failed:
            LOG.info("step %d is in the memory of all hosts and of their partners", step)
        return ended and not failed

    def _wait_for_partners(self, until: float) -> tuple[bool, bool]:
        """Wait until the agents of all ranks have sent the slot of the last copy, but not beyond
        `until`. Whether they have, and whether a copy did not arrive. A collective."""
        while not self._is_sent and time.monotonic() < until:
            self.partners.announce(self.done)
            threading.Event().wait(LOOK_S)
        mine = self._is_sent, self.partners.has_failed
        everyone = [mine] * self.state.ranks.env.world_size
        dist.all_gather_object(everyone, mine)
        return all(ended for ended, _ in everyone), any(failed for _, failed in everyone)

    @property
    def _is_sent(self) -> bool:
        return self.is_done and self.partners.has_ended

    def close(self) -> None:
        """Called when the rank leaves its attempt: no copy is completed after it."""
        self.thread.shutdown()
        self.copying.close()

    def save_for_disk(self, step: int) -> dict[str, Any] | None:
        """Copy the state after `step` and return that copy, as `TrainingState.snapshot` has it.

        It does not change before the next call, when the save that uses it must have ended. None:
        there is no memory for it.

        Other ranks may not have completed their last copy, and neither may this one. The newest
        one that all have stays: the slot of the last save is free now.
        """
        before, self.written_to_disk = self.written_to_disk, None
        if self.off:
            if before is not None:
                self.thread.submit(before.free)
            return None
        if not self.save(step):
            return None
        try:
            self.copying.wait()
        except (OSError, RuntimeError):
            return None  # `_complete` has met the same error, and all ranks give up
        self.written_to_disk = slot = self.slots[-1]
        like = {**self.state.tensors(), **self.state.random()}
        tensors = slot.state(self.layout.table, like)
        return {**tensors, PROGRESS: self.state.progress(step).to_json()}

    def _to_overwrite(self) -> Slot:
        """The oldest slot, but not the newest copy that all ranks have, nor one that is being sent
        or written to the disk."""
        in_use = (self.common, self.partners.slot, self.written_to_disk)
        return next(slot for slot in self.slots if not any(slot is one for one in in_use))

    def _complete(
        self, slot: Slot, step: int, progress: str, shared: Made | None, digest: Digest
    ) -> None:
        table = self.layout.table
        try:
            sum_of_words = digest()
        except (OSError, RuntimeError) as exc:
            self.trouble = f"{self._name}: a copy failed: {exc}"
            return
        header = Header(
            lineage=self.lineage,
            made=Made(step=step, attempt=self.state.ranks.env.attempt),
            rank=self.state.ranks.env.rank,
            ranks=self.state.ranks.env.world_size,
            config=self.opened.digests.config,
            history=self.opened.digests.history,
            shared=shared,
            digest=sum_of_words,
            digest_at=table[0].offset,
            progress=progress,
            table=table,
        )

        def complete() -> None:
            if self.holds.get(slot.path) != step:
                return  # a save to the disk did not wait, and took the slot; or all gave up
            try:
                slot.complete(header)
            except (OSError, ValueError) as exc:
                self.trouble = f"{self._name}: a copy cannot be completed: {exc}"
                return
            self.done = step
            self.partners.announce(step)

        # A step that is resumed from is never repeated, so its lines must be in the files.
        self.written(complete)


def start_saving(
    opened: OpenMemory | None,
    state: TrainingState,
    written: Callable[[Callable[[], None]], None],
    found: InMemory | None,
    reporter: Reporter,
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
    ranks, kept = state.ranks, None if found is None else found.slot
    agreed = _agreed(opened, layout, kept, ranks)
    slots = _reserved(opened, layout, kept, agreed, ranks, reporter)
    if not slots or agreed.copies is None:
        return None

    def tell(step: int, slot: Slot, copies: int) -> None:
        reporter.copy_ready(step, opened.slots.index(slot), copies)

    if ranks.env.rank == 0:
        reporter.memory_set(agreed.copies, agreed.host_bytes, agreed.why)
    return MemoryCheckpoints(
        opened=opened,
        state=state,
        lineage=ranks.env.attempt if found is None else found.header.lineage,
        written=written,
        layout=layout,
        copying=copying_of(ranks.device, state.optimizer),
        partners=Partners(agreed.copies, tell, _shared(found, opened.memory)),
        reporter=reporter,
        slots=slots,
        common=kept,
        every=opened.spec.every if isinstance(opened.spec.every, int) else 1,
    )


def _agreed(opened: OpenMemory, layout: Layout, kept: Slot | None, ranks: Ranks) -> Agreed:
    for slot in opened.slots:
        # What is later than the state that was loaded is trained again now.
        if slot is not kept:
            slot.clear()
    agreed = agree(opened.spec, rooms_of(opened.memory, layout, opened.slots, ranks))
    if agreed.copies is not None and ranks.env.rank == 0:
        words = f"up to {agreed.host_bytes / GIB:.2f} GiB on a host"
        LOG.info("checkpoints in memory: %s, %d copies on other hosts", words, agreed.copies)
        if agreed.why:
            LOG.warning("%s", agreed.why)
    return agreed


def _reserved(
    opened: OpenMemory,
    layout: Layout,
    kept: Slot | None,
    agreed: Agreed,
    ranks: Ranks,
    reporter: Reporter,
) -> list[Slot]:
    """The slots to use, with their memory. None on any rank if one of them cannot have them."""
    # The slot that was loaded is the last one to be overwritten.
    slots = sorted(opened.slots, key=lambda slot: slot is kept)
    used, why = [], agreed.why
    if agreed.copies is not None:
        used = slots[-num_slots(agreed.copies) :]
        # What another mesh made stays until all ranks have a copy of this attempt.
        of_layout = [one for one in used if one is not kept or one.size == layout.num_bytes]
        why = _refused(of_layout, layout, pinned=ranks.device.type == "cuda")
    if is_off(why, opened.spec, ranks, reporter):
        used = []
    for slot in opened.slots:
        if slot not in used:
            slot.free()
    return used


def _shared(found: InMemory | None, memory: HostMemory) -> Made | None:
    """The newest checkpoint of which all ranks have copies on partner hosts."""
    if found is None:
        return None
    # Hosts have fetched it from partners, so those have it.
    return found.header.made if found.header.made == memory.restored else found.header.shared


def _refused(slots: Sequence[Slot], layout: Layout, *, pinned: bool) -> str:
    try:
        for slot in slots:
            slot.reserve(layout, pinned=pinned)
    except OSError as exc:
        return f"the kernel refuses {layout.num_bytes / GIB:.2f} GiB: {exc.strerror}"
    return ""
