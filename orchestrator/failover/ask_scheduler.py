"""Asking a scheduler to take a job back, until it has, or until that is of no use."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.job.state import Run
from orchestrator.seams import AllocationBackend, Clock, Worker

log = logging.getLogger(__name__)

RETRY_S = 5.0
REFUSED_S = 600.0
"""How long a scheduler is asked that answers and refuses; one that does not answer is asked for
as long as this host is left to us."""


@dataclass(slots=True)
class Asking:
    backend_named: Callable[[str], AllocationBackend]
    clock: Clock
    worker: Worker = asyncio.to_thread
    refused_at: float | None = None

    async def settles(self, run: Run, without: Sequence[str], why: str) -> bool:
        """Ask once, for a next run without these hosts; whether there is no more to be done."""
        assert run.job is not None
        launch, granted = run.job.launch, self.backend_named(run.job.backend).granted
        assert granted is not None, "only agents of a granted allocation ask"
        try:
            await self.worker(granted.requeue, launch, without)
        except Ended as exc:
            log.info("the job is not queued again: %s", exc)
        except BackendError as exc:
            return self.is_hopeless(launch.job, exc)
        else:
            named = ", ".join(without) or "any host left out"
            log.info("the job is queued again, without %s: %s", named, why)
        return True

    def is_hopeless(self, job: str, why: BackendError) -> bool:
        """Whether a scheduler that says so has been asked for long enough."""
        if isinstance(why, Unanswered):
            log.error("the job is not queued again yet, asking again: %s", why)
            self.refused_at = None
            return False
        now = self.clock.monotonic()
        self.refused_at = now if self.refused_at is None else self.refused_at
        if now - self.refused_at < REFUSED_S:
            log.error("the scheduler does not take the job back, asking again: %s", why)
            return False
        log.error(
            "the job could not be queued again, and its hosts stand idle: `ndctl cancel %s` gives"
            " them back, and resume with `ndctl submit SPEC --resume`: %s",
            job,
            why,
        )
        return True
