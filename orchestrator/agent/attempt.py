"""One attempt on one host: torchrun and its ranks, from the start until no process is left."""

import asyncio
import contextlib
import logging
import re
import shlex
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from ndctl.rank.phases import Phase
from orchestrator.agent.evidence.rank_evidence import (
    STACK_LINES,
    gather_stacks,
    how_ended,
    last_lines,
    nobody,
    parent_of,
    place_in_kernel,
    process_state,
    send_signal,
    waited_for_cpu,
)
from orchestrator.agent.evidence.rank_progress import Pace, still_in
from orchestrator.agent.processes.cgroups import Count, Counted, oom_kills, throttlings
from orchestrator.agent.processes.fork_server_client import Running, Standby
from orchestrator.agent.processes.kept_ranks import KeptRanks
from orchestrator.agent.processes.left_behind import SLURM_JOB, find_left, marks_of, named
from orchestrator.agent.processes.torchrun import HostPlace, environment, render
from orchestrator.agent.rank_socket import free_port, send
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.env import STACKS_IN_C
from orchestrator.contract.messages.agent_protocol import RankDigest, Start
from orchestrator.contract.messages.events import (
    Above,
    HostStopped,
    RankError,
    RankEvidence,
    RankExited,
)
from orchestrator.contract.messages.rank_messages import (
    Beat,
    Datagram,
    RankLeft,
    RankRaised,
    RankStarted,
    sender_of,
)
from orchestrator.contract.messages.rank_orders import (
    SAVE,
    STOP_IN_MEMORY,
    JoinAttempt,
    LeaveAttempt,
)
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.logs.readings import read_launcher
from orchestrator.diagnosis.stacks.python_stacks import shortened
from orchestrator.posix.locks import is_free
from orchestrator.posix.run_with_timeout import within
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

REAP_S = 2.0
"""After torchrun ended: how long the processes that its ranks left behind have after SIGTERM, if
the grace of the attempt's end is shorter."""
POLL_S = 0.05
WATCHERS_S = 0.2
"""Seconds between two looks for rank watchers that were killed. Torchrun ends only seconds after
one, and until then its peers would seem to hang."""
GONE = ("gone", "Z")
"""States of a process that has ended."""
TAIL_S = 2.0
"""Limit to read the last lines of a log. After it, an end is reported without them."""
FEW_RANKS = 512
"""Ranks of a job up to which stacks are sent complete; the traces always have them complete."""
FEW_LINES = 14
"""Lines of a shortened stack: the main thread's innermost frames, which differ between ranks."""


@dataclass(slots=True)
class RankRecord:
    pid: int
    watcher: int | None
    """Process id of its rank watcher, if the rank still ran when it was announced."""
    heard: float
    pace: Pace
    step: int = 0
    phase: Phase = "init"
    loss: float | None = None
    tokens_per_second: float | None = None
    error: RankError | None = None
    ended: RankExited | None = None
    """As its watcher reported it."""
    stopped: bool = False
    """It ended after this agent had begun to stop the attempt, or because the agent urged it."""
    left: bool = False
    """It has left the attempt, and its process waits for the next one."""
    urged: bool = False
    """It was sent STACKS_IN_C, which may crash it."""
    gone: bool = False
    """Its process was gone before this agent began to stop the attempt, even if the watcher's
    report came later."""


Ends = Mapping[int | None, tuple[Above, int]]
"""Local rank, or None for all of them -> which process above it was killed, and by which signal."""
KEEPER_KILLED = re.compile(rb"failed \(exitcode: -(\d+)\) local_rank: (\d+)")
"""torchrun's message when a process that it started (a rank watcher) was killed."""


def keepers_killed(log: Path) -> Ends:
    found = KEEPER_KILLED.findall(log.read_bytes())
    return {int(local): ("keeper", int(number)) for number, local in found}


def _crashed_by_us(record: RankRecord) -> bool:
    """It ended as STACKS_IN_C may end it, and so is not the cause of the hang."""
    ended = record.ended
    return record.urged and ended is not None and ended.signal in (signal.SIGSEGV, signal.SIGBUS)


