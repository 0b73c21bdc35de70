"""Makes a launch's spec the job's `spec.yaml` once the launch trains.

Ranks may refuse a new spec, for example because its model differs from the checkpoint's. Then
`spec.yaml` stays as it was.
"""

import asyncio
import logging
from collections.abc import Callable

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.job.stage import Running
from orchestrator.job.state import Run
from orchestrator.seams import Worker

log = logging.getLogger(__name__)


class SpecAcceptance:
    """Acts once in the leader's life, when it hears of the first step."""

    def __init__(
        self,
        run: Callable[[], Run],
        run_dir: RunDir,
        launch: int,
        guard: Callable[[], None],
        worker: Worker = asyncio.to_thread,
    ) -> None:
        self.worker = worker
        self.run, self.run_dir, self.launch, self.guard = run, run_dir, launch, guard
        self.accepted = False

    def is_due(self) -> bool:
        """The leader asks between two decisions."""
        return not self.accepted and isinstance(self.run().stage, Running)

    async def accept(self) -> None:
        # Set before the write, because the leader asks `is_due` again while the write is under way.
        self.accepted = True
        try:
            await self.worker(self._accept)
        except FileNotFoundError:
            return  # an older ndctl started the launch and wrote only spec.yaml
        # This includes GivenUp: the file is then left to the new leader.
        except OSError as exc:
            log.warning("failed to update %s: %s", self.run_dir.spec, exc)

    def _accept(self) -> None:
        spec = self.run_dir.spec_of(self.launch).read_bytes()
        # Called right before the write: a replaced leader must not overwrite the spec of a later
        # launch.
        self.guard()
        write_whole(self.run_dir.spec, spec)
