"""A leader or an agent that breaks its protocol is found by the laws of the simulation; a correct
one survives the same faults."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from orchestrator.agent.agent import Agent
from orchestrator.contract.files.fence import Fence
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.agent_protocol import Register
from orchestrator.errors import Ended, Unanswered
from orchestrator.journal.journal import Decided, Entry
from orchestrator.journal.supervisor import OpenJournal, Supervisor
from orchestrator.seams import AllocationBackend
from orchestrator.simulation.processes.agent_process import AgentProcess
from orchestrator.simulation.processes.backend import SlurmBackend
from orchestrator.simulation.processes.run_dir import StoredRunDir
from orchestrator.simulation.run import simulate
from orchestrator.simulation.world.scheduler import Scheduler
from orchestrator.simulation.world.storage import StoredJournal

KILL = ("rank",)
CUT = ("partition", "switch", "pause")


class WithoutFence(StoredRunDir):
    """Names nobody in the fence, and does not look at it."""

    def take_over(self, name: str) -> None:
        self.process.took_over(name)

    def check_leader(self, name: str) -> None:
        pass

    def write_fence(self, fence: Fence) -> None:
        pass


class FenceThatIsNotWritten(StoredRunDir):
    """The disk fails between journal and fence, and the leader goes on without the fence."""

    def write_fence(self, fence: Fence) -> None:
        pass


class OverlooksFence(StoredRunDir):
    """Opens the journal although another process holds it, and ignores that another leader has
    taken over."""

    def check_leader(self, name: str) -> None:
        pass

    async def open_journal(self, name: str, patience_s: float) -> StoredJournal:
        self.storage.holder = None
        return await super().open_journal(name, patience_s)


class LeaderWithoutFence(AgentProcess):
    run_dir_type = WithoutFence


class LeaderWhoseFenceIsNotWritten(AgentProcess):
    run_dir_type = FenceThatIsNotWritten


class LeaderBesideAnother(AgentProcess):
    run_dir_type = OverlooksFence


class LosingJournal(StoredJournal):
    """Takes a line that the disk refused for written."""

    def extend(self, decided: Decided) -> tuple[Entry, ...]:
        try:
            return super().extend(decided)
        except OSError:
            return ()


class LeaderThatLosesLines(AgentProcess):
    """Storage fails between two writes, and it goes on as if nothing had happened."""

    def _supervisor(self, journal: OpenJournal) -> Supervisor:
        cast(Any, journal).__class__ = LosingJournal
        return super()._supervisor(journal)


class LostAnswer(SlurmBackend):
    """The first answer to a requeue is lost after the scheduler has carried it out."""

    error: type[Unanswered] | type[Ended] = Unanswered

    async def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        first = not self.process.requested_requeue
        await super().requeue(launch, exclude, again=again, whole=whole)
        if first:
            raise self.error("the answer is lost")


class LostAnswerForRefusal(LostAnswer):
    error = Ended


class LosesAnswers(AgentProcess):
    backend_type: type[LostAnswer] = LostAnswer

    def _backend_named(self, name: str) -> AllocationBackend:
        scheduler = self.world.scheduler
        if not isinstance(scheduler, Scheduler) or not self.world.scenario.scheduled:
            return super()._backend_named(name)
        return cast(AllocationBackend, self.backend_type(self, scheduler))


class TakesLostAnswersForRefusals(LosesAnswers):
    backend_type = LostAnswerForRefusal


class ReconnectsWithStaleState(AgentProcess):
    """Its agent says on each connection that it runs nothing."""

    def _new_agent(self) -> Agent:
        agent = super()._new_agent()
        register = agent._register

        def stale() -> Register:
            said = register()
            return replace(said, agent=replace(said.agent, running=0))

        cast(Any, agent)._register = stale
        return agent


@pytest.mark.parametrize(
    ("process", "kinds", "law", "first"),
    [
        (LeaderWithoutFence, KILL, "the fence names another leader", 0),
        (LeaderWhoseFenceIsNotWritten, KILL, "the fence does not name it", 0),
        (LeaderBesideAnother, CUT, "gives other actions", 17),
        (
            LeaderThatLosesLines,
            ("storage-full", "leader", "rank"),
            "replaying gives another state",
            5,
        ),
        (TakesLostAnswersForRefusals, ("host", "drain"), "counts as refused", 0),
        (ReconnectsWithStaleState, ("stuck", "messages", "rank"), "still runs", 18),
    ],
)
def test_a_broken_process_is_caught(
    process: type[AgentProcess], kinds: Sequence[str], law: str, first: int
) -> None:
    seeds = range(first, first + 100)
    found = (simulate(seed, kinds, start_agent=process).broken for seed in seeds)
    assert law in next(filter(None, found))


def test_a_leader_survives_that_an_answer_is_lost_after_its_command_was_carried_out() -> None:
    outcomes = [simulate(seed, ("host", "drain"), start_agent=LosesAnswers) for seed in range(8)]
    assert [one.broken for one in outcomes if one.broken] == []


def test_a_leader_survives_storage_that_fails_between_two_writes() -> None:
    outcomes = [simulate(seed, ("storage-full", "leader", "rank")) for seed in range(8)]
    assert [one.broken for one in outcomes if one.broken] == []
