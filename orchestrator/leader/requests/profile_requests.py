"""Has ranks profile their next steps, for a person, while the job goes on.

The state machine and the journal do not see it. A request ends with its attempt: the ranks of the
next one are other processes. The person can ask again.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from orchestrator.contract.messages.agent_protocol import (
    ProfileRanks,
    ProfileWish,
    RankProfiles,
)
from orchestrator.contract.messages.rank_messages import Profiled
from orchestrator.errors import JobError
from orchestrator.job.state import Run
from orchestrator.leader.agent_sessions import AgentSessions
from orchestrator.leader.requests.stack_requests import WITH_RANKS

LOOK_S = 0.2
"""Interval at which the end of the attempt is noticed."""


class ProfileRequests:
    def __init__(self, run: Callable[[], Run], sessions: AgentSessions) -> None:
        self.run = run
        self.sessions = sessions
        self.request = ""
        """Id of the request that is being served; empty if there is none."""
        self.awaited: set[int] = set()
        """Its ranks that have not answered yet."""
        self.heard: list[Profiled] = []

    def hear(self, profiled: Profiled) -> None:
        # Else it comes too late. Its files exist anyway.
        if profiled.request == self.request and profiled.rank in self.awaited:
            self.awaited.discard(profiled.rank)
            self.heard.append(profiled)

    async def take(self, wish: ProfileWish) -> RankProfiles:
        """Ask the agents of the ranks, and wait until all have answered, their attempt is over, or
        time is up.

        Raises:
            JobError: no ranks run now, they cannot be profiled, or another request is being served.
        """
        attempt = self._check(wish)
        self.request, self.awaited, self.heard = secrets.token_hex(8), set(wish.ranks), []
        order = ProfileRanks(
            attempt=attempt, request=self.request, ranks=tuple(wish.ranks), steps=wish.steps
        )
        try:
            for host in self.run().attempt.placement:
                self.sessions.order(host, order)
            with suppress(TimeoutError):
                async with asyncio.timeout(wish.wait_s):
                    while self.awaited and self._runs(attempt):
                        await asyncio.sleep(LOOK_S)
            return self._answer(attempt, wish)
        finally:
            self.request = ""

    def _check(self, wish: ProfileWish) -> int:
        """The number of the attempt whose ranks can be profiled."""
        run = self.run()
        if not isinstance(run.stage, WITH_RANKS):
            raise JobError(f"no ranks run now: {run.stage.title}, {run.stage.reason}")
        if run.is_own:
            raise JobError(
                "its ranks run your own program, which ndctl cannot profile: use torch.profiler in"
                " it, or `py-spy record` on its host"
            )
        if absent := sorted(set(wish.ranks) - {*range(run.plan.world_size)}):
            raise JobError(
                f"it has no rank {_listed(absent)}: its ranks are 0 to {run.plan.world_size - 1}"
            )
        if self.request:
            raise JobError(
                "another request for profiles is being served; ask again when it is done"
            )
        return run.attempt.number

    def _runs(self, attempt: int) -> bool:
        run = self.run()
        return run.attempt.number == attempt and isinstance(run.stage, WITH_RANKS)

    def _answer(self, attempt: int, wish: ProfileWish) -> RankProfiles:
        why = f"it has not done {wish.steps} steps within {wish.wait_s:g} s"
        if not self._runs(attempt):
            why = f"attempt {attempt} ended before it had done {wish.steps} steps"
        missing = {str(rank): why for rank in sorted(self.awaited)}
        failed = {str(one.rank): one.why for one in self.heard if one.why}
        return RankProfiles(
            attempt=attempt,
            ranks={str(one.rank): one for one in self.heard if not one.why},
            missing=missing | failed,
        )


def _listed(ranks: Sequence[int]) -> str:
    *most, end = map(str, ranks)
    return f"{', '.join(most)} or {end}" if most else end
