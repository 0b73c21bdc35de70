"""Checks a sample ledger: that every step which stands read its samples, all of them and no other.

A step stands when no later start of the trainer began before it. The samples of step s are those at
positions (s - 1) * global batch to s * global batch of the stream, whatever happened in between; so
where each step read its own, none was lost and none read twice over restarts and meshes. Windows
that were skipped on purpose move the positions of the steps after them, all by as much; the last
start says which, and every step that stands must agree with it: so what no step read is in them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from orchestrator.contract.codec import decode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.skipped_batches import Window, batch_of
from trainer.data.ledger import Line, Start, expected_hashes

CHECKED_AT_ONCE = 1 << 18
"""Samples whose hashes are computed in one go."""


@dataclass(frozen=True, slots=True)
class Mistake:
    step: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a ledger comes to."""

    start: Start
    """The first, with what the last one leaves out; all must agree with it but in that."""
    starts: int
    lines: dict[int, list[Line]]
    """Of each step that stands, one line if all is well."""
    mistakes: tuple[Mistake, ...]
    """Starts that do not fit the first."""

    @property
    def steps(self) -> int:
        """The last that stands."""
        return max(self.lines, default=0)

    @property
    def skipped(self) -> tuple[Window, ...]:
        """What the steps that stand have left out on purpose."""
        last = batch_of(self.steps, self.start.skipped) if self.steps else 0
        return tuple(window for window in self.start.skipped if window.first <= last)


def fold(text: Iterable[str]) -> Standing | None:
    """What stands at the end of a ledger; None when no start is in it.

    A line that cannot be read (a crash cuts lines off) is passed over: if it counted, its step is
    missing.
    """
    first: Start | None = None
    starts = 0
    lines: dict[int, list[Line]] = {}
    mistakes = []
    for entry in map(parse, text):
        if entry is None:
            continue
        if isinstance(entry, Line):
            lines.setdefault(entry.step, []).append(entry)
            continue
        first, starts = replace(first or entry, skipped=entry.skipped), starts + 1
        lines = {step: kept for step, kept in lines.items() if step <= entry.done}
        if changed := _changed(first, entry):
            what = f"attempt {entry.attempt} went on with another {changed}"
            mistakes.append(Mistake(entry.done + 1, what))
    if first is None:
        return None
    return Standing(start=first, starts=starts, lines=lines, mistakes=tuple(mistakes))


def first_mistake(standing: Standing, saved: int = 0) -> Mistake | None:
    """The first step that did not read exactly its samples; None when all did.

    `saved` is the step of a checkpoint: up to there no step may be missing.
    """
    return min(
        (*standing.mistakes, *_missing(standing, saved), *_wrong(standing)),
        key=lambda mistake: mistake.step,
        default=None,
    )


def parse(line: str) -> Start | Line | None:
    try:
        values = read_json(line)
        entry: Start | Line = decode(Line if "step" in values else Start, values)
    except (ValueError, TypeError):
        return None
    return entry


def _changed(first: Start, other: Start) -> str:
    keys = ("seed", "num_samples", "global_batch_size", "data")
    return ", ".join(key for key in keys if getattr(first, key) != getattr(other, key))


def _missing(standing: Standing, saved: int) -> Iterator[Mistake]:
    last = max(standing.steps, saved)
    gap = next((step for step in range(1, last + 1) if step not in standing.lines), None)
    if gap is not None:
        yield Mistake(gap, "there is no line of it")
    if not last:
        yield Mistake(1, "there is no line of any step")


def _wrong(standing: Standing) -> Iterator[Mistake]:
    """The first step whose line is wrong."""
    start = standing.start
    at_once = max(1, CHECKED_AT_ONCE // start.global_batch_size)
    for first in range(1, standing.steps + 1, at_once):
        num = min(at_once, standing.steps + 1 - first)
        for step, expected in enumerate(expected_hashes(start, first, num), start=first):
            what = _defect(standing.lines.get(step, []), step, expected, start)
            if what:
                yield Mistake(step, what)
                return


def _defect(lines: list[Line], step: int, expected: str, start: Start) -> str:
    if not lines:
        return ""  # _missing tells
    line, size = lines[0], start.global_batch_size
    if len(lines) > 1:
        return f"it was done {len(lines)} times in attempt {line.attempt}"
    if line.samples != size:
        return f"it read {line.samples} samples in attempt {line.attempt}, instead of {size}"
    if line.first != (first := start.first_of(step)):
        return f"it began at position {line.first} of the stream, instead of {first}"
    if line.hash != expected:
        return (
            f"it read other samples in attempt {line.attempt}: their hash is {line.hash}, and that"
            f" of the right ones {expected}"
        )
    return ""
