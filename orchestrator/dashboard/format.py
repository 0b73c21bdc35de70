"""Formats numbers, times and names, the same way for every view."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.contract.times import date_time as date_time
from orchestrator.contract.times import short_date_time as short_date_time
from orchestrator.contract.visible import visible
from orchestrator.diagnosis.cause.verdict import NOBODY, Culprit
from orchestrator.job.failures.policy import BEFORE_FIX

UNKNOWN = "-"
HEALTH_TEXT = {"slow": "late heartbeat", "silent": "no heartbeat"}
"""Text for health words of the journal that a reader could misunderstand."""


def one_line(text: str) -> str:
    return " ".join(visible(text).split())


def shorten(text: str, most: int = 120) -> str:
    text = one_line(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


MOST_QUOTED = 500
"""Characters of a line of a log or a traceback that a report shows."""


def quoted(line: str) -> str:
    """A line of a log, a traceback or a stack, with its indentation."""
    text = visible(line).rstrip()
    return text if len(text) <= MOST_QUOTED else f"{text[: MOST_QUOTED - 1]}…"


BEFORE_UNIT = re.compile(
    r"(?<=\d) (?=(?:ms|s|min|h|d|B|[kKMGT]i?B|°C|W|steps?|ranks?|hosts?|GPUs?|tokens/s)\b)"
)
NO_BREAK = "\u00a0"


def wrapped(text: str, width: int, **options: Any) -> list[str]:
    """`textwrap.wrap`, but a number stays on the line of its unit."""
    lines = textwrap.wrap(BEFORE_UNIT.sub(NO_BREAK, text), width, **options)
    return [line.replace(NO_BREAK, " ") for line in lines]


def duration(seconds: float) -> str:
    """`21 ms`, `0.4 s`, `12 s`, `3 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    seconds = max(0.0, seconds)
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02} h"


def short_duration(seconds: float) -> str:
    """`12s`, `3m`, `2h`, `4d`: for a column, where the order of magnitude is enough."""
    seconds = max(0.0, seconds)
    if seconds < 99.5:
        return f"{seconds:.0f}s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.0f}h" if seconds < 47.5 * 3600 else f"{seconds / 86_400:.0f}d"


def cells(text: str) -> int:
    """Number of terminal cells of a line; Chinese characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def clip(text: str, most: int) -> str:
    """`text` cut to at most `most` cells, with `…` at its end if it was cut."""
    if cells(text) <= most:
        return text
    while text and cells(text) >= most:
        text = text[:-1]
    return f"{text}…" if most > 0 else ""


def health_text(health: str) -> str:
    return HEALTH_TEXT.get(health, health)


def detection_delay(seconds: float) -> str:
    return f"detected after {duration(seconds)}" if seconds >= 0.001 else "detected at once"


def stopwatch(seconds: float | None) -> str:
    """`1:42`, `2:05:10`, `3d 04:05:10`: the width does not change from second to second."""
    if seconds is None:
        return UNKNOWN
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def culprit_text(culprit: Culprit) -> str:
    return "no culprit" if culprit == NOBODY else f"culprit {culprit}"


def split_fix(reason: str) -> tuple[str, str]:
    """The cause of a job's end and its fix; the fix is empty if none is known."""
    why, _, fix = reason.partition(BEFORE_FIX)
    return one_line(why), one_line(fix)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def steps(done: int, of: int) -> str:
    """`of`: 0 if unknown, as of a program, which may also report none that is done."""
    if not of:
        return f"{done:,}" if done else UNKNOWN
    return f"{done:,} of {of:,}"


def of_steps(done: int, of: int) -> str:
    """The same, shorter."""
    return steps(done, of).replace(" of ", "/")


def loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"


def rate(tokens_per_second: float | None) -> str:
    return UNKNOWN if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"


def size(num_bytes: float) -> str:
    mib = num_bytes / 2**20
    if mib < 1:
        return f"{num_bytes / 2**10:,.0f} KiB"
    return f"{mib:,.1f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"


def use(peak_memory_bytes: float | None, gpu_utilization: float | None) -> list[str]:
    """`peak memory 39.6 GiB`, `GPU 97% busy`: what is known of rank 0."""
    parts = []
    if peak_memory_bytes is not None:
        parts.append(f"peak memory {size(peak_memory_bytes)}")
    if gpu_utilization is not None:
        parts.append(f"GPU {gpu_utilization:.0%} busy")
    return parts


def lost_time(lost_s: Iterable[tuple[str, float]]) -> str:
    """`starts 12 s, lost work 8.0 s`: the causes of lost time, the largest first."""
    causes = sorted(lost_s, key=lambda pair: -pair[1])
    return ", ".join(f"{lost_to(cause)} {duration(s)}" for cause, s in causes if s >= 0.05)


def lost_to(cause: str) -> str:
    """A cause of lost time, for people. `restart` has the first start too, which is no restart."""
    return "starts" if cause == "restart" else cause.replace("_", " ")


def coordinates(coords: Mapping[str, int], degrees: Mapping[str, int]) -> str:
    """`dp_shard 1, tp 0`: only axes with a degree above 1."""
    return ", ".join(f"{axis} {place}" for axis, place in coords.items() if degrees[axis] > 1)


def rank_spans(spans: Sequence[tuple[int, int]], most: int = 6) -> str:
    """`rank 3`, `ranks 0-7, 12`; at most `most` spans, then a count of the remaining ranks."""
    many = len(spans) > 1 or spans[0][0] != spans[0][1]
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:most])
    more = sum(b - a + 1 for a, b in spans[most:])
    return f"{'ranks' if many else 'rank'} {shown}{f' and {more:,} more' if more else ''}"


def rank_list(ranks: tuple[int, ...], most: int = 6) -> str:
    """`rank 3`, `ranks 1, 4, 5`, `ranks 0, 1, 2, 3, 4, 5 and 10 more`."""
    shown = ", ".join(str(rank) for rank in ranks[:most])
    rest = f" and {len(ranks) - most:,} more" if len(ranks) > most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{rest}"
