"""Windows of batches that a job skips on purpose.

Without windows, step s reads batch s. The batches of a window are never read, and the steps after
it read the batches that follow. The number of steps stays the same.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Struct

from orchestrator.contract.codec import Invalid, Problem, decode, encode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.limits import AtLeast


class Window(Struct, frozen=True, kw_only=True, order=True):
    """Batches of the stream, counted from 1; `last` is included."""

    first: Annotated[int, AtLeast(1)]
    last: Annotated[int, AtLeast(1)]

    def __post_init__(self) -> None:
        if self.last < self.first:
            limit = f"at least first ({self.first})"
            raise Invalid([Problem(path="last", value=self.last, limit=limit, fix="swap the two")])

    def __str__(self) -> str:
        return f"{self.first} to {self.last}" if self.last > self.first else str(self.first)

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def batch_of(step: int, windows: Iterable[Window]) -> int:
    """The batch that `step`, counted from 1, reads. Windows must not overlap."""
    batch = step
    for window in sorted(windows):
        if batch < window.first:
            break
        batch += window.size
    return batch


def merge_windows(former: Iterable[Window], more: Iterable[Window]) -> tuple[Window, ...]:
    """All windows of both, without the former ones that lie inside one of `more`."""
    more = set(more)
    kept = [w for w in former if not any(m.first <= w.first and w.last <= m.last for m in more)]
    return tuple(sorted({*kept, *more}))


def already_read(
    step: int, there: Sequence[Window], wanted: Iterable[Window]
) -> tuple[Window, ...]:
    """The `wanted` windows of which some batch was read within `step` steps that skipped the
    windows `there`. It is too late to skip them."""
    last = batch_of(step, there) if step else 0
    return tuple(window for window in wanted if window not in there and window.first <= last)


def to_text(windows: Sequence[Window]) -> str:
    return json.dumps(encode(tuple(windows)))


def from_text(text: str, path: str) -> tuple[Window, ...]:
    """Raises ValueError, or Invalid that names `path`."""
    windows: tuple[Window, ...] = decode(tuple[Window, ...], read_json(text), path)
    return windows
