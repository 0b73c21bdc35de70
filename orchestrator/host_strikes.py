"""Hosts that broke jobs: strikes that fade with time, and what a person says about a host.

A strike counts half as much with each day. A host that was replaced because it kept its peers
waiting broke nothing: that is half a strike the first time, and one when it happens again. A rank
that was killed by SIGKILL, and no kernel or hardware tells why, was most likely killed by a person
or a daemon: that is a quarter of a strike. A host
whose strikes count 1.5 together, as two do that are a day apart, is left out until they count half
of that: a day for these two, longer for a host that breaks again and again, also where its strikes
are further apart. Whoever pins a host overrules that, until it is unpinned.

One file per cluster under the run root, to which the leaders of many jobs append whole lines. A
line that cannot be read, as the torn one of a crash, is passed over. (On NFS two appends from two
hosts in the same moment may cost one of them; the next incident of a bad host is not far.) Who
appends shares the file's lock; who holds it alone puts a shorter file in its place
(`leader/strike_compaction.py`).
"""

import contextlib
import errno
import fcntl
import functools
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from orchestrator.contract.codec import decode, encode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.failures import Remedy, Scope
from orchestrator.contract.times import check_time
from orchestrator.errors import JobError

log = logging.getLogger(__name__)

FOLDER = ".hosts"
LOCAL = "local"
"""The cluster of jobs that play their hosts on one machine: these are names, none is left out."""
HALF_LIFE_S = 24 * 3600.0
"""After which a strike counts half."""
EXCLUDED_FROM = 1.5
UNTIL = EXCLUDED_FROM / 2
STRAGGLER = "straggler"
"""Kind of the strike of a host that was replaced for being slow …"""
FIRST_STRAGGLER = 0.5
"""… and what the first of these counts; slowness may pass."""
UNEXPLAINED_KILL = "sigkill-from-outside"
"""Class of a rank that was killed by SIGKILL where nothing that the kernel said explains it …"""
KILLED = 0.25
"""… and what a strike for it counts: seven within an hour exclude the host."""
HOOK = "before-hook"
"""Class of a host on which the spec's own line of shell failed. The line may be wrong, so other
jobs hear nothing of it."""
LEAST = 0.01
"""Strikes that count less, which is after a week, are shown on demand alone."""
MOST_EVIDENCE = 5
"""Lines that a strike keeps."""
MOST_LINE = 64 << 10
"""Bytes; ndctl writes at most a few thousand."""
MOST_NAMED = 3
"""Lines of a file that cannot be read and are named one by one."""
MOST_REASON = 160
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
    evidence: tuple[str, ...] = ()
    """What shows it, in lines: the end of a log, a signal, a stack."""
    submitted: float | None = None
    """When the job was, for one that is begun anew counts its attempts anew; None: written by an
    ndctl that did not tell."""
    weight: float = 1.0
    """What it counts on the day that it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """A person said that the host is in order again."""

    at: float
    host: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A person said that the host is to be used never, or always, whatever its strikes."""

    at: float
    host: str
    use: Literal["never", "always"]
    by: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpinned:
    """Its strikes count again."""

    at: float
    host: str
    by: str


Line = Strike | Cleared | Pinned | Unpinned


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLine:
    """What a line of the file holds: one of these."""

    strike: Strike | None = None
    cleared: Cleared | None = None
    pinned: Pinned | None = None
    unpinned: Unpinned | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is held against one host."""

    host: str
    strikes: tuple[Strike, ...]
    """Since it was last cleared, oldest first."""
    excluded_until: float | None
    """Unix seconds, by its strikes; None where they leave it in use."""
    score: float = 0.0
    """What its strikes count by now."""
    pin: Pinned | None = None

    @property
    def is_excluded(self) -> bool:
        """It is not to be used, by its strikes or by a person's word."""
        if self.pin is not None:
            return self.pin.use == "never"
        return self.excluded_until is not None


def path_of(run_root: Path, cluster: str) -> Path:
    """The file of `cluster`, in Slurm its ClusterName."""
    return run_root / FOLDER / f"{cluster}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What of an incident decides whether the machine is to blame."""

    kind: str
    name: str = ""
    """Of its class."""
    signal: str | None = None
    drill: str | None = None
    scope: Scope | None = None
    remedy: Remedy | None = None


