"""Makes pages for all requests, so that the cost does not grow with their number.

One look at the jobs serves everybody, at most one a second, and less often if it takes long. Each
page is made once for a look, in a thread, and its change is encoded once. A client costs only the
copy of ready bytes to its socket, so a slow client or a thousand clients delay nothing else.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec import Struct

from orchestrator.dashboard import format
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.errors import NdctlError
from orchestrator.posix.run_with_timeout import Lane
from orchestrator.web.fleet import Fleet, FleetState
from orchestrator.web.pages.address import Address, meant
from orchestrator.web.pages.page import Page, change, whole
from orchestrator.web.pages.render import Lines, Renderer, job_at
from orchestrator.web.server import LOOK_S, Looker

log = logging.getLogger(__name__)

LIVE_S = 1.0
"""Seconds between two renewals of a page that is open."""
FRESH = 0.9
"""A page is renewed with the last look if that is younger than this share of `LIVE_S`. So pages
that are open cost no more looks than one page."""
SHARE = 3.0
"""After a look that took long the pause is at least so many times as long."""
SHORT_S = 0.15
"""A page at its start waits only so long for a new look."""
READ_S = 3.0
"""Limit for reading lines of a job's files. After that its page says so."""
NOT_FOUND = 404
MOST_READY = 64
"""Pages that are kept."""


class Version(Struct, frozen=True, kw_only=True):
    """What streams of one page are sent."""

    number: int
    at: str
    """Of which time it is, as text; or why there is nothing new."""
    problem: bool = False
    page: Page | None = None
    delta: bytes = b""
    """For those who have the version before; empty: nothing changed."""


class Hub:
    def __init__(self, fleet: Fleet, looker: Looker, renderer: Renderer) -> None:
        self.fleet, self.looker, self.renderer = fleet, looker, renderer
        self.lane = Lane()
        """For what only computes."""
        self.readings: dict[Path, Lane] = {}
        """For reading files of a job, one lane for each: the storage of one may hang."""
        self.ready: dict[Address, tuple[FleetState, Page]] = {}
        """Pages, each with the state that it shows."""
        self.watched: dict[Address, int] = {}
        """Pages that are open -> number of their streams."""
        self.tasks: dict[Address, asyncio.Task[None]] = {}
        """What keeps the open pages fresh."""
        self.versions: dict[Address, Version] = {}
        self.news = asyncio.Condition()

    async def page(self, address: Address) -> tuple[Page, str]:
        """The page, and of which time it is.

        Raises:
            TimeoutError: the storage does not respond.
            OSError, NdctlError: the jobs cannot be looked at.
        """
        state = await self._recent()
        if await self._want(state, address):
            state = await self.looker(LOOK_S)
        page = await self._page(state, address)
        # A message may link to an incident that is newer than the last look.
        if page.status == NOT_FOUND:
            state = await self.looker(LOOK_S, self._pause_s())
            page = await self._page(state, address)
        return page, _at(state, page)

    async def job(self, address: Address) -> ReadJob | None:
        """The job of an address; None if there is none, or several. Raises as `page`."""
        state = await self._recent()
        return await self.lane.run(LOOK_S, job_at, state, address)

    async def _recent(self) -> FleetState:
        """For a page at its start, which should wait little: it says of which time it is, and its
        events bring the rest."""
        return await self.looker.recent(SHORT_S, self._pause_s())

    def _pause_s(self) -> float:
        """A younger state is new enough: looks must not keep the storage busy."""
        return max(FRESH * LIVE_S, SHARE * self.looker.took_s)

    async def _want(self, state: FleetState, address: Address) -> bool:
        """Have a job read that ended long ago. Returns whether it was not read yet."""
        if address.name is None or not self.fleet.idle:
            return False
        others = [row.run_dir for row in state.others.rows]
        found = await self.lane.run(LOOK_S, meant, others, address)
        unread = False
        for path in self.fleet.idle_paths(found):
            self.fleet.want(path)
            unread = unread or state.job(str(path)) is None
        return unread

    async def _page(self, state: FleetState, address: Address) -> Page:
        known = self.ready.get(address)
        if known is not None and known[0] is state:
            return known[1]
        lines = await self._lines(state, address)
        page = await self.lane.run(LOOK_S, self.renderer.page, state, address, lines)
        self.ready.pop(address, None)
        self.ready[address] = (state, page)
        while len(self.ready) > MOST_READY:
            del self.ready[next(iter(self.ready))]
        return page

    async def _lines(self, state: FleetState, address: Address) -> Lines | str | None:
        job = await self.lane.run(LOOK_S, job_at, state, address)
        if job is None:
            return None
        lane = self.readings.setdefault(job.path, Lane())
        try:
            return await lane.run(READ_S, self.renderer.lines, job, address.incident)
        except TimeoutError:
            known = self.renderer.known_lines(job, address.incident)
            return known or "its file system does not respond"
        except OSError as exc:  # the run directory was removed since the look
            return str(exc)
        finally:
            if lane.is_free:
                self.readings.pop(job.path, None)

    @contextlib.asynccontextmanager
    async def watching(self, address: Address) -> AsyncIterator[None]:
        """The page is kept fresh in `versions` meanwhile."""
        self.watched[address] = self.watched.get(address, 0) + 1
        if address not in self.tasks:
            self.tasks[address] = asyncio.create_task(self._keep_fresh(address))
        try:
            yield
        finally:
            self.watched[address] -= 1
            if not self.watched[address]:
                del self.watched[address]
                self.versions.pop(address, None)
                self.tasks.pop(address).cancel()

    async def after(self, address: Address, number: int, seconds: float) -> Version | None:
        """The newest version after `number`; None if there is none within that time."""

        def is_newer() -> bool:
            known = self.versions.get(address)
            return known is not None and known.number > number

        async with self.news:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait_for(is_newer), seconds)
        return self.versions[address] if is_newer() else None

    async def whole(self, page: Page) -> bytes:
        """The message with all rows of a page."""
        return await self.lane.run(LOOK_S, whole, page)

    async def _keep_fresh(self, address: Address) -> None:
        """Runs while the page is open."""
        while True:
            began = asyncio.get_running_loop().time()
            try:
                # Unlike a page at its start, an open page waits: it has something to show.
                state = await self.looker(LOOK_S, self._pause_s())
                if not await self._want(state, address):  # else it is read at the next look
                    await self._renew(state, address)
            except (OSError, NdctlError) as exc:  # TimeoutError is an OSError
                self._fail(address, str(exc) or "the storage does not respond")
            async with self.news:
                self.news.notify_all()
            took_s = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(LIVE_S, SHARE * took_s))

    async def _renew(self, state: FleetState, address: Address) -> None:
        page = await self._page(state, address)
        before = self.versions.get(address)
        delta = b""
        if before is not None and before.page is not None and before.page is not page:
            delta = await self.lane.run(LOOK_S, change, before.page, page)
        number = before.number + 1 if before is not None else 1
        self.versions[address] = Version(number=number, at=_at(state, page), page=page, delta=delta)

    def _fail(self, address: Address, problem: str) -> None:
        before = self.versions.get(address)
        if before is None or not before.problem:
            log.warning("failed to renew a page: %s", problem)
        self.versions[address] = Version(
            number=before.number + 1 if before is not None else 1,
            at=f"not live: {format.shorten(problem)}",
            problem=True,
            page=before.page if before is not None else None,
        )

    async def close(self) -> None:
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _at(state: FleetState, page: Page) -> str:
    return f"as of {format.date_time(page.at or state.at, None)}"
