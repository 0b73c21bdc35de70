"""Hosts that broke jobs: strikes that fade with time, and what users decided about a host.

A strike loses half its weight per day. A rank that was killed by SIGKILL without an explanation in
the kernel log was most likely killed by a person or a daemon, so that is a quarter of a strike. So
is a GPU that is busy or that a process does not see, as its host may be healthy. A host that was
replaced as a straggler broke nothing, so that is half a strike the first time and a full one after
that. One that was replaced for its own warning gets half a strike. A host whose strikes weigh 1.5
together (as two strikes a day apart do) is excluded until they weigh half of that: a day for these
two, longer for a host that fails again and again. A pin by a user overrides the strikes until the
host is unpinned.

There is one file per cluster under the run root, and the leaders of many jobs append lines to it. A
line that cannot be read, such as one cut short by a crash, is ignored. (On NFS, of two appends from
two hosts at the same moment one may be lost. That is acceptable: a bad host soon fails again.) A
writer shares the file's lock. A process with the exclusive lock replaces the file with a shorter
one (`leader/strike_compaction.py`).
"""

import contextlib
import functools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, tzinfo
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ndctl.rank.regular_file import read_regular
from orchestrator.contract.codec import decode, encode
from orchestrator.contract.files.shared_lines import append
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.failures import Remedy, Scope
from orchestrator.contract.times import check_time, date_time
from orchestrator.errors import JobError

log = logging.getLogger(__name__)

FOLDER = ".hosts"
LOCAL = "local"
"""Cluster of local jobs. Their hosts are only names on one machine, so none is excluded."""
HALF_LIFE_S = 24 * 3600.0
"""Seconds in which a strike loses half its weight."""
EXCLUDED_FROM = 1.5
UNTIL = EXCLUDED_FROM / 2
STRAGGLER = "straggler"
"""Kind of the strike of a host that was replaced as a straggler."""
FIRST_STRAGGLER = 0.5
"""Weight of a host's first straggler strike, because slowness may pass."""
FORETOLD = 0.5
"""Weight of a strike of a host that was replaced for its own warning, before it broke anything."""
UNPROVEN = frozenset({"sigkill-from-outside", "gpu-busy", "gpu-not-visible"})
"""Classes that a healthy host has as well: a person kills a rank, another process holds the GPU, or
CUDA_VISIBLE_DEVICES is wrong. Nothing in the kernel log explains them."""
SMALL = 0.25
"""Weight of a strike for such a failure. Seven within an hour exclude the host."""
HOOK = "before-hook"
"""Class of a host on which `hooks.before` of the spec failed. The hook itself may be wrong, so no
strike is recorded for other jobs."""
LEAST = 0.01
"""Strikes with less weight, which means older than a week, are shown only on request."""
MOST_EVIDENCE = 5
"""Number of evidence lines that a strike keeps."""
MOST_LINE = 64 << 10
"""Longest line in bytes that is read; ndctl writes at most a few thousand."""
MOST_NAMED = 3
"""Number of unreadable lines of a file that are logged one by one."""
MOST_REASON = 160
HOST_KINDS = frozenset({"host-lost", "leader-lost", "hang", "preflight"})
"""Kinds of incidents in which a named culprit is the machine."""
HOST_SIGNALS = frozenset({"SIGKILL", "SIGBUS"})
"""Signals in `rank-killed` that come from the kernel or memory errors. Others come from a program
or a person."""


class Strike(Struct, frozen=True, kw_only=True):
    """A host was the culprit of an incident."""

    at: float
    host: str
    job: str
    attempt: int
    """0 before the first."""
    kind: str
    cause: str
    evidence: tuple[str, ...] = ()
    """Lines that show it: the end of a log, a signal, a stack."""
    submitted: float | None = None
    """When the job was submitted. Needed because a new run of the job counts attempts from 1 again.
    None: written by an older ndctl."""
    weight: float = 1.0
    """Weight of the strike on the day it is written."""


class Withdrawn(Struct, frozen=True, kw_only=True):
    """The host has shown later that it works, so that strike does not count."""

    at: float
    host: str
    job: str
    attempt: int
    kind: str
    submitted: float


class Cleared(Struct, frozen=True, kw_only=True):
    """A user declared that the host is in order again."""

    at: float
    host: str
    by: str


