"""Makes pages for all requests, so that the cost does not grow with their number.

One look at the jobs serves everybody, at most one a second, and less often if it takes long. Each
page is made once for a look, in a thread, and its change is encoded once. A client costs only the
copy of ready bytes to its socket, so a slow client or a thousand clients delay nothing else.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from msgspec import Struct

from orchestrator.dashboard import format
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.errors import NdctlError
from orchestrator.posix.run_with_timeout import within
from orchestrator.web.fleet import Fleet, FleetState
from orchestrator.web.pages.address import Address, meant
from orchestrator.web.pages.fleet_page import rows_of
from orchestrator.web.pages.page import Page, change, whole
from orchestrator.web.pages.render import Renderer
from orchestrator.web.server import LOOK_S, Looker

log = logging.getLogger(__name__)

LIVE_S = 1.0
"""Seconds between two looks while a page is open."""
SHARE = 3.0
"""After a look that took long the pause is at least so many times as long."""
SHORT_S, OLD_S = 0.15, 30.0
"""A page waits only so long for a new look if the last one is younger than `OLD_S`: it says of
which time it is, and its events bring the rest."""
MOST_READY = 64
"""Documents of one look that are kept."""

T = TypeVar("T")


class Version(Struct, frozen=True, kw_only=True):
    """What streams of one page are sent."""

    number: int
    at: str
    """Of which time it is, as text; or why there is nothing new."""
    problem: bool = False
    page: Page | None = None
    delta: bytes = b""
    """For those who have the version before; empty: nothing changed."""


class Lane:
    """One thread at a time. Work that hangs with the storage keeps it, and its callers give up."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    async def run(self, seconds: float, work: Callable[..., T], *args: Any) -> T:
        """Raises TimeoutError."""

        async def alone() -> T:
            async with self.lock:
                return await within(None, work, *args)

        task = asyncio.create_task(alone())
        task.add_done_callback(_look_at_error)
        return await asyncio.wait_for(asyncio.shield(task), seconds)


def _look_at_error(task: asyncio.Task[T]) -> None:
    """The caller may have given up, and asyncio complains of errors that were not looked at."""
    if not task.cancelled():
        task.exception()


class Hub:
    def __init__(self, fleet: Fleet, looker: Looker, renderer: Renderer) -> None:
        self.fleet, self.looker, self.renderer = fleet, looker, renderer
        self.lane = Lane()
        self.state: FleetState | None = None
        self.looked_at = self.took_s = 0.0
        self.ready: dict[Address, Page] = {}
        """Pages of `state`."""
        self.watched: dict[Address, int] = {}
        """Pages that are open -> number of their streams."""
        self.versions: dict[Address, Version] = {}
        self.news = asyncio.Condition()
        self.task: asyncio.Task[None] | None = None

    async def page(self, address: Address) -> tuple[Page, str]:
        """The page, and of which time it is.

        Raises:
            TimeoutError: the storage does not respond.
            OSError, NdctlError: the jobs cannot be looked at.
        """
        state = await self._fresh()
        if self._want(state, address):
            state = await self._look(LOOK_S)
        return await self._page(state, address), _at(state)

    async def job(self, address: Address) -> ReadJob | None:
        """The job of an address; None if there is none, or several. Raises as `page`."""
        state = await self._fresh()
        found = await self.lane.run(LOOK_S, lambda: meant(rows_of(state), address))
        paths = [row.run_dir for row in found]
        jobs = [job for job in state.jobs if str(job.path) in paths]
        return jobs[0] if len(paths) == len(jobs) == 1 else None

    async def _fresh(self) -> FleetState:
        now = asyncio.get_running_loop().time()
        age = now - self.looked_at
        if self.state is None or age > OLD_S:
            return await self._look(LOOK_S)
        if age < max(LIVE_S, SHARE * self.took_s):
            return self.state
        try:
            return await self._look(SHORT_S)
        except TimeoutError:
            return self.state

    async def _new(self) -> FleetState:
        """Unlike a page at its start, an open page must not show an old state as a new one."""
        age = asyncio.get_running_loop().time() - self.looked_at
        if self.state is not None and age < LIVE_S / 2:
            return self.state
        return await self._look(LOOK_S)

    async def _look(self, seconds: float) -> FleetState:
        loop = asyncio.get_running_loop()
        began = loop.time()
        state = await asyncio.wait_for(self.looker(), seconds)
        if state is not self.state:
            self.state, self.ready = state, {}
            self.looked_at, self.took_s = loop.time(), loop.time() - began
        return state

    def _want(self, state: FleetState, address: Address) -> bool:
        """Have a job read that ended long ago. Returns whether it was not read yet."""
        if address.name is None:
            return False
        found = meant(state.others.rows, address)
        for path in self.fleet.idle_paths(row.run_dir for row in found):
            self.fleet.want(path)
            if all(job.path != path for job in state.jobs):
                return True
        return False

    async def _page(self, state: FleetState, address: Address) -> Page:
        known = self.ready.get(address)
        if known is None:
            known = await self.lane.run(LOOK_S, self.renderer.page, state, address)
            if state is self.state and len(self.ready) < MOST_READY:
                self.ready[address] = known
        return known

    @contextlib.asynccontextmanager
    async def watching(self, address: Address) -> AsyncIterator[None]:
        """The page is kept fresh in `versions` meanwhile."""
        self.watched[address] = self.watched.get(address, 0) + 1
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._keep_fresh())
        try:
            yield
        finally:
            self.watched[address] -= 1
            if not self.watched[address]:
                del self.watched[address]
                self.versions.pop(address, None)

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

    async def _keep_fresh(self) -> None:
        """Runs while a page is open."""
        while self.watched:
            began = asyncio.get_running_loop().time()
            try:
                state = await self._new()
                for address in list(self.watched):
                    if self._want(state, address):
                        continue  # read at the next look
                    await self._renew(state, address)
            except (OSError, NdctlError) as exc:  # TimeoutError is an OSError
                log.warning("failed to renew pages: %s", exc or "the storage does not respond")
                self._spread(str(exc) or "the storage does not respond")
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
        if address in self.watched:
            number = before.number + 1 if before is not None else 1
            self.versions[address] = Version(number=number, at=_at(state), page=page, delta=delta)

    def _spread(self, problem: str) -> None:
        for address in self.watched:
            before = self.versions.get(address)
            self.versions[address] = Version(
                number=before.number + 1 if before is not None else 1,
                at=f"not live: {format.shorten(problem)}",
                problem=True,
                page=before.page if before is not None else None,
            )

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task


def _at(state: FleetState) -> str:
    return f"as of {format.date_time(state.at, None)}"
