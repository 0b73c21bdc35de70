"""Writes a snapshot of the job's state now and then, so that the next leader starts quickly."""

import asyncio
import logging
from collections.abc import Callable

from ndctl.rank.fence import GivenUp
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.job.stage import Holding, Running, Waiting
from orchestrator.journal import snapshot
from orchestrator.journal.supervisor import Folded, Supervisor
from orchestrator.leader.storage import LeaderStorage
from orchestrator.seams import Worker

log = logging.getLogger(__name__)

EVERY_LINES = 5_000
"""Lines from one snapshot to the next. Folding them takes about a second. With thousands of hosts
they are two attempts."""
CALM = (Running, Waiting, Holding)
"""Stages in which nothing is urgent. With thousands of hosts a snapshot blocks the leader for some
tenths of a second."""


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
        """Lines of the journal that the newest snapshot covers."""
        self.writes = False

    def is_due(self) -> bool:
        """The leader asks between two decisions."""
        lines = self.supervisor.journal.place.lines
        enough = lines >= self.known + self.every and not self.writes
        return enough and isinstance(self.supervisor.run.stage, CALM)

    def _write(self, folded: Folded) -> None:
        if self.storage is None:
            snapshot.write(self.run_dir, folded, self.guard)
        else:
            self.storage.write_snapshot(folded, self.guard)

    async def remember(self, folded: Folded) -> None:
        """Write a snapshot of `folded`. A failure only makes the next leader start slower."""
        # Set also if the write fails: then the next try is after as many lines, not at each
        # decision.
        self.known, self.writes = folded.place.lines, True
        try:
            await self.worker(self._write, folded)
        except GivenUp:
            return  # the next journal line or check of the fence ends this leader
        except (OSError, snapshot.Unfit) as exc:
            log.warning("failed to write snapshot: %s", exc)
        finally:
            self.writes = False
