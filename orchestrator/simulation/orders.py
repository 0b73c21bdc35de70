"""What a leader does about each action: orders to agents, errands, the verdict on a hang."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, assert_never

from orchestrator.contract.messages.actions import (
    Action,
    CheckHosts,
    EndJob,
    GatherEvidence,
    JudgeHang,
    ReplaceAgent,
    Replan,
    Requeue,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.agent_protocol import Evidence, OfferPort, Port, Start, Stop
from orchestrator.contract.messages.events import HangJudged
from orchestrator.job.state import pace_of
from orchestrator.leader.hang_analysis import gather_order, judged_of

if TYPE_CHECKING:
    from orchestrator.simulation.leaders import Leader

JUDGE_S = 1.0


class Orders:
    def __init__(self, leader: "Leader") -> None:
        self.leader = leader
        self.heard: dict[str, Evidence] = {}
        """What each host last sent."""
        self.pending: StartAttempt | None = None

    def perform(self, action: Action) -> None:  # noqa: C901 - a case a kind
        leader = self.leader
        run = leader.supervisor.run
        match action:
            case StartAttempt():
                leader.lookout.begin(action.attempt, run, leader.world.timeline.now)
                self.pending = action
                leader.order(action.hosts[0], OfferPort(attempt=action.attempt))
            case StopAttempt():
                if not action.hosts:
                    if run.leaving is not None:
                        leader.world.parts()
                    leader.lookout.end()
                    self.pending = None
                for host in action.hosts or run.placement:
                    leader.order(host, Stop(attempt=action.attempt, grace_s=action.grace_s))
            case GatherEvidence():
                gather = gather_order(action)
                for host in run.placement:
                    leader.order(host, gather)
            case JudgeHang():
                self._judge(action)
            case ReplaceAgent() | CheckHosts() | Replan():
                leader.errands.run_errand(action)
            case Requeue():
                leader.lookout.end()
                leader.errands.requeue(action)
            case EndJob():
                leader.lookout.end()
                leader.end(action)
            case _:
                assert_never(action)

    def _judge(self, action: JudgeHang) -> None:
        """By what has come; some may come too late."""
        parts = [part for part in self.heard.values() if part.event.attempt == action.attempt]
        judged = judged_of(self.leader.supervisor.run, action.attempt, parts)
        self.leader.world.timeline.after(JUDGE_S, partial(self._judged, judged))

    def _judged(self, judged: HangJudged) -> None:
        if self.leader.alive:
            self.leader.happened(replace(judged, at=self.leader.now()))

    def port_offered(self, offer: Port) -> None:
        action, run = self.pending, self.leader.supervisor.run
        if action is None or action.attempt != offer.attempt:
            return
        self.pending = None
        for node_rank, host in enumerate(action.hosts):
            start = Start(
                attempt=action.attempt,
                node_rank=node_rank,
                nodes=len(action.hosts),
                ranks_per_host=run.plan.ranks_per_host,
                master_address=action.hosts[0],
                master_port=offer.port,
                config=str(run.current.number),
                drills=action.drills,
                steps=run.job.steps if run.job else 0,
                skip=action.skip,
                pace=pace_of(run),
                classes=run.job.failure_classes if run.job else (),
            )
            self.leader.order(host, start)