class Attempt:
    """Owns the processes of the attempt. It returns what it observes and decides nothing."""

    def __init__(
        self,
        start: Start,
        place: HostPlace,
        clock: Clock,
        kills: Count = oom_kills,
        throttles: Count = throttlings,
    ) -> None:
        self.start = start
        self.place = place
        self.clock = clock
        self.begun = clock.monotonic()
        self.kills = Counted(kills, self.begun)
        self.throttled = Counted(throttles, self.begun)
        self.ranks: dict[int, RankRecord] = {}
        self.launching: asyncio.Task[Running] | None = None
        self.torchrun: Running | None = None
        """None until the fork server has started it, or if the attempt was stopped before that."""
        self.stopping = False
        self.killed = False
        """This agent killed torchrun itself."""
        self.kept: KeptRanks | None = None
        """Given if the ranks may outlive this attempt."""
        self.all_left = asyncio.Event()
        """Every rank of this host has left the attempt."""
        self.kill_at = float("-inf")
        """When processes that outlive the ranks are killed (monotonic)."""
        self.slurm_job: str | None = None
        """The Slurm job of this agent."""
        self.outlasted: tuple[int, ...] = ()
        """Ranks that still ran when the grace of a stop ended, so that they were killed."""
        self.log_dir = place.run_dir.attempt_logs(start.attempt, place.host)

    async def launch(self, standby: Standby, environ: Mapping[str, str]) -> None:
        """Start torchrun, unless the attempt is stopped first. Raises OSError if that fails."""
        self.slurm_job = environ.get(SLURM_JOB)
        self._make_folders()
        port = free_port(self.place.address) if self.start.keep_ranks else None
        command = render(self.start, self.place, port)
        known = environment(self.start, self.place, environ)
        number, to = self.start.attempt, self.log_dir / "torchrun.log"
        title = f"torchrun of attempt {number} of {self.place.run_dir.path}"
        # The order to stop came before this coroutine first ran.
        if self.stopping:
            return
        running = standby.run(command, known, title=title, log=to)
        self.launching = asyncio.create_task(running)
        # `wait` does not raise if `kill` cancels the task.
        await asyncio.wait([self.launching])
        if self.launching.cancelled():  # by `kill`
            return
        self.torchrun = self.launching.result()
        if self.start.keep_ranks:
            self.kept = KeptRanks(self.torchrun, self.start, self.place.socket)
        pid = self.torchrun.pid
        log.info("attempt %s: torchrun is process %s: %s", number, pid, shlex.join(command))
        if self.stopping:  # the order to stop came while torchrun was being started
            self.kill()

    def _make_folders(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.place.run_dir.traces(self.start.attempt).mkdir(parents=True, exist_ok=True)

    def join(self, kept: KeptRanks, environ: Mapping[str, str]) -> None:
        """Order the ranks that left the last attempt to join this one. Raises OSError."""
        self.slurm_job = environ.get(SLURM_JOB)
        self._make_folders()
        self.torchrun, self.kept = kept.torchrun, kept
        first = self.start.node_rank * self.start.ranks_per_host
        known = environment(self.start, self.place, environ)
        for local in range(self.start.ranks_per_host):
            log_file = str(self.log_dir / f"rank-{first + local}.log")
            kept.order(local, JoinAttempt(environ=known, config=self.start.config, log=log_file))
        number, pid = self.start.attempt, kept.torchrun.pid
        log.info("attempt %s: the ranks of torchrun, process %s, join it", number, pid)

    def hear(self, datagram: Datagram) -> RankExited | None:
        """Record a message of a rank. Returns the report to send if the rank failed."""
        now = self.clock.monotonic()
        if isinstance(datagram, RankStarted):
            self.ranks[datagram.rank] = RankRecord(
                pid=datagram.pid,
                watcher=parent_of(datagram.pid),
                heard=now,
                pace=Pace(now, waited_for_cpu(datagram.pid)),
            )
            if self.stopping:  # the other ranks got SIGTERM before this one had started
                send_signal(datagram.pid, signal.SIGTERM)
            return None
        record = self.ranks.get(sender_of(datagram))
        if record is None:  # the datagram that announced the rank was lost
            return None
        record.heard = now
        match datagram:
            case Beat():
                self._beat(record, datagram, now)
            # The rank has not ended yet. `exited` adds the error to the report of its end.
            case RankRaised(error=error):
                record.error = error
            case RankExited():
                return self._ended(record, datagram)
            case RankLeft():
                return self._left(record, datagram)
            case _:
                pass
        return None

    def _ended(self, record: RankRecord, datagram: RankExited) -> RankExited | None:
        # From `_report_lost`: the watcher had reported the end before it ended itself.
        if record.ended is not None and (datagram.exit_code, datagram.signal) == (None, None):
            return None
        if self._died_with_torchrun(datagram):
            return None  # `wait` reports it with its cause, torchrun
        record.ended = datagram
        record.stopped = (self.stopping and not record.gone) or _crashed_by_us(record)
        # The watcher reads the step from shared memory; the rank's last beat may be lost.
        record.step = max(record.step, datagram.step)
        return None if self.is_done(record) else self.exited(datagram)

    def _left(self, record: RankRecord, datagram: RankLeft) -> RankExited:
        """To the leader it is an exit like that of a rank whose process has ended."""
        record.ended = RankExited(
            attempt=datagram.attempt,
            rank=datagram.rank,
            exit_code=exit_codes.FAILED,
            signal=None,
            step=datagram.step,
        )
        record.left, record.stopped = True, self.stopping
        record.step = max(record.step, datagram.step)
        if sum(one.left for one in self.ranks.values()) == self.start.ranks_per_host:
            self.all_left.set()
        return self.exited(record.ended)

    def is_done(self, record: RankRecord) -> bool:
        """The rank returned 0 after the last step. A training loop that ends early also returns 0,
        and that is a failure."""
        ended = record.ended
        return ended is not None and ended.exit_code == 0 and record.step >= self.start.steps

    def has_trained(self, rank: int) -> bool:
        record = self.ranks.get(rank)
        return record is not None and record.loss is not None

    def failures(self) -> list[RankExited]:
        """The ranks that ended without being done. Those that this agent stopped come last."""
        records = [one for one in self.ranks.values() if not self.is_done(one)]
        failed = [self.exited(one.ended) for one in records if one.ended is not None]
        return sorted(failed, key=lambda exited: not exited.stopped)

    def _beat(self, record: RankRecord, beat: Beat, now: float) -> None:
        record.pace.beat(record.step, record.phase, beat, now)
        record.step, record.phase = beat.step, beat.phase
        if beat.loss is not None:
            record.loss, record.tokens_per_second = beat.loss, beat.tokens_per_second

    def active(self, rank: int) -> None:
        """Record that the rank does something: it has printed a line."""
        if (record := self.ranks.get(rank)) is not None:
            record.heard = self.clock.monotonic()
            record.pace.active(record.heard)

    def exited(self, ended: RankExited) -> RankExited:
        """`ended` with all that this agent knows of the rank. It overwrites the sender's values.

        `with_last_lines` adds the last lines of the log later, because reading them may block.
        """
        record = self.ranks[ended.rank]
        return replace(
            ended,
            host=self.place.host,
            step=record.step,
            stopped=record.stopped if record.ended else self.stopping and not record.gone,
            detected_after_s=max(0.0, self.clock.monotonic() - record.heard),
            error=record.error,
            log_tail=(),
            phase=record.phase,
            reading=None,
        )

    def excuse(self, seconds: float) -> None:
        """Do not count `seconds` as a standstill: this agent did not run, so perhaps neither did
        its ranks, or their messages could not be read."""
        for record in self.ranks.values():
            record.pace.excuse(seconds)

    def still_in(self, limit_s: float) -> float:
        """Seconds until all ranks that run here have made no progress for `limit_s`; infinite if
        the last digest already reported that."""
        running = [record.pace for record in self.ranks.values() if record.ended is None]
        return still_in(running, limit_s, self.clock.monotonic())

    def digest(self) -> tuple[RankDigest, ...]:
        """The present state of each rank, with the steps since the last call."""
        now = self.clock.monotonic()
        self.kills.look(now)
        self.throttled.look(now)
        return tuple(
            RankDigest(
                rank=rank,
                pid=record.pid,
                step=record.step,
                phase=record.phase,
                age_s=now - record.heard,
                still_s=record.pace.still(now, waited_for_cpu(record.pid)),
                loss=record.loss,
                tokens_per_second=record.tokens_per_second,
                ended=record.ended is not None,
                steps=record.pace.take(),
            )
            for rank, record in sorted(self.ranks.items())
        )

    def last_common_progress(self) -> float:
        """Until when all ranks here made progress (monotonic)."""
        return min((record.pace.changed for record in self.ranks.values()), default=self.begun)

    def running(self) -> dict[int, int]:
        """Rank -> process id, of those that have not ended."""
        return {rank: r.pid for rank, r in sorted(self.ranks.items()) if r.ended is None}

    def ended(self) -> dict[int, str]:
        """Rank -> how it ended, of those that have."""
        ends = {rank: r.ended for rank, r in sorted(self.ranks.items()) if r.ended is not None}
        return {rank: how_ended(end.exit_code, end.signal) for rank, end in ends.items()}

    async def gather(
        self, timeout_s: float, missing: dict[int, str], *, hang: bool
    ) -> tuple[RankEvidence, ...]:
        """Process states and stacks of the ranks that still run.

        Args:
            missing: gets the reason for each rank without a stack, where it is known.
            hang: a rank without a free GIL may be asked in a way that can crash it.
        """
        alive = [(rank, r) for rank, r in sorted(self.ranks.items()) if r.ended is None]
        states = {rank: process_state(record.pid) for rank, record in alive}
        in_kernel = [(rank, record.pid) for rank, record in alive if states[rank] == "D"]
        places = {rank: place_in_kernel(pid) for rank, pid in in_kernel}
        traces = self.place.run_dir.traces(self.start.attempt)
        urge = self._urge if hang else nobody
        asked = [(rank, record.pid) for rank, record in alive]
        stacks = await gather_stacks(asked, traces, timeout_s, missing, urge)
        for _, record in alive:
            # It has survived. What ends it later has another cause.
            record.urged &= process_state(record.pid) in GONE
        now = self.clock.monotonic()
        many = self.start.nodes * self.start.ranks_per_host > FEW_RANKS
        lines = FEW_LINES if many else STACK_LINES
        return tuple(
            RankEvidence(
                rank=rank,
                pid=record.pid,
                process_state=states[rank],
                step=record.step,
                phase=record.phase,
                age_s=now - record.heard,
                stack=shortened(stacks.get(rank, ()), lines),
                place=places.get(rank, ""),
                still_s=now - record.pace.changed,
                starved_s=record.pace.starved,
                throttled=self.throttled.grew(record.pace.changed, now),
            )
            for rank, record in alive
        )

    def _urge(self, ranks: Iterable[int]) -> None:
        for record in (self.ranks[rank] for rank in ranks):
            if record.ended is None:
                record.urged = True
                send_signal(record.pid, STACKS_IN_C)

    def save(self) -> None:
        """Have the ranks save a checkpoint after the present step."""
        if not self.stopping:
            self._signal(SAVE)

    async def stop(
        self, grace_s: float, *, keep_ranks: bool = False, in_memory: bool = False
    ) -> None:
        """Send SIGTERM to every rank, and SIGKILL to what is left after the grace.

        Args:
            keep_ranks: order the ranks to leave instead. If one of them does not, all are killed.
            in_memory: send `STOP_IN_MEMORY` instead.
        """
        # Before `stopping` is set, because from then on each exit counts as an effect of the stop.
        self._note_gone_ranks()
        self.stopping = True
        deadline = self.kill_at = self.clock.monotonic() + grace_s
        if keep_ranks and self.kept is not None:
            self._order_to_leave(self.kept)
        else:
            self._signal(STOP_IN_MEMORY if in_memory else signal.SIGTERM)
        if self.torchrun is None and self.launching is None:
            return  # torchrun was never started
        while self._ends_by_itself() and self.clock.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        if self.all_left.is_set():
            return
        if grace_s > 0:
            left = [n for n, pid in self.running().items() if process_state(pid) not in GONE]
            self.outlasted = tuple(left)
        self.kill()

    def _order_to_leave(self, kept: KeptRanks) -> None:
        first = self.start.node_rank * self.start.ranks_per_host
        for rank, pid in self.running().items():
            try:
                kept.order(rank - first, LeaveAttempt(attempt=self.start.attempt))
            except OSError as exc:  # it has not begun to listen
                log.warning("ending rank %d: failed to order it to leave: %s", rank, exc)
                send_signal(pid, signal.SIGTERM)

    def _ends_by_itself(self) -> bool:
        """Whether waiting is useful: for ranks that save a checkpoint, or for the imports of the
        fork server."""
        if self.torchrun is None:
            # Killing the fork server now would waste its imports, which the next attempt needs.
            return self.launching is not None and not self.launching.done()
        return bool(self.ranks) and self.torchrun.ended is None and not self._all_ended()

    def _note_gone_ranks(self) -> None:
        """Mark ranks that ended by themselves before the stop. Their watchers' reports may still be
        on the way, and must not be taken for the effect of the stop."""
        if not self.stopping:
            for record in self.ranks.values():
                record.gone = process_state(record.pid) in GONE

    def _all_ended(self) -> bool:
        """Every rank that should start here has ended."""
        ended = [record for record in self.ranks.values() if record.ended is not None]
        return len(ended) == self.start.ranks_per_host

    def kill(self) -> None:
        """Kill torchrun. The kernel then kills all processes that it started."""
        self.stopping = True
        self._signal(signal.SIGKILL)
        if self.launching is not None:
            self.launching.cancel()
        if self.torchrun is not None:
            # If torchrun has ended already, something else ended it, and `_above` tells what.
            self.killed = self.killed or self.torchrun.ended is None
            self.torchrun.kill()

    def _signal(self, number: int) -> None:
        for record in self.ranks.values():
            if record.ended is None and process_state(record.pid) not in GONE:
                send_signal(record.pid, number)

    async def wait(self) -> tuple[list[RankExited], HostStopped]:
        """Wait until no process is left. Returns the exits that were not reported yet, and the end
        of the attempt on this host."""
        code = None if self.torchrun is None else await self._ended_or_left(self.torchrun)
        if self.all_left.is_set():
            number, host = self.start.attempt, self.place.host
            return [], HostStopped(attempt=number, host=host, finished=False, kept=True)
        if self._is_finished() and not self.stopping:
            # Nothing waits for this host, and what is left may still write or upload results.
            self.kill_at = self.clock.monotonic() + self.start.stop_grace
        # torchrun may be killed before its ranks have ended, and a rank may leave processes behind.
        # The next attempt needs their GPUs.
        await self._until_gone()
        silent = [rank for rank, record in sorted(self.ranks.items()) if record.ended is None]
        # A rank without a report lost its watcher as well, so something above them was killed.
        above = await self._above() if silent else {}
        unseen = [self._unseen(rank, above) for rank in silent]
        finished = self._is_finished()
        why = ""
        if not (finished or self.stopping):  # torchrun's output about a stop explains nothing
            output = await self._torchrun_output()
            why = f"torchrun ended with code {code}\n{output}"
        stopped = HostStopped(
            attempt=self.start.attempt,
            host=self.place.host,
            finished=finished,
            why=why,
            killed=self.outlasted,
        )
        unreported = [self.exited(end) for end in (*unseen, *self._ended_first(finished=finished))]
        return unreported, await with_reading(stopped, self.start.classes)

    def _is_finished(self) -> bool:
        """torchrun's own exit code does not count: it may fail after its ranks are done."""
        done = [record for record in self.ranks.values() if self.is_done(record)]
        return len(done) == self.start.ranks_per_host

    async def _ended_or_left(self, torchrun: Running) -> int | None:
        """Wait until torchrun has ended, or all its ranks have left the attempt. Returns its exit
        code."""
        waits = {asyncio.create_task(torchrun.wait()), asyncio.create_task(self.all_left.wait())}
        watching = asyncio.create_task(self._watch_watchers(torchrun))
        _, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for other in (*others, watching):
            other.cancel()
        return None if torchrun.ended is None else torchrun.ended.code

    async def _watch_watchers(self, torchrun: Running) -> None:
        """Notice rank watchers that were killed, and their ranks with them."""
        while True:
            await asyncio.sleep(WATCHERS_S)
            if self.stopping:
                continue  # torchrun kills watchers, and `wait` reports what was not reported
            gone = [
                rank
                for rank, record in self.ranks.items()
                if record.ended is None
                and record.watcher is not None
                and process_state(record.watcher) in GONE
            ]
            # Asked last: watchers end after their torchrun, so it did not end them if it lives.
            if gone and process_state(torchrun.pid) not in GONE:
                self._report_lost(gone)

    def _report_lost(self, ranks: Iterable[int]) -> None:
        """Send the ends of the ranks in place of their watchers. They go through the socket, so
        that a report which a watcher sent before its end is read first."""
        for rank in ranks:
            lost = RankExited(attempt=self.start.attempt, rank=rank, exit_code=None, signal=None)
            # If the socket is full, the next look tries again.
            with contextlib.suppress(OSError):
                send(self.place.socket, lost)

    def _ended_first(self, *, finished: bool) -> list[RankExited]:
        """The ranks of a user's program that returned 0 here before others failed."""
        if finished or self.start.steps:
            return []
        done = [one for one in self.ranks.values() if self.is_done(one) and not one.stopped]
        return [replace(one.ended, ended_first=True) for one in done if one.ended is not None]

    def _unseen(self, rank: int, above: Ends) -> RankExited:
        """The exit of a rank whose watcher died before it could report how the rank ended.

        Args:
            above: the processes above the ranks that were killed.
        """
        first = self.start.node_rank * self.start.ranks_per_host
        name, number = above.get(rank - first) or above.get(None) or (None, None)
        return RankExited(
            attempt=self.start.attempt,
            rank=rank,
            exit_code=None,
            signal=number,
            step=self.ranks[rank].step,
            above=name,
        )

    async def _above(self) -> Ends:
        """The processes above the ranks that something other than this agent killed.

        The kernel kills a rank together with the process above it, so these explain its end.
        """
        # From top to bottom: fork server, torchrun, rank watcher. The highest one that was killed
        # is the cause.
        if killed := self._above_all():
            return {None: killed}
        if self.torchrun is None or self.torchrun.ended is None:
            return {}
        try:
            return await within(TAIL_S, keepers_killed, self.log_dir / "torchrun.log")
        # The log explains the end only in part, so a slow file server must not delay the report.
        except (TimeoutError, OSError):
            return {}

    def _above_all(self) -> tuple[Above, int] | None:
        """What is above all ranks of this host, if something other than this agent killed it."""
        torchrun = self.torchrun
        if torchrun is None or torchrun.ended is None or self.killed:
            return None
        if torchrun.launcher_signal is not None:
            return "launcher", torchrun.launcher_signal
        return ("torchrun", -torchrun.ended.code) if torchrun.ended.code < 0 else None

    def _died_with_torchrun(self, ended: RankExited) -> bool:
        """Whether the rank ended because torchrun was killed. A watcher that lives a moment longer
        reports the SIGTERM that this agent then sends to all that is left."""
        stopped = ended.signal in (signal.SIGTERM, signal.SIGKILL)
        stopped |= ended.exit_code == exit_codes.CHECKPOINTED
        return stopped and self._above_all() is not None

    async def _torchrun_output(self) -> str:
        path = self.log_dir / "torchrun.log"
        try:
            return "\n".join(await within(TAIL_S, last_lines, path))
        # The run directory may be on storage that has failed. The leader still needs to hear of the
        # end.
        except TimeoutError:
            return f"reading {path} timed out after {TAIL_S:.1f} s"

    async def _until_gone(self) -> None:
        """Wait until no process of this host's ranks is left. Those that outlive the ranks get
        SIGTERM, and SIGKILL when their time is over."""
        torchrun = None if self.torchrun is None else self.torchrun.pid
        marks = marks_of(self.place.run_dir, self.place.host, torchrun, self.slurm_job)
        waited, patience, asked = 0.0, REAP_S, set[int]()
        while True:
            # In a thread, because the lock file may be on slow storage and the agent must keep
            # sending.
            held = not await within(None, is_free, self.place.lock)
            is_over = waited > patience and self.clock.monotonic() >= self.kill_at
            left = await find_left(marks, held=held and is_over)
            if not (held or left or self._reports_due(waited)):
                return
            new = {pid: name for pid, name in left.items() if pid not in asked}
            if new:
                log.info("attempt %s: ending what is left: %s", self.start.attempt, named(new))
                asked |= new.keys()
            for pid in left if is_over else new:
                send_signal(pid, signal.SIGKILL if is_over else signal.SIGTERM)
            # Reading all open files takes long, so it is not done each time.
            patience += REAP_S if is_over else 0.0
            await asyncio.sleep(POLL_S)
            waited += POLL_S

    def _reports_due(self, waited: float) -> bool:
        """The watchers have ended, but their last datagrams may still be on the way."""
        return waited < 2 * POLL_S and any(r.ended is None for r in self.ranks.values())


async def with_reading(stopped: HostStopped, own: tuple[FailureRule, ...]) -> HostStopped:
    """`stopped` with the failure class of torchrun's output, found in a thread."""
    if not stopped.why:
        return stopped
    return replace(stopped, reading=await within(None, read_launcher, stopped.why, own))
