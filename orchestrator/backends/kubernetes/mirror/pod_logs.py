"""Writes the output of pods to the log files of a run directory: each line once and in order, also
when a stream breaks.

A line is identified by its timestamp and by its number among lines with the same timestamp. The
first line that a process writes to a file replaces the content from earlier processes.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from orchestrator.backends.kubernetes.observe import object_fields
from orchestrator.backends.kubernetes.resources import Object, name_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.errors import BackendError

JOURNAL_MARK = "ndctl-journal: "
METRICS_MARK = "ndctl-metrics: "
"""Prefixes of journal and metrics lines that a leader's pod prints at its end; they are not
logs."""
RANKS_LINE = re.compile(
    r"\[(?P<host>\S+) attempt (?P<attempt>\d+) (?P<what>rank (?P<rank>\d+)|\w+)\] (?P<text>.*)"
)
STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)")
STREAMS = 64
"""Pods that are followed by a stream each. The others are polled in turns."""
ABREAST = 16
IN_TURN = 4 * ABREAST
QUIET_S = 60.0
"""A stream without output for this long is restarted, because its connection may be dead."""


class Source(Protocol):
    """The part of the API that logs need."""

    def log(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        since: str | None = None,
        quiet_s: float = QUIET_S,
    ) -> Iterator[bytes]: ...


@dataclass(slots=True)
class Reading:
    """How much of the log of one pod was read."""

    stamp: bytes = b""
    """Timestamp of the last line."""
    same: int = 0
    """Lines read with this timestamp."""
    known: int = -1
    """How many of them the current request will repeat; negative: all further lines are new."""
    complete: bool = False
    """The pod has ended, and its log was read completely."""
    turn: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> str:
        """The `since` of the next request, in whole seconds; so it repeats some lines."""
        found = STAMP.fullmatch(self.stamp)
        self.known = self.same if self.stamp else -1
        return "" if found is None else (found[1] + found[2]).decode()

    def take(self, line: bytes) -> bytes | None:
        """The text of a timestamped line; None if it was already read."""
        stamp, _, text = line.partition(b" ")
        if self.known >= 0:
            if stamp < self.stamp:
                return None
            if stamp == self.stamp and self.known > 0:
                self.known -= 1
                return None
            self.known = -1
        self.same = self.same + 1 if stamp == self.stamp else 1
        self.stamp = stamp
        return text


class PodLogs:
    def __init__(self, run_dir: RunDir, source: Source, namespace: str, container: str) -> None:
        self.run_dir = run_dir
        self.source = source
        self.namespace = namespace
        self.container = container
        self.readings: dict[str, Reading] = {}
        self.streams: dict[str, threading.Thread] = {}
        self.written: set[Path] = set()
        self.writing = threading.Lock()
        self.waiting: list[str] = []
        """Uids of polled pods, the least recently polled first."""

    def fetch(self, pods: Sequence[Object]) -> list[tuple[Object, BackendError]]:
        """Read everything new; returns the pods whose logs could not be read to the end, and
        why."""
        with ThreadPoolExecutor(ABREAST) as pool:
            read = zip(pods, pool.map(self.read, pods), strict=True)
            return [(pod, why) for pod, why in read if why is not None]

    def follow(self, pods: Sequence[Object]) -> None:
        """Follow the pods by streams, and poll the rest. Call it again regularly."""
        by_uid = {uid_of(pod): pod for pod in pods if not self.reading(pod).complete}
        self.streams = {uid: one for uid, one in self.streams.items() if one.is_alive()}
        for uid, pod in by_uid.items():
            if (
                uid in self.streams
                or len(self.streams) >= STREAMS
                or not object_fields.is_running(pod)
            ):
                continue
            thread = threading.Thread(target=self.stream, args=(pod,), name=uid, daemon=True)
            self.streams[uid] = thread
            thread.start()
        rest = [uid for uid in by_uid if uid not in self.streams]
        waiting = [uid for uid in self.waiting if uid in rest]
        waiting += [uid for uid in rest if uid not in waiting]
        self.fetch([by_uid[uid] for uid in waiting[:IN_TURN]])
        self.waiting = waiting[IN_TURN:] + waiting[:IN_TURN]

    def reading(self, pod: Object) -> Reading:
        return self.readings.setdefault(uid_of(pod), Reading())

    def read(self, pod: Object) -> BackendError | None:
        """Read the current log; returns the error if it could not be read to the end."""
        reading = self.reading(pod)
        if not reading.turn.acquire(blocking=False):
            return None  # it is being followed
        try:
            return self._take(pod, reading)
        finally:
            reading.turn.release()

    def _take(self, pod: Object, reading: Reading) -> BackendError | None:
        texts: list[bytes] = []
        why = self._lines(pod, reading, texts.append, follow=False)
        self.write(pod, texts)
        reading.complete = why is None and not object_fields.alive([pod])
        return why

    def stream(self, pod: Object) -> None:
        """Read the current log, then each new line until the stream ends."""
        reading = self.reading(pod)
        with reading.turn:
            self._take(pod, reading)
            self._lines(pod, reading, lambda text: self.write(pod, [text]), follow=True)

    def _lines(
        self, pod: Object, reading: Reading, take: Callable[[bytes], None], *, follow: bool
    ) -> BackendError | None:
        """Pass each new line to `take`; returns the error that ended the log early."""
        try:
            for line in self.source.log(
                self.namespace,
                name_of(pod),
                self.container,
                follow=follow,
                since=reading.begin(),
                quiet_s=QUIET_S,
            ):
                text = reading.take(line)
                if text is not None:
                    take(text)
        except BackendError as exc:
            return exc
        return None

    def write(self, pod: Object, lines: Sequence[bytes]) -> None:
        """Write each line to the log of its rank, and the agent's own lines to the agent's log."""
        texts: dict[Path, list[str]] = {}
        own = self.run_dir.agent_log(object_fields.node_of(pod) or name_of(pod))
        for line in lines:
            path, text = place_of(self.run_dir, own, line.decode(errors="replace"))
            if not text.startswith((JOURNAL_MARK, METRICS_MARK)):
                texts.setdefault(path, []).append(text)
        with self.writing:
            for path, said in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a" if path in self.written else "w", encoding="utf-8") as file:
                    file.write("\n".join(said) + "\n")
                self.written.add(path)


def uid_of(pod: Object) -> str:
    return str(pod["metadata"]["uid"])


def place_of(run_dir: RunDir, own: Path, text: str) -> tuple[Path, str]:
    """The file of a line, and the line without its prefix."""
    match = RANKS_LINE.fullmatch(text)
    if match is None:
        return own, text
    stem = f"rank-{match['rank']}" if match["rank"] else match["what"]
    folder = run_dir.attempt_logs(int(match["attempt"]), match["host"])
    return folder / f"{stem}.log", match["text"]
