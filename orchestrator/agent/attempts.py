"""The attempts of one host, one after the other: starts and stops them as the leader orders, and
reports what their ranks and the host say."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from orchestrator.agent.host_processes import HostAttempt, Processes
from orchestrator.contract.messages.agent_protocol import (
    Digest,
    Evidence,
    Gather,
    Prepare,
    ProfileRanks,
    Report,
    Save,
    Start,
    Stop,
)
from orchestrator.contract.messages.events import (
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    DrillHappened,
    EvidenceGathered,
    HostStopped,
    HostWarned,
    LogGrew,
    MemoryCheckpointsSet,
    RankExited,
    TrainingResumed,
)
from orchestrator.contract.messages.rank_messages import Beat, Datagram, Profiled, sender_of
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

LOOK_BACK_S = 3.0
"""Limit to check this host when one of its ranks has ended; meanwhile the other ranks stop."""
HOST_DRILL_S = 0.5
"""From the report of a host drill to the death of the agent, so that the journal has the report."""

REQUESTS_KEPT = 16

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Attempts:
    def __init__(
        self,
        host: str,
        processes: Processes,
        clock: Clock,
        report: Callable[[Report], None],
        hurry: Callable[[], None],
        spawn: Spawn,
    ) -> None:
        self.host, self.processes, self.clock = host, processes, clock
        self.report, self.spawn = report, spawn
        self.hurry = hurry
        """Has the next digest sent now."""
        self.attempt: HostAttempt | None = None
        self.last: HostAttempt | None = None
        """The previous attempt. It has no process left, or its ranks have left it."""
        self.running: asyncio.Task[None] | None = None
        self.looking: asyncio.Task[None] | None = None
        """Checks this host, because a rank of the attempt has ended."""
        self.told: list[asyncio.Task[None]] = []
        """Each of them reports one failed rank of the attempt."""
        self.ended: HostStopped | None = None
        """How the last attempt ended here."""
        self.requests: deque[str] = deque(maxlen=REQUESTS_KEPT)
        """Ids of the profiles that were asked for."""
        self.alone_since: float | None = None
        """When the leader was last heard (monotonic), if its silence stopped the attempt."""

    @property
    def number(self) -> int:
        """Number of the attempt that has ranks here; 0 if there is none."""
        return 0 if self.attempt is None else self.attempt.start.attempt

    def digest(self) -> Digest:
        ranks = () if self.attempt is None else self.attempt.digest()
        memory = self.processes.memory_use()
        return Digest(attempt=self.number, ranks=ranks, memory=memory)

    async def ends(self) -> list[Report]:
        """Reports of ends that the leader may have missed, to repeat after a reconnection."""
        if (attempt := self.attempt) is None:
            return [] if self.ended is None else [self._as_of_now(self.ended)]
        return list(await asyncio.gather(*(attempt.read(one) for one in attempt.failures())))

    # What the leader orders

    async def start(self, order: Start) -> None:
        # The leader gave the old attempt up without this agent, for example while it was
        # unreachable. Two attempts on one host would compete for its GPUs.
        if self.attempt is not None and self.attempt.start.attempt < order.attempt:
            log.warning("attempt %s still runs: killing it", self.attempt.start.attempt)
            await self.end(0.0)
        if self.attempt is not None or (self.ended and self.ended.attempt >= order.attempt):
            return  # the order was repeated after a reconnection, or came after its Stop
        self.attempt, self.alone_since = self.processes.attempt(order), None
        self.looking, self.told = None, []
        self.running = self.spawn(self._run(self.attempt))

    async def prepare(self, order: Prepare) -> None:
        """Start ranks that wait. A failure only costs the time that they would have saved."""
        if self.attempt is None:
            try:
                await self.processes.prepare(order)
            except OSError as exc:
                log.warning("failed to start ranks ahead of time: %s", exc)

    async def stop(self, order: Stop) -> None:
        if self.attempt is not None and self.attempt.start.attempt == order.attempt:
            await self.end(order.grace_s, keep_ranks=order.keep_ranks, in_memory=order.in_memory)
        # The order was repeated after a reconnection, so the leader may have missed the end.
        elif self.ended is not None and self.ended.attempt == order.attempt:
            self.report(self._as_of_now(self.ended))
        else:
            # The attempt never started here. Remember its end, so that a late Start is ignored.
            stopped = HostStopped(attempt=order.attempt, host=self.host, finished=False)
            self._remember(stopped)
            self.report(stopped)

    def save(self, order: Save) -> None:
        if self.attempt is not None and self.attempt.start.attempt == order.attempt:
            self.attempt.save()

    async def end(
        self,
        grace_s: float,
        alone_since: float | None = None,
        *,
        keep_ranks: bool = False,
        in_memory: bool = False,
    ) -> None:
        """Stop all ranks: SIGTERM, and `grace_s` later SIGKILL. Returns when none is left, or with
        `keep_ranks` when all have left the attempt. `in_memory` is that of `StopAttempt`.

        Args:
            alone_since: when the leader was last heard (monotonic), if its silence is the reason.
        """
        if self.attempt is None or self.running is None:
            return
        if not self.attempt.stopping:  # else it stops for another reason already
            self.alone_since = alone_since
        await self.attempt.stop(grace_s, keep_ranks=keep_ranks, in_memory=in_memory)
        await self.running

    async def gather(self, order: Gather) -> None:
        # No rank is left to give its stack. Only what the ranks wrote before is left.
        if order.ended:
            await self._gather_last(order)
            return
        attempt = self.attempt
        if attempt is not None and attempt.start.attempt == order.attempt:
            found = await attempt.find_evidence(order.timeout_s, hang=not order.for_a_person)
            if order.for_a_person:
                await attempt.keep(found)  # first: the answer names the files
                self.report(replace(found.evidence, for_a_person=True))
                return
            # The digest goes first, because the leader stops the ranks when it has the evidence of
            # all hosts. If a rank has made progress meanwhile, there is no hang.
            self.report(Digest(attempt=order.attempt, ranks=attempt.digest()))
            self.report(found.evidence)
            await attempt.keep(found)
            return
        self._nothing(order, "no attempt runs here")

    def profile(self, order: ProfileRanks) -> None:
        """Ask ranks of this host for a profile. Their answers come as datagrams."""
        attempt = self.attempt
        if attempt is None or attempt.start.attempt != order.attempt or attempt.start.run:
            return  # the leader sees that the attempt ended, and asks no program of a user
        # The order is repeated after a reconnection.
        if order.request in self.requests:
            return
        self.requests.append(order.request)
        first = attempt.start.node_rank * attempt.start.ranks_per_host
        for rank in sorted(
            set(order.ranks) & {*range(first, first + attempt.start.ranks_per_host)}
        ):
            try:
                attempt.ask_for_profile(rank, order.request, order.steps)
            except OSError as exc:
                why = f"its agent failed to ask it: {exc}"
                request, number = order.request, order.attempt
                self.report(Profiled(attempt=number, rank=rank, request=request, why=why))

    async def _gather_last(self, order: Gather) -> None:
        last = self.last
        if last is not None and last.start.attempt == order.attempt:
            self.report(await last.last_evidence(order.timeout_s))
        else:
            self._nothing(order, "this agent did not see the attempt")

    def _nothing(self, order: Gather, why: str) -> None:
        host, missing = self.host, {"ranks": why}
        event = EvidenceGathered(attempt=order.attempt, host=host, ranks=(), missing=missing)
        self.report(Evidence(event=event, for_a_person=order.for_a_person))

    # What the ranks do

    async def _run(self, attempt: HostAttempt) -> None:
        try:
            await attempt.begin()
            unseen, stopped = await attempt.wait()
        # Without the report of an end the leader would wait for the ranks until `init_timeout`.
        except OSError as exc:
            unseen = []
            stopped = HostStopped(
                attempt=attempt.start.attempt,
                host=self.host,
                finished=False,
                why=f"failed to start torchrun: {exc}",
            )
            stopped = await attempt.read_launcher(stopped)
        for exited in unseen:
            self.failed(exited, attempt)
        # The end of the attempt is the last report: with it the leader concludes the attempt.
        await asyncio.gather(*self.told)
        if self.looking is not None:
            await self.looking
        self._remember(stopped)
        self.attempt, self.last = None, attempt
        left = "ranks wait for the next attempt" if stopped.kept else "no process left"
        log.info("attempt %s: %s: %s", stopped.attempt, left, how_it_went(stopped))
        self.report(stopped)

    def _as_of_now(self, stopped: HostStopped) -> HostStopped:
        """`stopped` with the present age of the leader's last message, if its silence is the
        reason for the stop."""
        if self.alone_since is None or stopped.finished:
            return stopped
        return replace(stopped, alone_s=max(0.1, self.clock.monotonic() - self.alone_since))

    def _remember(self, stopped: HostStopped) -> None:
        # A late order to stop an old attempt must not replace the end of a newer one.
        if self.ended is None or self.ended.attempt < stopped.attempt:
            self.ended = stopped

    def hear(self, datagram: Datagram) -> None:
        """Handle a message of a rank of this host."""
        attempt = self.attempt
        # A process of an earlier attempt may still be sending.
        if attempt is None or datagram.attempt != attempt.start.attempt:
            return
        # Asked before `attempt.hear`, which records the first loss.
        trained = attempt.has_trained(sender_of(datagram))
        exited = attempt.hear(datagram)
        if exited is not None:
            self.failed(exited, attempt)
        match datagram:
            case Beat() if not trained and datagram.loss is not None:
                self.hurry()  # the first step of the attempt: the leader waits for it
            case CheckpointFailed():
                self.spawn(self._classify_failed_save(datagram, attempt))
            case (
                Profiled()
                | TrainingResumed()
                | CheckpointSaved()
                | CheckpointIntervalChanged()
                | MemoryCheckpointsSet()
                | LogGrew()
            ):
                self.report(datagram)
            case DrillHappened():
                self.report(datagram)
                self._drill_host(datagram, attempt)
            case _:
                pass

    def failed(self, exited: RankExited, attempt: HostAttempt) -> None:
        self.told.append(self.spawn(self._report_exit(exited, attempt)))
        # The first rank that ends by itself triggers a check of this host, which may be the cause.
        if not exited.stopped and self.looking is None:
            self.looking = self.spawn(self._look_back(attempt))

    async def _report_exit(self, exited: RankExited, attempt: HostAttempt) -> None:
        self.report(await attempt.read(exited))

    async def _classify_failed_save(self, failed: CheckpointFailed, attempt: HostAttempt) -> None:
        reading = await attempt.read_words(failed.why)
        self.report(replace(failed, reading=reading))

    async def _look_back(self, attempt: HostAttempt) -> None:
        """Check this host, and report the result if it may explain the exit."""
        found = await attempt.look_back(LOOK_BACK_S)
        event = found.evidence.event
        await asyncio.gather(*self.told)  # the leader ignores evidence before the first exit
        # When a network breaks, ranks end on all hosts, and most hosts have nothing to report.
        if event.kernel or any(finding.verdict == "stops" for finding in event.findings):
            self.report(found.evidence)
        await attempt.keep(found)

    def _drill_host(self, fired: DrillHappened, attempt: HostAttempt) -> None:
        drill = next((d for d in attempt.start.drills if d.id == fired.drill), None)
        # All other drills act in the rank that has reported this one.
        if drill is None or drill.target != "host":
            return
        if drill.fault == "warn":
            what = f"drill {drill}: uncorrected memory errors"
            self.report(HostWarned(host=self.host, problem="gpu-memory", what=what))
        else:
            log.warning("drill kills this agent and its ranks now: %s", drill)
            loop = asyncio.get_running_loop()
            loop.call_later(HOST_DRILL_S, self.processes.die)


def how_it_went(stopped: HostStopped) -> str:
    if stopped.finished:
        return "all ranks returned 0 after the last step"
    return stopped.why.split("\n")[0] or "stopped before the last step"
