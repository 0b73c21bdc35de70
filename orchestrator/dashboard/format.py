"""Numbers, times and names as a person reads them; the same words on every screen."""

import signal as signals
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, tzinfo

from orchestrator.contract.visible import visible
from orchestrator.job.incident import NOBODY, Culprit
from orchestrator.job.policy import BEFORE_FIX

UNSEEN = "-"
"""Stands where a number is not known."""


def one_line(text: str) -> str:
    return " ".join(visible(text).split())


def shortened(text: str, most: int = 120) -> str:
    text = one_line(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


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


def detected(seconds: float) -> str:
    return f"detected after {duration(seconds)}" if seconds >= 0.001 else "detected at once"


def stopwatch(seconds: float | None) -> str:
    """`1:42`, `2:05:10`, `3d 04:05:10`: keeps its width while it runs."""
    if seconds is None:
        return UNSEEN
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def moment(at: float, zone: tzinfo | None) -> str:
    """`2026-01-09 08:05:09 UTC`, in `zone`; None is this machine's."""
    return f"{_in(at, zone):%Y-%m-%d %H:%M:%S %Z}"


def short_moment(at: float, zone: tzinfo | None) -> str:
    """The same on a screen that has year and zone elsewhere."""
    return f"{_in(at, zone):%m-%d %H:%M:%S}"


def _in(at: float, zone: tzinfo | None) -> datetime:
    return datetime.fromtimestamp(at, UTC).astimezone(zone)


def blamed(culprit: Culprit) -> str:
    return "no culprit" if culprit == NOBODY else f"culprit {culprit}"


def why_and_fix(reason: str) -> tuple[str, str]:
    """Why a job ended, and what to do first, empty where nothing is known."""
    why, _, fix = reason.partition(BEFORE_FIX)
    return one_line(why), one_line(fix)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def loss(value: float | None) -> str:
    return UNSEEN if value is None else f"{value:.4f}"


def rate(tokens_per_second: float | None) -> str:
    return UNSEEN if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"


def size(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:,.1f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"


def signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def coordinates(coords: Mapping[str, int], degrees: Mapping[str, int]) -> str:
    """`dp_shard 1, tp 0`: the axes that have more than one place."""
    return ", ".join(f"{axis} {place}" for axis, place in coords.items() if degrees[axis] > 1)


def spans_in_words(spans: Sequence[tuple[int, int]], most: int = 6) -> str:
    """`rank 3`, `ranks 0-7, 12`, cut short where they are many."""
    many = len(spans) > 1 or spans[0][0] != spans[0][1]
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:most])
    more = sum(b - a + 1 for a, b in spans[most:])
    return f"{'ranks' if many else 'rank'} {shown}{f' and {more:,} more' if more else ''}"


def ranks_in_words(ranks: tuple[int, ...], most: int = 6) -> str:
    """`rank 3`, `ranks 1, 4, 5`, `ranks 0, 1, 2, 3, 4, 5 and 10 more`."""
    shown = ", ".join(str(rank) for rank in ranks[:most])
    rest = f" and {len(ranks) - most:,} more" if len(ranks) > most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{rest}"
