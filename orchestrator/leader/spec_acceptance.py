"""`spec.yaml` is the spec of a launch that came to train: one that the ranks refuse, as for another
model than the checkpoint's, leaves the former spec in its place.
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
    """The leader's, once in its life: at the first step that it hears of."""

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
        """Asked between two decisions."""
        return not self.accepted and isinstance(self.run().stage, Running)

    async def accept(self) -> None:
        self.accepted = True
        try:
            await self.worker(self._accept)
        except FileNotFoundError:
            return  # the launch was begun by an ndctl that wrote spec.yaml alone
        except OSError as exc:
            log.warning("failed to update %s: %s", self.run_dir.spec, exc)

    def _accept(self) -> None:
        spec = self.run_dir.spec_of(self.launch).read_bytes()
        self.guard()
        write_whole(self.run_dir.spec, spec)