class Pinned(Struct, frozen=True, kw_only=True):
    """A user decided that the host must never, or always, be used, whatever its strikes."""

    at: float
    host: str
    use: Literal["never", "always"]
    by: str
    reason: str


class Unpinned(Struct, frozen=True, kw_only=True):
    """The pin was removed, so the host's strikes count again."""

    at: float
    host: str
    by: str


Line = Strike | Withdrawn | Cleared | Pinned | Unpinned


class OneLine(Struct, frozen=True, kw_only=True):
    """Content of a line of the file; exactly one field is set."""

    strike: Strike | None = None
    withdrawn: Withdrawn | None = None
    cleared: Cleared | None = None
    pinned: Pinned | None = None
    unpinned: Unpinned | None = None


class Record(Struct, frozen=True, kw_only=True):
    """What is recorded about one host."""

    host: str
    strikes: tuple[Strike, ...]
    """Since the host was last cleared, oldest first."""
    excluded_until: float | None
    """Unix seconds, as its strikes decide; None: they do not exclude it."""
    score: float = 0.0
    """Current weight of its strikes."""
    pin: Pinned | None = None

    @property
    def is_excluded(self) -> bool:
        """Whether the host must not be used, because of its strikes or of a pin."""
        if self.pin is not None:
            return self.pin.use == "never"
        return self.excluded_until is not None


def path_of(run_root: Path, cluster: str) -> Path:
    """The file of `cluster`, in Slurm its ClusterName."""
    return run_root / FOLDER / f"{cluster}.jsonl"


class Failure(Struct, frozen=True, kw_only=True):
    """The parts of an incident that decide whether the machine is the culprit."""

    kind: str
    name: str = ""
    """Failure class."""
    signal: str | None = None
    drill: str | None = None
    scope: Scope | None = None
    remedy: Remedy | None = None


def weight(failure: Failure) -> float:
    """Weight of the strike against the host that an incident names; 0: no strike.

    No strike follows from a program's own exception or exit, a kill for the memory that it took, a
    preemption or a drill. Otherwise a strike follows if the failure class is about hosts and the
    host was replaced, however the rank ended.
    """
    if failure.drill is not None or failure.scope == "user" or failure.name == HOOK:
        return 0.0
    if failure.kind in HOST_KINDS:
        return 1.0
    if failure.kind == "host-warned":
        return FORETOLD
    killed = failure.kind == "rank-killed" and failure.signal in HOST_SIGNALS
    replaced = failure.scope == "host" and failure.remedy == "replace"
    if not (killed or replaced):
        return 0.0
    return SMALL if failure.name in UNPROVEN else 1.0


def record(path: Path, line: Line) -> None:
    """Append a line. Many processes may do so at once. Raises OSError if the disk does not accept
    it."""
    append(path, to_line(line))


def to_line(line: Line) -> bytes:
    body = {type(line).__name__.lower(): encode(line)}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def recall(path: Path) -> tuple[Line, ...]:
    """Every readable line; empty if there is no file. Other lines are logged and ignored: many
    users write this file, and a bad line of one must not stop the others. Raises OSError."""
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return ()
    lines: list[Line] = []
    skipped: list[tuple[int, str]] = []
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            lines += said_in(text)
        except ValueError as exc:
            skipped.append((number, str(exc)))
    for number, why in skipped[:MOST_NAMED]:
        _warn_once(f"ignoring line {number} of {path}: {why}")
    if len(skipped) > MOST_NAMED:
        _warn_once(f"ignoring {len(skipped) - MOST_NAMED} more lines of {path}")
    return tuple(lines)


@functools.lru_cache(maxsize=1024)
def _warn_once(said: str) -> None:
    """A leader reads the file again and again, so each warning is logged once."""
    log.warning("%s", said)


def lines_in(text: bytes) -> tuple[Line, ...]:
    """The entry in a line of the file; empty if it cannot be read."""
    try:
        return said_in(text)
    except ValueError:
        return ()


