"""Checks a sample ledger: each valid step must have read exactly its samples.

A step is valid if no later start of the trainer repeats it. Step s reads the samples at positions
(s - 1) * global batch to s * global batch of the stream, no matter how often the job restarted. If
each valid step read its own positions, no sample was lost or read twice, also across meshes.

Windows that were skipped on purpose shift the positions of all later steps. The last start lists
all windows, and each valid step must agree with it, so only samples in these windows were not read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from orchestrator.contract.codec import decode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.skipped_batches import Window, batch_of
from trainer.data.ledger import Line, Start, expected_hashes

CHECKED_AT_ONCE = 1 << 18
"""Samples that are hashed in one numpy call."""


@dataclass(frozen=True, slots=True)
class Mistake:
    step: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The valid lines of a ledger."""

    start: Start
    """The first start, with the skipped windows of the last one. All else must never change."""
    starts: int
    lines: dict[int, list[Line]]
    """By step. A correct step has exactly one line."""
    mistakes: tuple[Mistake, ...]
    """Starts whose settings differ from the first one."""

    @property
    def steps(self) -> int:
        """The last valid step."""
        return max(self.lines, default=0)

    @property
    def skipped(self) -> tuple[Window, ...]:
        """Windows that the valid steps have skipped on purpose."""
        last = batch_of(self.steps, self.start.skipped) if self.steps else 0
        return tuple(window for window in self.start.skipped if window.first <= last)


def replay(text: Iterable[str]) -> LedgerState | None:
    """The state at the end of a ledger; None if it records no start.

    Unreadable lines are ignored, because a crash can cut a line off. If such a line was the only
    one of a valid step, that step is then missing.
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
        # This start repeats all steps after `done`, so their lines are no longer valid.
        lines = {step: kept for step, kept in lines.items() if step <= entry.done}
        if changed := _changed(first, entry):
            what = f"attempt {entry.attempt} resumed with a different {changed}"
            mistakes.append(Mistake(entry.done + 1, what))
    if first is None:
        return None
    return LedgerState(start=first, starts=starts, lines=lines, mistakes=tuple(mistakes))


def first_mistake(ledger: LedgerState, saved: int = 0) -> Mistake | None:
    """The first step that did not read exactly its samples; None if all did.

    `saved` is the step of the newest checkpoint. No step up to it may be missing.
    """
    return min(
        (*ledger.mistakes, *_missing(ledger, saved), *_wrong(ledger)),
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


def _missing(ledger: LedgerState, saved: int) -> Iterator[Mistake]:
    last = max(ledger.steps, saved)
    gap = next((step for step in range(1, last + 1) if step not in ledger.lines), None)
    if gap is not None:
        yield Mistake(gap, "the ledger has no line for it")
    if not last:
        yield Mistake(1, "the ledger has no line for any step")


def _wrong(ledger: LedgerState) -> Iterator[Mistake]:
    """The first step whose line is wrong."""
    start = ledger.start
    at_once = max(1, CHECKED_AT_ONCE // start.global_batch_size)
    for first in range(1, ledger.steps + 1, at_once):
        num = min(at_once, ledger.steps + 1 - first)
        for step, expected in enumerate(expected_hashes(start, first, num), start=first):
            what = _defect(ledger.lines.get(step, []), step, expected, start)
            if what:
                yield Mistake(step, what)
                return


def _defect(lines: list[Line], step: int, expected: str, start: Start) -> str:
    if not lines:
        return ""  # `_missing` reports it
    line, size = lines[0], start.global_batch_size
    if len(lines) > 1:
        return f"it ran {len(lines)} times in attempt {line.attempt}"
    if line.samples != size:
        return f"it read {line.samples} samples in attempt {line.attempt}; expected {size}"
    if line.first != (first := start.first_of(step)):
        return f"it started at position {line.first} of the stream; expected {first}"
    if line.hash != expected:
        return (
            f"it read wrong samples in attempt {line.attempt}: their hash is {line.hash}; expected"
            f" {expected}"
        )
    return ""
