"""Copies the state of a rank into a slot.

What is in the host's memory is copied at once. A GPU copies on a stream of its own, while it
computes the next forward and backward pass, which only read the state. The update after them waits
for the copy on the device.

The digest of a GPU's state is computed from the state, not from the slot. So a copy that is not
what the state was after its step is found when it is loaded, whatever went wrong. No GPU has run
this yet.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from trainer.checkpoint.memory.slot import Layout, Slot, shard_of

Tensors = Mapping[str, torch.Tensor]
Digest = Callable[[], int]
"""Waits until the slot has the copy, and returns the digest of its tensors. Raises OSError if the
memory is refused, RuntimeError if the device fails."""
MOST_WAITS = 4
"""Only rank 0 reads how long updates waited, so the others must not collect it."""
WORD = 8
"""A digest is the sum of words of so many bytes."""


class Copying(Protocol):
    def start(self, slot: Slot, layout: Layout, tensors: Tensors) -> Digest:
        """Begin to copy `tensors`, which may change once the optimizer's next step begins.

        Raises:
            OSError: the memory is refused.
        """

    def wait(self) -> None:
        """Return when the slot has the last copy. Raises as `Digest` does."""

    @property
    def waited_s(self) -> float:
        """Seconds for which an update waited for a copy, the last time that this is known of."""

    def close(self) -> None:
        """Called last."""


def copying_of(device: torch.device, optimizer: torch.optim.Optimizer) -> Copying:
    return OnDevice(device, optimizer) if device.type == "cuda" else OnHost()


class OnHost:
    """Copies while training waits."""

    waited_s = 0.0

    def start(self, slot: Slot, layout: Layout, tensors: Tensors) -> Digest:
        slot.reserve(layout)
        slot.write(layout, tensors)
        return lambda: slot.digest(layout.table)

    def wait(self) -> None:
        """Nothing is in progress."""

    def close(self) -> None:
        """Nothing is in progress."""


class Queued(NamedTuple):
    """A copy that the device makes once it comes to it."""

    copied: torch.cuda.Event
    digest: torch.Tensor
    """On the host, once `copied` has happened."""


class Wait(NamedTuple):
    """Of an update for a copy."""

    host_s: float
    ready: torch.cuda.Event
    copied: torch.cuda.Event


class OnDevice:
    """Copies while the device computes. Slots are page-locked already, because to do that amid
    collectives may wait for them."""

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        # To queue the copies of a thousand tensors takes longer than a host has between two steps.
        self.thread = ThreadPoolExecutor(
            1, "memory-copies", initializer=torch.cuda.set_device, initargs=(device,)
        )
        self.last: Future[Queued] | None = None
        self.awaited: Future[Queued] | None = None
        """The copy that the next update must wait for; None: an update has waited for the last."""
        self.waits: deque[Wait] = deque(maxlen=MOST_WAITS)
        self.known_s = 0.0
        self.hook = optimizer.register_step_pre_hook(self._before_update)

    def start(self, slot: Slot, layout: Layout, tensors: Tensors) -> Digest:
        updated = torch.cuda.Event()
        updated.record()
        self.last = self.awaited = made = self.thread.submit(
            self._queue, slot, layout, tensors, updated
        )

        def digest() -> int:
            queued = made.result()
            queued.copied.synchronize()
            return int(queued.digest)

        return digest

    def _queue(
        self, slot: Slot, layout: Layout, tensors: Tensors, updated: torch.cuda.Event
    ) -> Queued:
        slot.reserve(layout)
        slot.zero_gaps(layout)
        copied, digest = torch.cuda.Event(), torch.empty((), dtype=torch.int64, pin_memory=True)
        try:
            with torch.cuda.stream(self.stream):
                updated.wait()
                slot.write(layout, tensors)
                digest.copy_(digest_of(tensors, self.device), non_blocking=True)
                copied.record()
        except Exception as exc:
            self.stream.synchronize()  # the slot may be unmapped next
            raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc
        return Queued(copied, digest)

    def _before_update(self, *_: Any) -> None:
        made, self.awaited, begun = self.awaited, None, time.perf_counter()
        # An error is raised where the digest is asked for.
        if made is None or made.exception() is not None:
            return
        ready, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ready.record()
        made.result().copied.wait()
        copied.record()
        self.waits.append(Wait(time.perf_counter() - begun, ready, copied))

    def wait(self) -> None:
        if self.last is not None:
            self.last.result().copied.synchronize()

    @property
    def waited_s(self) -> float:
        while self.waits and self.waits[0].copied.query():
            first = self.waits.popleft()
            self.known_s = first.host_s + first.ready.elapsed_time(first.copied) / 1e3
        return self.known_s

    def close(self) -> None:
        self.hook.remove()
        self.thread.shutdown()


def digest_of(tensors: Tensors, device: torch.device) -> torch.Tensor:
    """The digest that `Slot.digest` has of a slot with these tensors and zeros between them, as a
    number on `device`. int64 wraps around in both."""
    sums = [_sum_of_words(shard_of(tensor)) for tensor in tensors.values()]
    return torch.stack([each.to(device, non_blocking=True) for each in sums]).sum()


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()  # torch sees words only where a word of the storage begins
    whole = flat.numel() // WORD * WORD
    words = flat[:whole].view(torch.int64).sum()
    if whole == flat.numel():
        return words
    last = torch.zeros(WORD, dtype=torch.uint8, device=flat.device)
    last[: flat.numel() - whole] = flat[whole:]
    return words + last.view(torch.int64)[0]