def said_in(text: bytes) -> tuple[Line, ...]:
    """The entry in a line of the file. Raises ValueError with a reason of one short line."""
    try:
        value = read_json(text, most=MOST_LINE)
        _check_text(value)
        found: OneLine = decode(OneLine, value)
        said = (found.strike, found.withdrawn, found.cleared, found.pinned, found.unpinned)
        lines = tuple(line for line in said if line is not None)
        for line in lines:
            check_time(line.at)
            if isinstance(line, Strike | Withdrawn) and line.submitted is not None:
                check_time(line.submitted)
            if isinstance(line, Strike) and not 0 <= line.weight <= 1:
                raise ValueError(f"a strike must weigh 0 to 1, got {line.weight}")
    except ValueError as exc:
        raise ValueError(str(exc).partition("\n")[0][:MOST_REASON]) from exc
    return lines


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise ValueError("it contains half of a surrogate pair, which is no character") from exc


def fold(lines: Iterable[Line], now: float) -> tuple[Record, ...]:
    """The records of all hosts at `now`, sorted by name. Pure.

    An incident that is recorded twice, for example by a leader that repeats an action, counts once.
    A strike that was withdrawn does not count, in whatever order the two lines came.
    """
    lines = sorted(lines, key=lambda line: line.at)
    withdrawn = {(line.host, *_key(line)) for line in lines if isinstance(line, Withdrawn)}
    held: dict[str, dict[_Key, Strike]] = {}
    pins: dict[str, Pinned] = {}
    for line in lines:
        match line:
            case Strike() if (line.host, *_key(line)) not in withdrawn:
                held.setdefault(line.host, {}).setdefault(_key(line), line)
            case Cleared():
                held.pop(line.host, None)
            case Pinned():
                pins[line.host] = line
            case Unpinned():
                pins.pop(line.host, None)
    return tuple(
        _record(host, tuple(held.get(host, {}).values()), pins.get(host), now)
        for host in sorted({*held, *pins})
    )


_Key = tuple[str, float, int, str]
"""Identifies the incident of a strike: job, time of its submission, attempt and kind."""


def _key(line: Strike | Withdrawn) -> _Key:
    run = line.at if line.submitted is None else line.submitted
    return line.job, run, line.attempt, line.kind


def _record(host: str, strikes: tuple[Strike, ...], pin: Pinned | None, now: float) -> Record:
    """A host is excluded from the strike that raises its score to EXCLUDED_FROM until the score has
    fallen to UNTIL."""
    score, last, until, was_slow = 0.0, now, None, False
    for strike in strikes:
        is_slow = strike.kind == STRAGGLER
        new = FIRST_STRAGGLER if is_slow and not was_slow else strike.weight
        score, was_slow = new + _faded(score, strike.at - last), was_slow or is_slow
        last = strike.at
        still = until is not None and strike.at < until
        if score >= EXCLUDED_FROM or still:
            until = strike.at + HALF_LIFE_S * math.log2(score / UNTIL)
    return Record(
        host=host,
        strikes=strikes,
        excluded_until=until if until is not None and until > now else None,
        score=_faded(score, now - last),
        pin=pin,
    )


def _faded(score: float, seconds: float) -> float:
    return score * 0.5 ** (max(0.0, seconds) / HALF_LIFE_S) if score else 0.0


def excluded(path: Path, now: float) -> Mapping[str, str]:
    """Host -> why it is excluded, in words; empty for local jobs."""
    return {found.host: describe(found) for found in excluded_records(path, now)}


def excluded_records(path: Path, now: float) -> tuple[Record, ...]:
    """Records of the hosts that must not be used now; empty for local jobs."""
    return tuple(found for found in _held(path, now) if found.is_excluded)


def always(path: Path, now: float) -> tuple[str, ...]:
    """Hosts that must be used whatever happens on them."""
    held = _held(path, now)
    return tuple(found.host for found in held if found.pin and found.pin.use == "always")


def cleared(path: Path) -> Mapping[str, float]:
    """Host -> when a user last cleared it; also for hosts without a strike."""
    said = (line for line in _recalled(path) if isinstance(line, Cleared))
    return {line.host: line.at for line in sorted(said, key=lambda line: line.at)}


def _held(path: Path, now: float) -> tuple[Record, ...]:
    """The records that count for a job. If the file cannot be read, jobs start without it: a bad
    host is detected again."""
    return fold(_recalled(path), now)


