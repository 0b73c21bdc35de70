"""Hosts that broke jobs: two strikes within a day, and a host is left out for a day.

One file per cluster under the run root, to which the leaders of many jobs append whole lines. A
line that cannot be read, as the torn one of a crash, is passed over. (On NFS two appends from two
hosts in the same moment may cost one of them; the next incident of a bad host is not far.)
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.contract.codec import Invalid, decode, encode

FOLDER = ".hosts"
LOCAL = "local"
"""The cluster of jobs that play their hosts on one machine: these are names, none is left out."""
WINDOW_S = 24 * 3600.0
"""Two strikes no further apart exclude a host, for as long after the later one."""
LIMIT = 2
HOST_KINDS = frozenset({"host-lost", "leader-lost", "hang", "preflight"})
"""Kinds of incidents whose culprit is the machine, where they name one."""
HOST_SIGNALS = frozenset({"SIGKILL", "SIGBUS"})
"""Of `rank-killed`: from the kernel or the memory. A program or a person causes the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A host was the culprit of an incident."""

    at: float
    host: str
    job: str
    attempt: int
    """0 before the first."""
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
class OneLine:
    """What a line of the file holds: one of these."""

    strike: Strike | None = None
    cleared: Cleared | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is held against one host."""

    host: str
    strikes: tuple[Strike, ...]
    """Since it was last cleared, oldest first."""
    excluded_until: float | None
    """Unix seconds; None where it may be used."""


def path_of(run_root: Path, cluster: str) -> Path:
    """The file of `cluster`, in Slurm its ClusterName."""
    return run_root / FOLDER / f"{cluster}.jsonl"


def counts(kind: str, signal: str | None = None, drill: str | None = None) -> bool:
    """Whether an incident is a strike against the host that it names.

    Not a program's own exception or exit, not a preemption, and not what was rehearsed.
    """
    if drill is not None:
        return False
    return kind in HOST_KINDS or (kind == "rank-killed" and signal in HOST_SIGNALS)


def record(path: Path, line: Line) -> None:
    """Append; many processes may at once. Raises OSError when the disk does not take it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {type(line).__name__.lower(): encode(line)}
    data = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o664)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data  # a torn line must not swallow this one
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, "only a part of a line fitted", str(path))
        os.fsync(fd)
    finally:
        os.close(fd)


def recall(path: Path) -> tuple[Line, ...]:
    """Every line that can be read; none where there is no file. Raises OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    return tuple(_lines(data))


def _lines(data: bytes) -> Iterator[Line]:
    for text in data.split(b"\n")[:-1]:
        try:
            found: OneLine = decode(OneLine, json.loads(text))
        except (ValueError, Invalid):
            continue
        yield from (line for line in (found.strike, found.cleared) if line is not None)


def fold(lines: Iterable[Line], now: float) -> tuple[Record, ...]:
    """What is held against each host at `now`, by name. Pure.

    An incident that is told twice, as by a leader that performs an action again, counts once.
    """
    held: dict[str, dict[tuple[str, int, str], Strike]] = {}
    for line in sorted(lines, key=lambda line: line.at):
        match line:
            case Strike():
                key = (line.job, line.attempt, line.kind)
                held.setdefault(line.host, {}).setdefault(key, line)
            case Cleared():
                held.pop(line.host, None)
    return tuple(
        Record(
            host=host,
            strikes=tuple(strikes.values()),
            excluded_until=_until(tuple(strikes.values()), now),
        )
        for host, strikes in sorted(held.items())
    )


def _until(strikes: tuple[Strike, ...], now: float) -> float | None:
    """The end of the last exclusion, if that is still to come."""
    ends = [
        later.at + WINDOW_S
        for earlier, later in zip(strikes, strikes[LIMIT - 1 :], strict=False)
        if later.at - earlier.at <= WINDOW_S
    ]
    return ends[-1] if ends and ends[-1] > now else None


def excluded(path: Path, now: float) -> Mapping[str, str]:
    """Host to why it is left out, in words; nobody where hosts are only names."""
    if path.stem == LOCAL:
        return {}
    return {
        found.host: describe(found)
        for found in fold(recall(path), now)
        if found.excluded_until is not None
    }


def describe(found: Record) -> str:
    """Why and until when, or what there is against it."""
    last = found.strikes[-1]
    count = len(found.strikes)
    words = (
        f"{count} strike{'s' if count > 1 else ''}, last {last.kind} in {last.job}: {last.cause}"
    )
    if found.excluded_until is None:
        return words
    return f"excluded until {stamp(found.excluded_until)}: {words}"


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def records(run_root: Path, now: float) -> Mapping[str, tuple[Record, ...]]:
    """Cluster to what is held against its hosts at `now`."""
    files = sorted((run_root / FOLDER).glob("*.jsonl"))
    return {path.stem: fold(recall(path), now) for path in files}


def hosts_json(found: Mapping[str, tuple[Record, ...]]) -> list[dict[str, Any]]:
    return [
        {"cluster": cluster, **encode(record), "excluded": _is_excluded(cluster, record)}
        for cluster, held in found.items()
        for record in held
    ]


def hosts_text(found: Mapping[str, tuple[Record, ...]]) -> str:
    """A line for each host, its strikes below it."""
    lines = []
    for cluster, held in found.items():
        for record in held:
            state = "may be used"
            if record.excluded_until is not None:
                state = f"excluded until {stamp(record.excluded_until)}"
            if record.excluded_until is not None and cluster == LOCAL:
                state = "may be used: the hosts of local jobs are only names"
            lines.append(f"{cluster}/{record.host}  {len(record.strikes)} strikes, {state}")
            lines += [
                f"  {stamp(strike.at)}  {strike.kind} in {strike.job}, attempt {strike.attempt}:"
                f" {strike.cause}"
                for strike in record.strikes
            ]
    return "\n".join(lines)


def _is_excluded(cluster: str, record: Record) -> bool:
    return record.excluded_until is not None and cluster != LOCAL
