"""The attempts of one host, one after the other: begun and stopped as the leader orders, and what
their ranks and the host say of themselves."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from orchestrator.agent.host_processes import HostAttempt, Processes
from orchestrator.contract.messages.agent_protocol import (
    Digest,
    Evidence,
    Gather,
    Report,
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
    RankExited,
    TrainingResumed,
)
from orchestrator.contract.messages.rank_messages import Beat, Datagram, sender_of
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

LOOK_BACK_S = 3.0
"""For what this host says of itself when a rank of it has ended; meanwhile the others stop."""
HOST_DRILL_S = 0.5
"""Between telling the leader of a host drill and dying of it: the journal is to know."""

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
        """Have the next digest sent now."""
        self.attempt: HostAttempt | None = None
        self.last: HostAttempt | None = None
        """The one before, of which no process is left."""
        self.running: asyncio.Task[None] | None = None
        self.looking: asyncio.Task[None] | None = None
        """At this host, where a rank of the attempt has ended."""
        self.told: list[asyncio.Task[None]] = []
        """Of ranks of the attempt that have failed: the leader is being told."""
        self.ended: HostStopped | None = None
        """How the last attempt ended here."""
        self.alone_since: float | None = None
        """When the leader was last heard, if that attempt was stopped for that; monotonic."""

    @property
    def number(self) -> int:
        """Of the attempt that has ranks here; 0: none has."""
        return 0 if self.attempt is None else self.attempt.start.attempt

    def digest(self) -> Digest:
        ranks = () if self.attempt is None else self.attempt.digest()
        return Digest(attempt=self.number, ranks=ranks)

    async def ends(self) -> list[Report]:
        """What the leader may not have heard, to be said again after a reconnection."""
        if (attempt := self.attempt) is None:
            return [] if self.ended is None else [self._as_of_now(self.ended)]
        return list(await asyncio.gather(*(attempt.read(one) for one in attempt.failures())))

    # What the leader orders

    async def start(self, order: Start) -> None:
        if self.attempt is not None and self.attempt.start.attempt < order.attempt:
            log.warning("attempt %s is under way, and given up", self.attempt.start.attempt)
            await self.end(0.0)
        if self.attempt is not None or (self.ended and self.ended.attempt >= order.attempt):
            return  # said twice
        self.attempt, self.alone_since = self.processes.attempt(order), None
        self.looking, self.told = None, []
        self.running = self.spawn(self._run(self.attempt))

    async def stop(self, order: Stop) -> None:
        if self.attempt is not None and self.attempt.start.attempt == order.attempt:
            await self.end(order.grace_s)
        elif self.ended is not None and self.ended.attempt == order.attempt:
            self.report(self._as_of_now(self.ended))
        else:
            # Never begun: remember, so that a Start that comes late is not obeyed.
            stopped = HostStopped(attempt=order.attempt, host=self.host, finished=False)
            self._remember(stopped)
            self.report(stopped)

    async def end(self, grace_s: float, alone_since: float | None = None) -> None:
        """Have no rank left: SIGTERM, and `grace_s` later SIGKILL. `alone_since`: because the
        leader was not heard since then; monotonic."""
        if self.attempt is None or self.running is None:
            return
        if not self.attempt.stopping:
            self.alone_since = alone_since
        await self.attempt.stop(grace_s)
        await self.running

    async def gather(self, order: Gather) -> None:
        if order.ended:
            await self._gather_last(order)
            return
        attempt = self.attempt
        if attempt is not None and attempt.start.attempt == order.attempt:
            found = await attempt.find_evidence(order.timeout_s)
            # First whether they still stand still: evidence of all hosts has the ranks stopped.
            self.report(Digest(attempt=order.attempt, ranks=attempt.digest()))
            self.report(found.evidence)
            await attempt.keep(found)
            return
        self._nothing(order, "no attempt runs here")

    async def _gather_last(self, order: Gather) -> None:
        last = self.last
        if last is not None and last.start.attempt == order.attempt:
            self.report(await last.last_evidence(order.timeout_s))
        else:
            self._nothing(order, "this agent did not see the attempt")

    def _nothing(self, order: Gather, why: str) -> None:
        host, missing = self.host, {"ranks": why}
        event = EvidenceGathered(attempt=order.attempt, host=host, ranks=(), missing=missing)
        self.report(Evidence(event=event))

    # What becomes of them

    async def _run(self, attempt: HostAttempt) -> None:
        try:
            await attempt.begin()
            unseen, stopped = await attempt.wait()
        except OSError as exc:
            unseen = []
            stopped = HostStopped(
                attempt=attempt.start.attempt,
                host=self.host,
                finished=False,
                why=f"torchrun could not be run: {exc}",
            )
            stopped = await attempt.read_launcher(stopped)
        for exited in unseen:
            self.failed(exited, attempt)
        await asyncio.gather(*self.told)
        if self.looking is not None:
            await self.looking
        self._remember(stopped)
        self.attempt, self.last = None, attempt
        log.info("attempt %s: no process left, %s", stopped.attempt, how_it_went(stopped))
        self.report(stopped)

    def _as_of_now(self, stopped: HostStopped) -> HostStopped:
        """With how long ago it was that the leader was last heard, if that is why."""
        if self.alone_since is None or stopped.finished:
            return stopped
        return replace(stopped, alone_s=max(0.1, self.clock.monotonic() - self.alone_since))

    def _remember(self, stopped: HostStopped) -> None:
        if self.ended is None or self.ended.attempt < stopped.attempt:
            self.ended = stopped

    def hear(self, datagram: Datagram) -> None:
        """A rank of this host said something."""
        attempt = self.attempt
        if attempt is None or datagram.attempt != attempt.start.attempt:
            return
        trained = attempt.has_trained(sender_of(datagram))
        exited = attempt.hear(datagram)
        if exited is not None:
            self.failed(exited, attempt)
        match datagram:
            case Beat() if not trained and datagram.loss is not None:
                self.hurry()  # the first step of the attempt: the leader waits for it
            case CheckpointFailed():
                self.spawn(self._classify_failed_save(datagram, attempt))
            case TrainingResumed() | CheckpointSaved() | CheckpointIntervalChanged():
                self.report(datagram)
            case DrillHappened():
                self.report(datagram)
                self._drill_host(datagram, attempt)
            case _:
                pass

    def failed(self, exited: RankExited, attempt: HostAttempt) -> None:
        """The first that ended by itself has this host looked at: it may be the host's fault."""
        self.told.append(self.spawn(self._tell_of_end(exited, attempt)))
        if not exited.stopped and self.looking is None:
            self.looking = self.spawn(self._look_back(attempt))

    async def _tell_of_end(self, exited: RankExited, attempt: HostAttempt) -> None:
        self.report(await attempt.read(exited))

    async def _classify_failed_save(self, failed: CheckpointFailed, attempt: HostAttempt) -> None:
        reading = await attempt.read_words(failed.why)
        self.report(replace(failed, reading=reading))

    async def _look_back(self, attempt: HostAttempt) -> None:
        """The leader is told of what tells something: a fabric that breaks ends ranks everywhere,
        and most hosts know nothing of it."""
        found = await attempt.look_back(LOOK_BACK_S)
        event = found.evidence.event
        await asyncio.gather(*self.told)  # first that it ended: before, the leader asks nobody
        if event.kernel or any(finding.verdict == "stops" for finding in event.findings):
            self.report(found.evidence)
        await attempt.keep(found)

    def _drill_host(self, fired: DrillHappened, attempt: HostAttempt) -> None:
        drill = next((d for d in attempt.start.drills if d.id == fired.drill), None)
        if drill is not None and drill.target == "host":
            log.warning("drill %s: this agent and its ranks die now", drill)
            loop = asyncio.get_running_loop()
            loop.call_later(HOST_DRILL_S, self.processes.die)


def how_it_went(stopped: HostStopped) -> str:
    if stopped.finished:
        return "all ranks returned 0 after the last step"
    return stopped.why.split("\n")[0] or "stopped before it was done"
