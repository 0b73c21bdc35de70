"""The leader writes down now and then what its journal came to, for the one that comes after it."""

import asyncio
import logging
from collections.abc import Callable

from orchestrator.contract.files.fence import GivenUp
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.job.stage import Holding, Running, Waiting
from orchestrator.journal import snapshot
from orchestrator.journal.supervisor import Folded, Supervisor
from orchestrator.leader.storage import LeaderStorage
from orchestrator.seams import Worker

log = logging.getLogger(__name__)

EVERY_LINES = 5_000
"""A second's fold, and with thousands of hosts two attempts."""
CALM = (Running, Waiting, Holding)
"""Nothing is urgent then: of thousands of hosts it takes this process some tenths of a second."""


class SnapshotWriter:
    def __init__(
        self,
        supervisor: Supervisor,
        run_dir: RunDir,
        guard: Callable[[], None],
        every: int = EVERY_LINES,
        storage: LeaderStorage | None = None,
        worker: Worker = asyncio.to_thread,
    ) -> None:
        self.storage, self.worker = storage, worker
        self.supervisor, self.run_dir, self.guard, self.every = supervisor, run_dir, guard, every
        self.known = supervisor.known.lines
        """Lines that the newest snapshot knows."""
        self.writes = False

    def is_due(self) -> bool:
        """Asked between two decisions."""
        lines = self.supervisor.journal.place.lines
        enough = lines >= self.known + self.every and not self.writes
        return enough and isinstance(self.supervisor.run.stage, CALM)

    def _write(self, folded: Folded) -> None:
        if self.storage is None:
            snapshot.write(self.run_dir, folded, self.guard)
        else:
            self.storage.write_snapshot(folded, self.guard)

    async def remember(self, folded: Folded) -> None:
        """One that cannot be written nobody misses until there is a new leader, which then has more
        to fold."""
        self.known, self.writes = folded.place.lines, True
        try:
            await self.worker(self._write, folded)
        except GivenUp:
            return  # the next line or look at the fence ends this leader
        except (OSError, snapshot.Unfit) as exc:
            log.warning("what the journal came to could not be written down: %s", exc)
        finally:
            self.writes = False
