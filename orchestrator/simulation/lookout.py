"""What a leader watches while an attempt lasts, by the real detectors: hangs and slow ranks."""

from typing import TYPE_CHECKING

from orchestrator.agent.translate import (
    hang_detected,
    hang_over,
    health_changed,
    step_reached,
    straggler,
)
from orchestrator.contract.plan import Plan
from orchestrator.contract.protocol import Digest
from orchestrator.supervise.hangs import EVIDENCE_S
from orchestrator.supervise.stragglers import Stragglers, roles_of
from orchestrator.supervise.watch import Hang, Limits, Watch

if TYPE_CHECKING:
    from orchestrator.simulation.leaders import Leader


class Lookout:
    def __init__(self, leader: "Leader") -> None:
        self.leader = leader
        self.watch: Watch | None = None
        self.stragglers = Stragglers((), 0.0)
        self.attempt = 0
        self.hang: Hang | None = None
        """That is being looked into."""
        self.gathered_by = 0.0

    def begin(self, attempt: int, plan: Plan) -> None:
        now, job = self.leader.world.timeline.now, self.leader.job
        limits = Limits(
            hang=job.hang_timeout, init=job.init_timeout, checkpoint=job.checkpoint_timeout
        )
        self.watch = Watch(range(plan.world_size), limits, now)
        self.stragglers = Stragglers(roles_of(plan.mesh), now)
        self.attempt, self.hang, self.gathered_by = attempt, None, 0.0

    def end(self) -> None:
        self.watch = None

    def hear(self, digest: Digest) -> None:
        if self.watch is None or digest.attempt != self.attempt:
            return
        now = self.leader.world.timeline.now
        progress = self.watch.observe(digest.ranks, now)
        self.stragglers.observe(digest.ranks)
        if self.hang is not None:
            moved = self.watch.moved(self.hang, digest.ranks, now)
            if moved is not None:
                self.hang = None
                self.watch.tell_soon()
                self.leader.happened(hang_over(moved, digest.attempt, self.leader.now()))
        if progress is not None:
            self.leader.happened(step_reached(progress, digest.attempt, self.leader.now()))

    def look(self, at: float) -> None:
        """Say what has changed by now."""
        if self.watch is None:
            return
        leader, now = self.leader, self.leader.world.timeline.now
        run = leader.supervisor.run
        for change in self.watch.health_changes(now):
            leader.happened(health_changed(change, self.attempt, at))
        for slow in self.stragglers.changes(now):
            host = run.placement[slow.rank // run.plan.ranks_per_host]
            leader.happened(straggler(slow, host, self.attempt, at))
        hang = self.watch.hang(now)
        if hang is None or self.hang is not None or now < self.gathered_by:
            return
        if leader.connections.hears(run.placement):
            self.hang, self.gathered_by = hang, now + EVIDENCE_S
            leader.happened(hang_detected(hang, self.attempt, at))