def _recalled(path: Path) -> tuple[Line, ...]:
    if path.stem == LOCAL:
        return ()
    try:
        return recall(path)
    except OSError as exc:
        log.warning("excluding no hosts, failed to read host strikes: %s", exc)
        return ()


def describe(found: Record, zone: tzinfo | None = UTC) -> str:
    """Why and until when the host is excluded, or its strikes; and why it is pinned.

    Args:
        zone: None: the zone of this machine, for a person. The journal has UTC.
    """
    words = _against(found)
    if found.pin is not None:
        pin = found.pin
        said = f"pinned: {pin.use} used, by {pin.by} since {date_time(pin.at, zone)}: {pin.reason}"
        return f"{said}; {words}" if words else said
    if found.excluded_until is None:
        return words
    return f"excluded until {date_time(found.excluded_until, zone)}: {words}"


def _against(found: Record) -> str:
    if not found.strikes:
        return ""
    last, count = found.strikes[-1], len(found.strikes)
    many = f"{count} strike{'s' if count > 1 else ''}"
    return f"{many}, last {last.kind} in {last.job}: {last.cause}"


def records(run_root: Path, now: float) -> Mapping[str, tuple[Record, ...]]:
    """Cluster -> records of its hosts at `now`. Raises JobError."""
    files = sorted((run_root / FOLDER).glob("*.jsonl"))
    with said_to_a_person():
        return {path.stem: fold(recall(path), now) for path in files}


@contextlib.contextmanager
def said_to_a_person() -> Iterator[None]:
    """Translates the OSError of a file that cannot be read or written."""
    try:
        yield
    except OSError as exc:
        raise JobError(
            f"host strikes cannot be read or written: {exc}",
            fix="ask the owner of the file to let all users of the run root read and write it:"
            " `chmod g+rw,o+rw FILE`, as far as they can use the run root itself",
        ) from exc


def still_counting(
    found: Mapping[str, tuple[Record, ...]], now: float
) -> Mapping[str, tuple[Record, ...]]:
    """Without faded strikes, and without hosts that have only such strikes."""
    return {
        cluster: tuple(
            replace(record, strikes=tuple(s for s in record.strikes if _counts_at(s, now)))
            for record in held
            if record.pin is not None or record.score >= LEAST
        )
        for cluster, held in found.items()
    }


def _counts_at(strike: Strike, now: float) -> bool:
    return _faded(1.0, now - strike.at) >= LEAST


def hosts_json(found: Mapping[str, tuple[Record, ...]]) -> list[dict[str, Any]]:
    return [
        {"cluster": cluster, **encode(record), "excluded": _is_excluded(cluster, record)}
        for cluster, held in found.items()
        for record in held
    ]


def hosts_text(found: Mapping[str, tuple[Record, ...]], zone: tzinfo | None) -> str:
    """One line per host, with its strikes and their evidence below."""
    lines = []
    for cluster, held in found.items():
        for record in held:
            count = len(record.strikes)
            many = f"{count} strike{'' if count == 1 else 's'}"
            if count:
                many += f" with a current weight of {record.score:.2f}"
            lines.append(f"{cluster}/{record.host}  {many}, {_standing(cluster, record, zone)}")
            for strike in record.strikes:
                lines.append(
                    f"  {date_time(strike.at, zone)}  {strike.kind} in {strike.job},"
                    f" attempt {strike.attempt}: {strike.cause}{_lighter(strike)}"
                )
                lines += [f"    {line}" for line in strike.evidence]
    return "\n".join(lines)


def _lighter(strike: Strike) -> str:
    return "" if strike.weight == 1 else f" (weight {strike.weight:.2f})"


def _standing(cluster: str, record: Record, zone: tzinfo | None) -> str:
    pin = record.pin
    if cluster == LOCAL and (pin is not None or record.excluded_until is not None):
        return "may be used: the hosts of local jobs are only names"
    if pin is not None:
        said = f"by {pin.by} since {date_time(pin.at, zone)}: {pin.reason}"
        return f"pinned: {pin.use} used until `ndctl hosts unpin {record.host}`, {said}"
    if record.excluded_until is None:
        return "may be used"
    return f"excluded until {date_time(record.excluded_until, zone)}"


def _is_excluded(cluster: str, record: Record) -> bool:
    return record.is_excluded and cluster != LOCAL
