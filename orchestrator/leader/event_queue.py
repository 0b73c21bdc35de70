"""What happens, decided in the order in which it came: journalled, stepped, then performed.

Whatever comes while a line is being written waits, and is written together with all that came
meanwhile: at 16,384 ranks thousands of events come at once, and a disk takes milliseconds for a
write, however much it is.
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
        """Not while the leader hears neither agents nor scheduler: then it decides nothing, for
        what it would decide on is as likely its own host's as theirs."""
        self.in_touch.set()

    def happened(self, event: Event) -> None:
        self.waiting.append(event)
        self.came.set()

    async def decide(self) -> None:
        """Take what has come, once something has and while the leader is in touch, up to the first
        by which something is to be done; and do it.

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
        """A disk that is slow or full stops no training: pulses go on.

        The same events until they are written: of lines that a disk took, and would not have cut
        off again, readers may have seen some.
        """
        while True:
            try:
                return await self.worker(self.supervisor.take, events)
            except GivenUp:
                raise
            except OSError as exc:
                log.error("the journal cannot be written, trying again: %s", exc)
                await asyncio.sleep(JOURNAL_RETRY_S)
