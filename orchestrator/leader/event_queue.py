"""Handles events in the order in which they arrive: write to the journal, decide, perform.

Events that arrive during a write are written together in the next one. At 16,384 ranks thousands of
events arrive at once, and a disk takes milliseconds for a write of any size.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice

from orchestrator.contract.files.fence import GivenUp
from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.events import Event
from orchestrator.journal.journal import MOST_LINES
from orchestrator.journal.supervisor import Supervisor
from orchestrator.seams import Worker

log = logging.getLogger(__name__)

JOURNAL_RETRY_S = 1.0


class EventQueue:
    def __init__(
        self,
        supervisor: Supervisor,
        perform: Callable[[Action], Awaitable[None]],
        worker: Worker = asyncio.to_thread,
    ) -> None:
        self.supervisor, self.perform, self.worker = supervisor, perform, worker
        self.waiting: deque[Event] = deque()
        self.came = asyncio.Event()
        self.in_touch = asyncio.Event()
        """Cleared while the leader hears neither agents nor scheduler. Then it decides nothing,
        because its own host may be the one that was cut off."""
        self.in_touch.set()

    def happened(self, event: Event) -> None:
        self.waiting.append(event)
        self.came.set()

    async def decide(self) -> None:
        """Wait for events, take them up to the first one that leads to actions, and perform these.

        Raises:
            GivenUp: another leader has taken over.
        """
        while not self.waiting:
            self.came.clear()
            await self.came.wait()
        await self.in_touch.wait()
        events = list(islice(self.waiting, MOST_LINES))
        count, actions = await self._journalled(events)
        for _ in range(count):
            self.waiting.popleft()
        for action in actions:
            log.info("%s: %s", type(action).__name__, action.reason)
            await self.perform(action)

    async def _journalled(self, events: list[Event]) -> tuple[int, tuple[Action, ...]]:
        """Write the events to the journal and decide. Returns the number of events taken, and the
        actions.

        A slow or full disk does not stop training: the agents still get pulses. The same events are
        tried until they are written, because readers may have seen the first lines of a write that
        failed and could not be undone.
        """
        while True:
            try:
                return await self.worker(self.supervisor.take, events)
            except GivenUp:
                raise
            except OSError as exc:
                log.error("failed to write the journal, trying again: %s", exc)
                await asyncio.sleep(JOURNAL_RETRY_S)
