"""Handles events in the order in which they arrive: write to the journal, decide, perform.

Events that arrive during a write are written together in the next one. At 16,384 ranks thousands of
events arrive at once, and a disk takes milliseconds for a write of any size.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice

from ndctl.rank.fence import GivenUp
from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.events import Event, JournalDelayed
from orchestrator.journal.journal import MOST_LINES
from orchestrator.journal.supervisor import Supervisor
from orchestrator.seams import Worker

log = logging.getLogger(__name__)

JOURNAL_RETRY_S = 1.0
LATE_S = 5.0
"""Seconds from which a write is reported: it explains a restart that came late."""


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
        # Wait before the journal is written: another leader may have taken over from one that was
        # cut off.
        await self.in_touch.wait()
        # A new leader expects at most `MOST_LINES` lines in a write that a crash cut short.
        events = list(islice(self.waiting, MOST_LINES))
        begun = asyncio.get_running_loop().time()
        count, actions, why = await self._journalled(events)
        waited_s = asyncio.get_running_loop().time() - begun
        # The supervisor stops at the first event that leads to actions. The others stay in the
        # queue until these actions are performed.
        for _ in range(count):
            self.waiting.popleft()
        # The notice is written like any event. One about the write of a notice would never end
        # while storage is slow.
        if waited_s >= LATE_S and not all(isinstance(event, JournalDelayed) for event in events):
            at = events[-1].at + waited_s
            self.happened(JournalDelayed(at=at, waited_s=waited_s, why=why))
        for action in actions:
            log.info("%s: %s", type(action).__name__, action.reason)
            await self.perform(action)

    async def _journalled(self, events: list[Event]) -> tuple[int, tuple[Action, ...], str]:
        """Write the events to the journal and decide. Returns the number of events taken, the
        actions, and the last error of a write that failed before.

        A slow or full disk does not stop training: the agents still get pulses. The same events are
        tried until they are written, because readers may have seen the first lines of a write that
        failed and could not be undone.
        """
        why = ""
        while True:
            try:
                return *await self.worker(self.supervisor.take, events), why
            # GivenUp is an OSError too, but trying again cannot help: another leader has the job.
            except GivenUp:
                raise
            except OSError as exc:
                why = str(exc)
                log.error("failed to write the journal, trying again: %s", exc)
                await asyncio.sleep(JOURNAL_RETRY_S)
