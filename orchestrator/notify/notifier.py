"""Sends the notices of a job while it is led, next to the leader's own work.

Each receiver is tried until it accepts, refuses for good, or an hour has passed. The journal then
gets a line. A leader that dies before that line leaves the notice to the next leader, which sends
it again: a notice is sent at least once and, per lost leader, once more, with the same id.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import NoticeSent
from orchestrator.contract.spec.reporting.notify_spec import NotifySpec
from orchestrator.dashboard.command_hints import Commands
from orchestrator.job.state import Run
from orchestrator.notify.deliver import Undelivered, deliver
from orchestrator.notify.message import message_of
from orchestrator.notify.notices import ALWAYS, Notice, notices_of, wants

log = logging.getLogger(__name__)

LOOK_S = 1.0
DELAYS_S = (2.0, 5.0, 15.0, 60.0, 300.0)
"""Pauses between tries; the last one repeats."""
GIVE_UP_S = 3600.0
LAST_S = 20.0
"""After the end of the job: limit for what is under way. The hosts are kept as long."""


class Notifier:
    def __init__(  # noqa: PLR0913 - what it needs of the leader, piece by piece
        self,
        specs: Sequence[NotifySpec],
        run_dir: RunDir,
        run: Callable[[], Run],
        now: Callable[[], float],
        record: Callable[[NoticeSent], None],
        environ: Mapping[str, str],
        sent: Iterable[NoticeSent] = (),
        delays_s: Sequence[float] = DELAYS_S,
    ) -> None:
        """
        Args:
            record: has a line written to the journal.
            sent: the lines about earlier notices.
        """
        self.specs, self.run_dir, self.run, self.now = specs, run_dir, run, now
        self.record, self.environ, self.delays_s = record, environ, delays_s
        self.led_since = now()
        self.known: set[tuple[str, str]] = set()
        """Notices and receivers that are done with or under way."""
        self.last: dict[tuple[str, str], float] = {}
        """Receiver and occasion -> when the last message was sent, unless it was given up."""
        self.tasks: set[asyncio.Task[None]] = set()
        for event in sent:
            self.known.add((event.notice, event.receiver))
            if event.delivered:
                self.last[event.receiver, event.notice.partition("-")[0]] = event.at

    def look(self) -> None:
        """Start to send what is new."""
        run, now = self.run(), self.now()
        for number, spec in enumerate(self.specs, 1):
            receiver = f"{number} {spec.kind}"
            for notice in notices_of(run, now, spec.stalled_after, self.led_since):
                if wants(spec, notice) and (notice.key, receiver) not in self.known:
                    self.known.add((notice.key, receiver))
                    self._take(spec, receiver, notice, run)

    def _take(self, spec: NotifySpec, receiver: str, notice: Notice, run: Run) -> None:
        now, kind = self.now(), (receiver, notice.key.partition("-")[0])
        before = self.last.get(kind)
        quiet_s = 0.0 if spec.quiet_for is None or notice.on in ALWAYS else spec.quiet_for
        # A clock that was set back must not silence a receiver for longer.
        if before is not None and 0 <= now - before < quiet_s:
            self._done(receiver, notice, tries=0, why="quiet_for")
            return
        self.last[kind] = now
        task = asyncio.create_task(self._send(spec, receiver, notice, run, before))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _send(
        self, spec: NotifySpec, receiver: str, notice: Notice, run: Run, before: float | None
    ) -> None:
        """`before`: when the last message of this kind was sent; None: there was none."""
        path = self.run_dir.path
        commands = Commands(
            job=path.name, spec=str(self.run_dir.spec), root=("--run-root", str(path.parent))
        )
        message = message_of(notice, run, commands, str(path), spec.page_url)
        began, tries = asyncio.get_running_loop().time(), 0
        while True:
            tries += 1
            try:
                await deliver(spec, message, self.environ)
            except Undelivered as exc:
                why = str(exc)
                log.warning("failed to notify receiver %s of %s: %s", receiver, notice.key, why)
                late = asyncio.get_running_loop().time() - began > GIVE_UP_S
                if exc.final or late:
                    # `quiet_for` counts from what the receiver got.
                    kind = (receiver, notice.key.partition("-")[0])
                    self.last.pop(kind, None)
                    if before is not None:
                        self.last[kind] = before
                    self._done(receiver, notice, tries=tries, why=why)
                    return
                await asyncio.sleep(self.delays_s[min(tries, len(self.delays_s)) - 1])
            else:
                self._done(receiver, notice, tries=tries)
                return

    def _done(self, receiver: str, notice: Notice, *, tries: int, why: str = "") -> None:
        self.record(
            NoticeSent(
                at=self.now(),
                notice=notice.key,
                receiver=receiver,
                delivered=not why,
                tries=tries,
                why=why,
            )
        )

    async def keep_looking(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    async def finish(self) -> None:
        """Send what the end of the job brought, within a limit."""
        self.look()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=LAST_S)


@asynccontextmanager
async def notifying(notifier: Notifier) -> AsyncIterator[None]:
    looking = asyncio.create_task(notifier.keep_looking())
    try:
        yield
    finally:
        tasks = [looking, *notifier.tasks]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
