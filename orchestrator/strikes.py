"""Hosts that broke jobs: two strikes within a day, and a host is left out for a day.

One file per cluster under the run root, to which the leaders of many jobs append whole lines. A
line that cannot be read, as the torn one of a crash, is passed over.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

WINDOW_S = 24 * 3600.0
LIMIT = 2
LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A host was the culprit of an incident."""

    at: float
    host: str
    job: str
    attempt: int
    kind: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """A person said that the host is in order again."""

    at: float
    host: str
    by: str


Line = Strike | Cleared


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is held against one host."""

    host: str
    strikes: tuple[Strike, ...]
    """Those that still count or counted within the window, oldest first."""
    excluded_until: float | None


def path_of(run_root: Path, cluster: str) -> Path: ...
def counts(kind: str, signal: str | None, drill: str | None) -> bool: ...
def record(path: Path, line: Line) -> None: ...
def recall(path: Path) -> tuple[Line, ...]: ...
def fold(lines: Iterable[Line], now: float) -> tuple[Record, ...]: ...
def excluded(path: Path, now: float) -> Mapping[str, str]: ...
