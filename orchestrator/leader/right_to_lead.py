"""Whether this process may still lead the job: the fence on disk names the leader, the scheduler
may have taken its host, and the run directory must exist.
"""

import asyncio
import logging

from ndctl.rank.fence import GivenUp
from orchestrator.contract.files.fence import Fence
from orchestrator.leader.event_queue import JOURNAL_RETRY_S
from orchestrator.leader.storage import LeaderStorage
from orchestrator.seams import Worker

log = logging.getLogger(__name__)


class RightToLead:
    def __init__(self, storage: LeaderStorage, worker: Worker, name: str) -> None:
        """
        Args:
            name: of this leader, as the fence has it.
        """
        self.storage, self.worker, self.name = storage, worker, name
        self.outlived = ""
        """Why this leader must not lead any more, though no other leader has started yet."""

    def guard(self) -> None:
        """Called before each write, in a thread. Raises GivenUp, and another OSError if the fence
        cannot be read."""
        self.storage.check_leader(self.name)

    def give_up(self, why: str) -> None:
        """The scheduler has ended this run or given up this host. The fence still names this leader
        until another one starts."""
        self.outlived = why

    async def check(self) -> None:
        """Called about once a second.

        A fence that cannot be read does not end the leader: all that it writes waits until the
        fence is readable again.

        Raises:
            GivenUp: another leader has taken over, or will.
            RunDirGone: the run directory was moved or removed.
        """
        if self.outlived:
            raise GivenUp(self.outlived)
        try:
            await self.worker(self.guard)
        # GivenUp is an OSError too, and the only one that ends this leader.
        except GivenUp:
            raise
        except OSError as exc:
            log.error("failed to read the fence: %s", exc)
        try:
            await self.worker(self.storage.watch.look)
        except OSError as exc:
            log.error("failed to check the run directory: %s", exc)

    async def raise_fence(self, attempt: int) -> None:
        """Keep ranks of earlier attempts, and earlier leaders, from writing. The fence is on disk
        on return.

        Raises:
            GivenUp: another leader has taken over.
        """
        fence = Fence(leader=self.name, attempt=attempt)
        while True:
            try:
                # Another leader may have raised the fence while storage failed. Never overwrite it.
                await self.worker(self.guard)
                return await self.worker(self.storage.write_fence, fence)
            except GivenUp:
                raise
            except OSError as exc:
                log.error("failed to write the fence, trying again: %s", exc)
                await asyncio.sleep(JOURNAL_RETRY_S)
