"""Pages of jobs on disk, behind a real server."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.web.access import Access
from orchestrator.web.fleet import Fleet, FleetState, Place
from orchestrator.web.live.hub import Hub
from orchestrator.web.live.routes import page_routes
from orchestrator.web.live.static import static_files
from orchestrator.web.live.streams import Streams
from orchestrator.web.metrics.exposition import Exposition
from orchestrator.web.pages.render import Renderer
from orchestrator.web.server import Listening, Looker, application, serving
from tests.dashboard.dashboard_story import START, StoryClock
from tests.web.served_jobs import patient

Use = Callable[[aiohttp.ClientSession, str], Awaitable[None]]


class Served:
    """A fleet behind a server, with the number of its looks."""

    def __init__(
        self,
        *run_dirs: RunDir,
        most: int = 8,
        idle: bool = False,
        access: Access = Access(),  # noqa: B008 - a frozen value
    ) -> None:
        self.places = [Place(run_dir=one, idle=idle) for one in run_dirs]
        self.clock = StoryClock(START + 100)
        self.fleet = Fleet(lambda: self.places, self.clock, led=True)
        patient(self.fleet)
        self.looks = 0
        self.most, self.access = most, access
        self.hold_s = 0.0
        self.problem: Exception | None = None

    def look(self) -> FleetState:
        self.looks += 1
        time.sleep(self.hold_s)
        if self.problem is not None:
            raise self.problem
        return self.fleet.look()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
        looker = Looker(self.look)
        self.hub = Hub(self.fleet, looker, Renderer())
        self.streams = Streams(self.hub, self.most)
        routes = page_routes(self.hub, static_files(), self.streams)
        app = application(looker, self.access, Exposition(), more=[routes])
        async with serving(app, Listening()) as port, aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{port}"

    def run(self, use: Use) -> None:
        async def whole() -> None:
            async with self.serving() as (session, base):
                await asyncio.wait_for(use(session, base), 60)

        asyncio.run(whole())
