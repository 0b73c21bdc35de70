"""`ndctl.save_in_memory` and `ndctl.load_from_memory`: a script's state in the memory of its host.

Each rank writes its state into the oldest of its slots, and then all agree that it is complete. So
at any moment there is a step of which all ranks have a complete slot. The agents keep the slots
when ranks end, and send copies to partner hosts.
"""

import functools
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

from ndctl.rank.agreement import NotAgreed, Ranks, ranks_of_script
from ndctl.rank.checkpoint_files import newest_complete, step_of
from ndctl.rank.link import Link, current, number_of_steps
from ndctl.rank.memory.slots import NOT_SENT, SENDING, Header, Made, Memory, NoRoom, Slot
from ndctl.rank.place import Place, place

SAVE, LOAD = "ndctl.save_in_memory", "ndctl.load_from_memory"
TIMEOUT_S = 600.0
HELD = 2
"""Slots that a partner host keeps for each of a rank's copies."""
NO_GROUP = (
    "needs torch.distributed, because this is one of {size} ranks, which agree through its store;"
    " call torch.distributed.init_process_group first"
)


def save_in_memory(step: int, state: Any, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Keep `state` of this rank in the memory of its host, for `load_from_memory`.

        ndctl.save_in_memory(step, {"model": model.state_dict(), "optimizer": …})

    Every rank must call it, with the same step: as a rule after each step, because it takes only as
    long as a copy. The state outlives the rank, and with `checkpoint.memory.copies` its host, but
    not the agents: write checkpoints to the disk too (`ndctl.checkpoint`).

    The state may be anything that `torch.save` takes; each rank keeps its own part. Tensors on
    GPUs are copied to the host.

    Args:
        step: optimizer steps that are done, 0 or more.
        timeout_s: seconds that a rank waits for the others.

    Returns:
        Whether all ranks have kept it. False, after one line on standard error: this job keeps no
        checkpoints in memory (without ndctl, or `checkpoint.memory.every` is off), or a host has
        too little memory.

    Raises:
        RuntimeError: the ranks did not all call it with this step.
        ValueError: `step` is no step.
    """
    step = number_of_steps(step, SAVE)
    kept = _kept()
    if kept.memory is None or kept.warned:
        kept.warn()
        return False
    ranks, before = _ranks(kept.link, SAVE), kept.link.phase
    kept.link.beat("checkpoint")
    try:
        return kept.save(ranks, step, state, timeout_s)
    finally:
        kept.link.beat(before)


def load_from_memory() -> tuple[int, Any] | None:
    """The newest step that all ranks have in memory, and the state of this rank.

        found = ndctl.load_from_memory()
        if found is not None:
            step, state = found

    None: start from `ndctl.latest_checkpoint()`. That is so after the first start, without ndctl,
    with another number of ranks, if a host was lost that had the only slot of a rank, and if the
    disk has a newer checkpoint. Tensors are on the CPU.

    Call it on every rank, once, after `torch.distributed.init_process_group`.

    Raises:
        RuntimeError: some ranks did not call it.
    """
    kept, where = _kept(), place()
    if kept.memory is None or not where.resume:
        return None
    return kept.load(_ranks(kept.link, LOAD), where)


def _ranks(link: Link, call: str) -> Ranks:
    ranks = ranks_of_script(link.rank, link.world_size)
    if ranks is None:
        raise RuntimeError(f"{call} {NO_GROUP.format(size=link.world_size)}")
    return ranks


@functools.cache
def _kept() -> "Kept":
    return Kept.of(current())


class Kept:
    """One rank's checkpoints in memory."""

    def __init__(self, link: Link, memory: Memory | None, slots: Sequence[Slot]) -> None:
        self.link, self.memory = link, memory
        self.slots = [*slots]
        """The one that was written longest ago first."""
        self.names = {slot: number for number, slot in enumerate(slots)}
        self.lineage = link.attempt
        self.off = "" if slots else "this job keeps no checkpoints in memory"
        if memory is not None and memory.why:
            self.off = memory.why
        self.warned = False
        self.told = False
        """The job's journal knows how much memory the slots take."""
        self.common: Slot | None = None
        """The newest one that all ranks have."""
        self.sending: Slot | None = None
        """What the agent sends to partners. Nothing writes to it."""
        self.sent: Made | None = None
        """What it holds."""
        self.shared: Made | None = None

    @staticmethod
    def of(link: Link) -> "Kept":
        text = os.environ.get("NDCTL_MEMORY", "")
        if not text or not link.active:
            return Kept(link, None, ())
        memory = Memory.of(text, int(os.environ.get("LOCAL_RANK", "0")))
        try:
            return Kept(link, memory, [Slot(path) for path in memory.slots])
        except OSError as exc:
            kept = Kept(link, memory, ())
            kept.off = f"the memory of rank {link.rank} cannot be opened: {exc}"
            return kept

    # Save

    def save(self, ranks: Ranks, step: int, state: Any, timeout_s: float) -> bool:
        slot, written, pickled = self._to_overwrite(), (0, 0), not _has_torch()
        why = self.off
        if slot is not None:
            try:
                written = slot.write(functools.partial(_dump, state, pickled=pickled))
            except NoRoom as exc:
                why = f"rank {self.link.rank}: {exc}"
        mark = NOT_SENT if self.sending is None else self.sending.mark
        mine = {"step": step, "why": why, "mark": mark}
        try:
            agreed = ranks.agree("memory-save", mine, _decide, timeout_s, f"{SAVE}({step})")
        except NotAgreed as exc:
            raise RuntimeError(str(exc)) from exc
        if agreed["other"]:
            raise RuntimeError(f"{SAVE}: {agreed['other']}")
        if agreed["why"] or slot is None:
            self._give_up(agreed["why"])
            return False
        self._share(agreed)
        made = (step, self.link.attempt)
        slot.complete(self._header(made, written, ranks, pickled=pickled))
        self.slots = [*(one for one in self.slots if one is not slot), slot]
        self.common = slot
        self._tell_of_start()
        self._tell_of_use(written[0])
        self._send(slot, made)
        return True

    def _to_overwrite(self) -> Slot | None:
        in_use = (self.common, self.sending)
        return next((one for one in self.slots if not any(one is used for used in in_use)), None)

    def _header(
        self, made: Made, written: tuple[int, int], ranks: Ranks, *, pickled: bool
    ) -> Header:
        num_bytes, digest = written
        return Header(
            made=made,
            lineage=self.lineage,
            rank=ranks.rank,
            ranks=ranks.size,
            num_bytes=num_bytes,
            digest=digest,
            pickled=pickled,
            shared=self.shared,
        )

    def _share(self, agreed: dict[str, Any]) -> None:
        """What the agents of all ranks say of the slot that they send."""
        if self.sending is not None and agreed["ended"]:
            if not agreed["failed"]:
                self.shared = self.sent
            self.sending = self.sent = None

    def _send(self, slot: Slot, made: Made) -> None:
        """Have the agent send a slot to partner hosts. The message may be lost, so it is repeated
        until the agent has marked the slot."""
        assert self.memory is not None
        if not self.memory.copies:
            return
        if self.sending is None:
            self.sending, self.sent = slot, made
        if self.sent is None or self.sending.mark != SENDING:
            return
        step, attempt = self.sent
        ready = {"step": step, "slot": self.names[self.sending], "copies": self.memory.copies}
        body = {"kind": "CopyReady", "attempt": attempt, "rank": self.link.rank, **ready}
        self.link.send(body)

    def _tell_of_start(self) -> None:
        """A script that loads nothing starts at step 0. The leader must know, because it takes no
        checkpoints of an earlier start."""
        if not self.link.resumed and self.link.rank == 0:
            self.link.send({"kind": "TrainingResumed", "attempt": self.link.attempt, "step": 0})
        self.link.resumed = True

    def _tell_of_use(self, num_bytes: int) -> None:
        """Once, for the job's journal: what the host gives."""
        assert self.memory is not None
        if self.told or self.link.rank != 0:
            return
        self.told, copies = True, self.memory.copies
        slots = len(self.slots) + HELD * copies
        on_host = slots * num_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._set(copies=copies, host_bytes=on_host)

    def _set(self, **values: Any) -> None:
        self.link.send({"kind": "MemoryCheckpointsSet", "attempt": self.link.attempt, **values})

    def _give_up(self, why: str) -> None:
        self.off = why or "no slot is free"
        for slot in self.slots:
            slot.free()
        if self.link.rank == 0:
            self._set(copies=None, why=self.off)
        self.warn()

    def warn(self) -> None:
        if not self.warned and self.link.rank == 0:
            sys.stderr.write(f"ndctl: {SAVE} keeps nothing: {self.off}\n")
        self.warned = True

    # Load

    def load(self, ranks: Ranks, where: Place) -> tuple[int, Any] | None:
        self._say_if_others(ranks)
        found = {header.made: slot for slot in self.slots if (header := self._usable(slot, ranks))}
        newest = functools.partial(_newest, where)
        while True:
            try:
                made = ranks.agree("memory-load", sorted(found), newest, TIMEOUT_S, f"{LOAD}()")
                if made is None:
                    return None
                slot = found.pop(tuple(made))
                header = slot.header()
                sound = header is not None and slot.is_sound(header)
                why = ranks.agree("memory-sound", sound, _all, TIMEOUT_S, f"{LOAD}()")
            except NotAgreed as exc:
                raise RuntimeError(str(exc)) from exc
            if why and header is not None:
                return self._loaded(slot, header)

    def _say_if_others(self, ranks: Ranks) -> None:
        headers = [header for slot in self.slots if (header := slot.header()) is not None]
        others = [one for one in headers if one.ranks != ranks.size]
        if others and self.link.rank == 0:
            newest = max(others, key=lambda one: one.made)
            what = f"step {newest.made[0]} in memory is of {newest.ranks} ranks"
            sys.stderr.write(f"ndctl: {LOAD}: {what}, and this job has {ranks.size} now\n")

    def _usable(self, slot: Slot, ranks: Ranks) -> Header | None:
        assert self.memory is not None
        header = slot.header()
        if header is None or header.lineage != self.memory.lineage:
            return None
        if (header.rank, header.ranks) != (ranks.rank, ranks.size):
            return None
        step, attempt = header.made
        history = all(step <= at for at, number in self.memory.resumed if number > attempt)
        return header if history else None

    def _loaded(self, slot: Slot, header: Header) -> tuple[int, Any]:
        assert self.memory is not None
        state = _load(slot.read(header), pickled=header.pickled)
        self.lineage, self.common = header.lineage, slot
        self.slots = [*(one for one in self.slots if one is not slot), slot]
        # Hosts have fetched it from partners, so those have it.
        self.shared = header.made if header.made == self.memory.restored else header.shared
        step = self.link.step = header.made[0]
        self.link.resumed = True
        if self.link.rank == 0:
            body = {"attempt": self.link.attempt, "step": step, "in_memory": True}
            self.link.send({"kind": "TrainingResumed", **body})
        return step, state


def _decide(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """On rank 0: whether all ranks have kept the step."""
    first = reports[0]["step"]
    other = next((n for n, one in enumerate(reports) if one["step"] != first), None)
    marks = [one["mark"] for one in reports]
    return {
        "other": ""
        if other is None
        else f"rank 0 saves step {first}, and rank {other} saves step {reports[other]['step']}",
        "why": next((one["why"] for one in reports if one["why"]), ""),
        "ended": SENDING not in marks,
        "failed": NOT_SENT in marks,
    }


def _newest(where: Place, offered: list[list[list[int]]]) -> list[int] | None:
    """On rank 0: the newest checkpoint that all ranks have, unless the disk has a newer one."""
    common = set.intersection(*({(step, attempt) for step, attempt in one} for one in offered))
    if not common:
        return None
    made = max(common)
    folder, _ = newest_complete(where.checkpoints, {})
    on_disk = (step_of(folder.name) or 0) if folder is not None else 0
    return None if on_disk > made[0] else list(made)


def _all(sound: list[bool]) -> bool:
    return all(sound)


def _has_torch() -> bool:
    """The script has imported torch, so its state may have tensors."""
    return "torch" in sys.modules


def _dump(state: Any, file: Any, *, pickled: bool) -> None:
    if pickled:
        pickle.dump(state, file, protocol=pickle.HIGHEST_PROTOCOL)
    else:
        sys.modules["torch"].save(state, file)


def _load(file: Any, *, pickled: bool) -> Any:
    if pickled:
        return pickle.load(file)  # the script's own state, which its digest has confirmed
    import torch

    return torch.load(file, map_location="cpu", weights_only=False)
