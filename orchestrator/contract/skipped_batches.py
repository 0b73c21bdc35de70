"""Data that a job leaves out on purpose: windows of the batches of its stream.

Without any, step s reads batch s. A window of batches is never read again, and the steps that come
after it read what follows: steps are not lost, so as many are made as were asked for.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from orchestrator.contract.codec import Invalid, Problem, decode, encode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.limits import AtLeast


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Window:
    """Batches of the stream, counted from 1, the last included."""

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
    """The batch that `step`, counted from 1, reads; no two windows may overlap."""
    batch = step
    for window in sorted(windows):
        if batch < window.first:
            break
        batch += window.size
    return batch


def together(former: Iterable[Window], more: Iterable[Window]) -> tuple[Window, ...]:
    """`former` and `more`; of the former ones that lie within one of `more`, that one alone."""
    more = set(more)
    kept = [w for w in former if not any(m.first <= w.first and w.last <= m.last for m in more)]
    return tuple(sorted({*kept, *more}))


def read_already(
    step: int, there: Sequence[Window], wanted: Iterable[Window]
) -> tuple[Window, ...]:
    """Those of the `wanted` windows of which a job that did `step` steps with the windows `there`
    has read something: it cannot leave them out any more."""
    last = batch_of(step, there) if step else 0
    return tuple(window for window in wanted if window not in there and window.first <= last)


def to_text(windows: Sequence[Window]) -> str:
    return json.dumps(encode(tuple(windows)))


def from_text(text: str, path: str) -> tuple[Window, ...]:
    """Raises ValueError, or Invalid, which names `path`."""
    windows: tuple[Window, ...] = decode(tuple[Window, ...], read_json(text), path)
    return windows
