"""What an agent does for ranks that run the user's own program, in addition to what it does for the
bundled trainer: it takes output as a sign of life, reads metrics from the log, and injects drills.
"""

import asyncio
import logging
import math
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from orchestrator.agent.evidence.rank_evidence import send_signal
from orchestrator.contract.drills import Drill, Fault
from orchestrator.contract.files.env import EXIT_SIGNAL
from orchestrator.contract.messages.agent_protocol import Start
from orchestrator.contract.messages.events import DrillHappened, LogGrew
from orchestrator.contract.messages.rank_messages import Beat, Datagram
from orchestrator.contract.spec.run_spec import MetricPatterns
from orchestrator.diagnosis.logs.patterns import compiled
from orchestrator.posix.run_with_timeout import within

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the logs."""
READ_S = 5.0
"""Limit of one look: the logs may be on storage that hangs."""
LARGE_BYTES = 1 << 30
"""A log of this size is reported, and again each time it has doubled."""
MOST_BYTES = 1 << 20
"""A look reads at most this much of a log. A program may print faster than that."""
SIGNALS: Mapping[Fault, int] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "segv": signal.SIGSEGV,
    "exit": EXIT_SIGNAL,
}
SLOW_S = 0.25
"""A slow rank is stopped for so long, and then runs for so long."""


class Found(Struct, frozen=True):
    """What a look at the logs found."""

    grown: tuple[int, ...]
    """Ranks that have printed something since the last look."""
    step: int | None = None
    loss: float | None = None
    large: tuple[tuple[int, int, int], ...] = ()
    """Rank, bytes of its log, and how many of them are new: of logs to be reported."""


class LogWatch:
    """Follows the logs of the ranks of one attempt."""

    def __init__(self, logs: Path, patterns: MetricPatterns | None) -> None:
        self.logs = logs
        self.patterns = patterns
        self.sizes: dict[int, int] = {}
        self.report_at: dict[int, int] = {}
        """Rank -> bytes of its log at which it is reported next."""
        self.read = 0
        """Bytes of the log of rank 0 that were searched."""

    def look(self) -> Found:
        """Raises OSError."""
        grown, large = [], []
        for path in self.logs.glob("rank-*.log"):
            rank, size = int(path.stem.removeprefix("rank-")), path.stat().st_size
            if size > (before := self.sizes.get(rank, 0)):
                grown.append(rank)
            if size >= self.report_at.get(rank, LARGE_BYTES):
                large.append((rank, size, size - before))
                self.report_at[rank] = LARGE_BYTES << (size // LARGE_BYTES).bit_length()
            self.sizes[rank] = size
        step, loss = self._metrics() if self.patterns is not None and 0 in grown else (None, None)
        return Found(tuple(sorted(grown)), step, loss, tuple(large))

    def _metrics(self) -> tuple[int | None, float | None]:
        """The last step and loss in the new lines of rank 0."""
        with (self.logs / "rank-0.log").open("rb") as file:
            # Of more new text than one look reads, the end is read.
            self.read = max(self.read, self.sizes[0] - MOST_BYTES)
            file.seek(self.read)
            data = file.read(MOST_BYTES)
        whole = data[: data.rfind(b"\n") + 1]  # the last line may still be written
        self.read += len(whole)
        text = whole.decode(errors="replace")
        assert self.patterns is not None
        step, loss = _last(self.patterns.step, text), _last(self.patterns.loss, text)
        return (None if step is None else int(step)), loss


def _last(pattern: str | None, text: str) -> float | None:
    """The number in the last match of `pattern`; None if there is none."""
    if pattern is None:
        return None
    found = None
    for line in text.splitlines():
        if (match := compiled((pattern,)).search(line)) is not None:
            found = match
    if found is None:
        return None
    try:
        number = float(found[1].replace(",", "").replace("_", ""))
    except (ValueError, IndexError, AttributeError):  # the group is no number, or there is none
        return None
    return number if math.isfinite(number) else None


class Program:
    """Watches and disturbs the ranks of one attempt on one host."""

    def __init__(
        self,
        start: Start,
        logs: Path,
        hear: Callable[[Datagram], None],
        pids: Callable[[], Mapping[int, int]],
        active: Callable[[int], None],
    ) -> None:
        """
        Args:
            hear: called with messages in the name of a rank.
            pids: returns rank -> process id, of ranks that have not ended.
            active: called with each rank that has printed something.
        """
        assert start.run is not None
        self.start, self.hear, self.pids, self.active = start, hear, pids, active
        self.watch = LogWatch(logs, start.run.metrics)
        self.step = 0
        """The last step in the log of rank 0."""
        self.waiting = list(start.drills)
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        self._spawn(self._follow())

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                found = await within(READ_S, self.watch.look)
            except (OSError, TimeoutError) as exc:
                log.warning("failed to read the logs of the ranks: %s", exc)
                continue
            for rank in found.grown:
                self.active(rank)
            for rank, size, new in found.large:
                self._warn(rank, size, new)
            if found.step is not None or found.loss is not None:
                self._report(found)

    def _report(self, found: Found) -> None:
        """Report in the name of rank 0 what its log says."""
        self.step = self.step if found.step is None else found.step
        attempt = self.start.attempt
        self.hear(Beat(attempt=attempt, rank=0, step=self.step, phase="train", loss=found.loss))

    def _warn(self, rank: int, size: int, new: int) -> None:
        attempt = self.start.attempt
        self.hear(LogGrew(attempt=attempt, rank=rank, size=size, per_second=new / LOOK_S))

    def heard(self, beat: Beat) -> None:
        """Inject the drills that are due now that the rank of `beat` begins the next step."""
        due = [one for one in self.waiting if one.step <= beat.step + 1 and self._hits(one, beat)]
        for drill in due:
            self.waiting.remove(drill)
            log.warning("rank %d: drill %s", beat.rank, drill)
            self.hear(
                DrillHappened(
                    attempt=self.start.attempt, drill=drill.id, rank=beat.rank, step=drill.step
                )
            )
            # The agent kills itself in a drill on a host when it hears of it.
            if drill.target == "rank":
                self._inject(drill)

    def _hits(self, drill: Drill, beat: Beat) -> bool:
        if beat.phase == "init":
            return False
        if drill.target == "rank":
            return drill.index == beat.rank
        return drill.index == self.start.node_rank

    def _inject(self, drill: Drill) -> None:
        if drill.fault == "slow":
            self._spawn(self._slow_down(drill.index))
        else:
            self._signal(drill.index, SIGNALS[drill.fault])

    def _signal(self, rank: int, number: int) -> bool:
        """False: the rank has ended."""
        pid = self.pids().get(rank)
        if pid is not None:
            send_signal(pid, number)
        return pid is not None

    async def _slow_down(self, rank: int) -> None:
        """Stop the rank for half of the time, until it ends."""
        while self._signal(rank, signal.SIGSTOP):
            await asyncio.sleep(SLOW_S)
            self._signal(rank, signal.SIGCONT)
            await asyncio.sleep(SLOW_S)