def weight(failure: Failure) -> float:
    """What an incident counts as a strike against the host that it names; 0: it is none.

    Not a program's own exception or exit, nor a kill for the memory that it took, not a preemption,
    and not what was rehearsed. By whichever sign a rank ended: a host that its class speaks
    against, and that was left out for it.
    """
    if failure.drill is not None or failure.scope == "user" or failure.name == HOOK:
        return 0.0
    if failure.kind in HOST_KINDS:
        return 1.0
    killed = failure.kind == "rank-killed" and failure.signal in HOST_SIGNALS
    replaced = failure.scope == "host" and failure.remedy == "replace"
    if not (killed or replaced):
        return 0.0
    return KILLED if failure.name == UNEXPLAINED_KILL else 1.0


def record(path: Path, line: Line) -> None:
    """Append; many processes may at once. Raises OSError when the disk does not take it."""
    data = to_line(line)
    fd = _open_shared(path)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data  # a torn line must not swallow this one
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, "only part of a line was written", str(path))
        os.fsync(fd)
    finally:
        os.close(fd)


def to_line(line: Line) -> bytes:
    body = {type(line).__name__.lower(): encode(line)}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def _open_shared(path: Path) -> int:
    """With its lock shared: nobody puts another file in its place before it is closed."""
    while True:
        fd = _open(path)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_SH)
            if is_there(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def is_there(fd: int, path: Path) -> bool:
    """Whether the open file has that name still."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    """To append. Whoever comes first makes it for all who share the run root."""
    flags = os.O_RDWR | os.O_APPEND
    try:
        # Without O_CREAT, which Linux forbids for another's file in a sticky folder.
        return os.open(path, flags)
    except FileNotFoundError:
        folder = path.parent
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
        share(folder, folder.parent, 0o7777)
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o664)
    except FileExistsError:
        return os.open(path, flags)
    share(path, folder.parent, 0o666)
    return fd


def share(path: Path, run_root: Path, most: int) -> None:
    """Let those read and write here who may in the run root, whatever this user's umask."""
    like = run_root.stat()
    with contextlib.suppress(OSError):  # not a member of its group
        os.chown(path, -1, like.st_gid)
    with contextlib.suppress(OSError):  # a file system that has none
        path.chmod(like.st_mode & most)


def recall(path: Path) -> tuple[Line, ...]:
    """Every line that can be read; none where there is no file. The log names the others: many
    users write this file, and one of them must not stop the rest. Raises OSError."""
    try:
        data = path.read_bytes()
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
        _warn_once(f"skipped line {number} of {path}: {why}")
    if len(skipped) > MOST_NAMED:
        _warn_once(f"skipped {len(skipped) - MOST_NAMED} more lines of {path}")
    return tuple(lines)


@functools.lru_cache(maxsize=1024)
def _warn_once(said: str) -> None:
    """A leader reads the file again and again."""
    log.warning("%s", said)


def lines_in(text: bytes) -> tuple[Line, ...]:
    """What a line of the file says; nothing where it cannot be read."""
    try:
        return said_in(text)
    except ValueError:
        return ()


def said_in(text: bytes) -> tuple[Line, ...]:
    """What a line of the file says. Raises ValueError with a reason of one short line."""
    try:
        value = read_json(text, most=MOST_LINE)
        _check_text(value)
        found: OneLine = decode(OneLine, value)
        said = (found.strike, found.cleared, found.pinned, found.unpinned)
        lines = tuple(line for line in said if line is not None)
        for line in lines:
            check_time(line.at)
            if isinstance(line, Strike):
                _check_strike(line)
    except ValueError as exc:
        raise ValueError(str(exc).partition("\n")[0][:MOST_REASON]) from exc
    return lines


def _check_strike(line: Strike) -> None:
    if line.submitted is not None:
        check_time(line.submitted)
    if not 0 <= line.weight <= 1:
        raise ValueError(f"a strike weighs 0 to 1, not {line.weight}")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise ValueError("it holds half of a surrogate pair, which is no character") from exc


def fold(lines: Iterable[Line], now: float) -> tuple[Record, ...]:
    """What is held against each host at `now`, by name. Pure.

    An incident that is told twice, as by a leader that performs an action again, counts once.
    """
    held: dict[str, dict[tuple[str, float, int, str], Strike]] = {}
    pins: dict[str, Pinned] = {}
    for line in sorted(lines, key=lambda line: line.at):
        match line:
            case Strike():
                run = line.at if line.submitted is None else line.submitted
                key = (line.job, run, line.attempt, line.kind)
                held.setdefault(line.host, {}).setdefault(key, line)
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


def _record(host: str, strikes: tuple[Strike, ...], pin: Pinned | None, now: float) -> Record:
    """Left out from the strike that brings the score to EXCLUDED_FROM until it falls to UNTIL."""
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
    """Host to why it is excluded, in words; none where hosts are only names."""
    return {found.host: describe(found) for found in excluded_records(path, now)}


def excluded_records(path: Path, now: float) -> tuple[Record, ...]:
    """Of the hosts that are not to be used now; none where hosts are only names."""
    return tuple(found for found in _held(path, now) if found.is_excluded)


def always(path: Path, now: float) -> tuple[str, ...]:
    """Hosts that are to be used whatever happens on them."""
    held = _held(path, now)
    return tuple(found.host for found in held if found.pin and found.pin.use == "always")


def cleared(path: Path) -> Mapping[str, float]:
    """Host to when a person last said that it is in order again, also of one without a strike."""
    said = (line for line in _recalled(path) if isinstance(line, Cleared))
    return {line.host: line.at for line in sorted(said, key=lambda line: line.at)}


def _held(path: Path, now: float) -> tuple[Record, ...]:
    """What counts for a job. A file that cannot be read keeps none from starting: a bad host will
    be found again."""
    return fold(_recalled(path), now)


def _recalled(path: Path) -> tuple[Line, ...]:
    if path.stem == LOCAL:
        return ()
    try:
        return recall(path)
    except OSError as exc:
        log.warning("the strikes against hosts cannot be read, so none is left out: %s", exc)
        return ()


def describe(found: Record) -> str:
    """Why and until when it is left out, or what there is against it; why it is pinned."""
    words = _against(found)
    if found.pin is not None:
        pin = found.pin
        said = f"pinned: {pin.use} used, by {pin.by} since {stamp(pin.at)}: {pin.reason}"
        return f"{said}; {words}" if words else said
    if found.excluded_until is None:
        return words
    return f"excluded until {stamp(found.excluded_until)}: {words}"


def _against(found: Record) -> str:
    if not found.strikes:
        return ""
    last, count = found.strikes[-1], len(found.strikes)
    many = f"{count} strike{'s' if count > 1 else ''}"
    return f"{many}, last {last.kind} in {last.job}: {last.cause}"


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def records(run_root: Path, now: float) -> Mapping[str, tuple[Record, ...]]:
    """Cluster to what is held against its hosts at `now`. Raises JobError."""
    files = sorted((run_root / FOLDER).glob("*.jsonl"))
    with said_to_a_person():
        return {path.stem: fold(recall(path), now) for path in files}


@contextlib.contextmanager
def said_to_a_person() -> Iterator[None]:
    """Of a file that cannot be read or written: what to do about it."""
    try:
        yield
    except OSError as exc:
        raise JobError(
            f"the strikes against hosts cannot be read or written: {exc}",
            fix="the owner of the file lets others of the run root read and append to it:"
            " `chmod g+rw,o+rw FILE`, as far as the run root itself is theirs",
        ) from exc


def still_counting(
    found: Mapping[str, tuple[Record, ...]], now: float
) -> Mapping[str, tuple[Record, ...]]:
    """Without strikes that have faded, and hosts that have nothing else."""
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


def hosts_text(found: Mapping[str, tuple[Record, ...]]) -> str:
    """A line for each host, its strikes with their evidence below it."""
    lines = []
    for cluster, held in found.items():
        for record in held:
            count = len(record.strikes)
            many = f"{count} strike{'' if count == 1 else 's'}"
            if count:
                many += f" with a weight of {record.score:.2f} by now"
            lines.append(f"{cluster}/{record.host}  {many}, {_standing(cluster, record)}")
            for strike in record.strikes:
                lines.append(
                    f"  {stamp(strike.at)}  {strike.kind} in {strike.job},"
                    f" attempt {strike.attempt}: {strike.cause}{_lighter(strike)}"
                )
                lines += [f"    {line}" for line in strike.evidence]
    return "\n".join(lines)


def _lighter(strike: Strike) -> str:
    return "" if strike.weight == 1 else f" (weight {strike.weight:.2f})"


def _standing(cluster: str, record: Record) -> str:
    pin = record.pin
    if cluster == LOCAL and (pin is not None or record.excluded_until is not None):
        return "may be used: the hosts of local jobs are only names"
    if pin is not None:
        said = f"by {pin.by} since {stamp(pin.at)}: {pin.reason}"
        return f"pinned: {pin.use} used until `ndctl hosts unpin {record.host}`, {said}"
    if record.excluded_until is None:
        return "may be used"
    return f"excluded until {stamp(record.excluded_until)}"


def _is_excluded(cluster: str, record: Record) -> bool:
    return record.is_excluded and cluster != LOCAL
