"""What a leader watches while an attempt lasts: hangs, slow ranks, health, progress.

The detectors are `detect/heartbeat_monitor.py` and `detect/stragglers.py`. This module runs them
while an attempt lasts, and yields the events that they find. `now` is monotonic; the leader stamps
the events.
"""

from collections.abc import Callable, Iterator

from orchestrator.contract.messages.agent_protocol import Digest
from orchestrator.contract.messages.events import Event, HangDetected, JobSubmitted
from orchestrator.detect.heartbeat_monitor import HeartbeatMonitor, Limits
from orchestrator.detect.stragglers import Stragglers, roles_of
from orchestrator.job.attempt_end import EVIDENCE_S
from orchestrator.job.state import Run


class Monitor:
    def __init__(self, job: JobSubmitted) -> None:
        self.limits = Limits(
            hang=job.hang_timeout, init=job.init_timeout, checkpoint=job.checkpoint_timeout
        )
        self.attempt = 0
        self.watch: HeartbeatMonitor | None = None
        """None: there is nothing to watch."""
        self.stragglers = Stragglers(0, (), str, 0.0)
        self.hang: HangDetected | None = None
        """As the supervisor was told of it …"""
        self.gathered_by = 0.0
        """… and when no agent looks into it any more."""
        self.excused_s = 0.0
        """Seconds in which the leader did not listen. For the watch they never were: it is given
        the time without them."""

    def excuse(self, seconds: float) -> None:
        """The leader stood still for so long, and perhaps all of the job (`scontrol suspend`): the
        silence of ranks meanwhile says nothing."""
        self.excused_s += seconds

    def begin(self, attempt: int, run: Run, now: float) -> None:
        """From the order to start on: whatever of it is lost ends as a hang of the start."""
        now -= self.excused_s
        hosts, each = run.attempt.placement, run.plan.ranks_per_host
        self.watch = HeartbeatMonitor(attempt, range(run.plan.world_size), self.limits, now)
        self.stragglers = Stragglers(
            attempt, roles_of(run.plan.mesh), lambda rank: hosts[rank // each], now
        )
        self.attempt, self.hang, self.gathered_by = attempt, None, 0.0

    def end(self) -> None:
        self.watch = None

    @property
    def still_s(self) -> float | None:
        """How long ranks may stand still within a step until their agent should tell at once."""
        return None if self.watch is None else self.watch.limit("train")

    def hear(self, digest: Digest, now: float) -> Iterator[Event]:
        """Take in what an agent says of its ranks."""
        if self.watch is None or digest.attempt != self.attempt:
            return
        now -= self.excused_s
        progress = self.watch.observe(digest.ranks, now)
        self.stragglers.observe(digest.ranks)
        if self.hang is not None:
            over = self.watch.hang_over(self.hang, digest.ranks, now)
            if over is not None:
                self.hang = None
                self.watch.tell_soon()
                yield over
        if progress is not None:
            yield progress

    def look(self, hears_all: Callable[[], bool], now: float) -> Iterator[Event]:
        """What has changed by now. `hears_all`: whether every host of the attempt is heard."""
        if self.watch is None:
            return
        now -= self.excused_s
        yield from self.watch.changes(now)
        yield from self.stragglers.changes(now)
        hang = self.watch.hang(now)
        if hang is None or self.hang is not None or now < self.gathered_by:
            return
        # A host that is not heard explains a stall better: its silence is judged first.
        if hears_all():
            self.hang, self.gathered_by = hang, now + EVIDENCE_S
            yield hang
