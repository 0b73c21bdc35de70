"""Asks a scheduler to requeue a job, until it has done so or asking again is useless."""

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
"""How long to ask a scheduler that refuses. One that is unreachable is asked without a limit."""


@dataclass(slots=True)
class Asking:
    backend_named: Callable[[str], AllocationBackend]
    clock: Clock
    worker: Worker = asyncio.to_thread
    refused_at: float | None = None

    async def settles(self, run: Run, without: Sequence[str], why: str) -> bool:
        """Ask once for a requeue without these hosts. Returns whether asking again is useless."""
        assert run.job is not None
        launch, granted = run.job.launch, self.backend_named(run.job.backend).granted
        if granted is None:
            log.error(
                "leaving: %s, and no scheduler can start the job again: read its agents' logs, then"
                " resume with `ndctl submit SPEC --resume`",
                why,
            )
            return True
        try:
            await self.worker(granted.requeue, launch, without)
        except Ended as exc:
            log.info("the job is not queued again, because it has ended: %s", exc)
        except BackendError as exc:
            return self.is_hopeless(launch.job, exc)
        else:
            excluded = f", without {', '.join(without)}" if without else ""
            log.info("the job is queued again%s: %s", excluded, why)
        return True

    def is_hopeless(self, job: str, why: BackendError) -> bool:
        """Whether the scheduler has refused for long enough to give up.

        Args:
            why: its last answer.
        """
        # An unreachable scheduler has refused nothing, so the time of refusals starts again.
        if isinstance(why, Unanswered):
            log.error("failed to reach the scheduler to requeue the job, retrying: %s", why)
            self.refused_at = None
            return False
        now = self.clock.monotonic()
        # A refusal may be temporary, so only one that lasts for `REFUSED_S` counts.
        self.refused_at = now if self.refused_at is None else self.refused_at
        if now - self.refused_at < REFUSED_S:
            log.error("the scheduler refused to requeue the job, retrying: %s", why)
            return False
        log.error(
            "failed to requeue the job, so its hosts are idle: release them with `ndctl cancel %s`"
            " and resume with `ndctl submit SPEC --resume`: %s",
            job,
            why,
        )
        return True
