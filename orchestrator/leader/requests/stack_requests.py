"""Asks all agents where their ranks are, for a person, while the ranks go on.

The answers are no evidence of a hang: the state machine and the journal do not see them.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import Evidence, Gather, RankStacks
from orchestrator.errors import JobError
from orchestrator.job.stage import Diagnosing, Running, Starting
from orchestrator.job.state import Run
from orchestrator.leader.agent_sessions import AgentSessions

ASK_S = 5.0
"""Limit for ranks to answer."""
ANSWER_S = 15.0
"""Limit for agents to answer: the ranks' limit, and the time to read and to write files."""
WITH_RANKS = (Starting, Running, Diagnosing)


class StackRequests:
    def __init__(self, run: Callable[[], Run], run_dir: RunDir, sessions: AgentSessions) -> None:
        self.run = run
        self.run_dir = run_dir
        self.sessions = sessions
        self.one_by_one = asyncio.Lock()
        self.awaited: set[str] = set()
        """Hosts that have not answered yet."""
        self.heard: list[Evidence] = []
        self.complete = asyncio.Event()

    def hear(self, evidence: Evidence) -> None:
        if evidence.event.host in self.awaited:  # else it comes too late
            self.awaited.discard(evidence.event.host)
            self.heard.append(evidence)
            if not self.awaited:
                self.complete.set()

    async def take(self) -> RankStacks:
        """Ask all agents, and wait until they have answered or time is up.

        Raises:
            JobError: no ranks run now.
        """
        async with self.one_by_one:
            run = self.run()
            attempt, hosts = run.attempt.number, tuple(run.attempt.placement)
            if not isinstance(run.stage, WITH_RANKS):
                raise JobError(f"no ranks run now: {run.stage.title}, {run.stage.reason}")
            self.awaited, self.heard = set(hosts), []
            self.complete.clear()
            for host in hosts:
                order = Gather(attempt=attempt, timeout_s=ASK_S, for_a_person=True)
                self.sessions.order(host, order)
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await self.complete.wait()
            silent = {
                f"ranks of {host}": f"its agent sent nothing within {ANSWER_S:.0f} s"
                for host in sorted(self.awaited)
            }
            self.awaited = set()
        events = [evidence.event for evidence in self.heard]
        return RankStacks(
            attempt=attempt,
            traces=str(self.run_dir.traces(attempt)),
            ranks={str(rank.rank): rank for event in events for rank in event.ranks},
            missing=silent
            | {
                f"{what} ({event.host})": why
                for event in events
                for what, why in event.missing.items()
                if what.startswith(("stack", "ranks"))  # probes and dumps are not printed
            },
        )
