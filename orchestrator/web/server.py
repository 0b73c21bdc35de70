"""The HTTP server: `/metrics` and the pages, at a TCP port or a Unix socket."""

import asyncio
import logging
import math
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.errors import NdctlError
from orchestrator.posix.run_with_timeout import Lane, look_at_error, within
from orchestrator.web.access import Access, guarded, protect
from orchestrator.web.fleet import FleetState
from orchestrator.web.metrics.exposition import Exposition
from orchestrator.web.refusals import Connection, Refusals

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""Limit for open requests to end when the server closes."""
LOOK_S = 9.0
"""Limit of a look at all jobs. Prometheus waits 10 s for a scrape, unless it is told otherwise."""
OLD_S = 10.0
"""A request waits for a new look if the last one is older."""
FRESH_S, SCRAPE_S = 0.9, 2.0
"""A scrape gets the state of the last look if that is younger than `FRESH_S`, and does not wait
longer for a new one than `SCRAPE_S`."""
TEXTFILE_S = 15.0
"""Interval at which the file for node_exporter is written: the usual interval of scrapes."""
NO_CACHE = {"Cache-Control": "no-store"}


class Listening(Struct, frozen=True, kw_only=True):
    bind: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    socket: Path | None = None
    """Path of a Unix socket in place of the port. Only the user may connect."""
    tls: ssl.SSLContext | None = None
    most: int = 1024
    """Connections at the same time; further ones are closed at once."""


AddRoutes = Callable[[web.Application], None]
Figures = Callable[[], Mapping[str, Sequence[float]]]
"""Figures of all ranks, as of `Monitor.rank_figures`."""


class Looker:
    """Looks at the jobs for all requests: one look at a time, in a thread that may hang with the
    storage. A request that comes meanwhile waits for the same look."""

    def __init__(self, look: Callable[[], FleetState]) -> None:
        self.look = look
        self.state: FleetState | None = None
        """What the last look saw, even if nothing waited for its end."""
        self.looked_at = self.took_s = 0.0
        self.looking: asyncio.Task[FleetState] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the last look; infinite before the first."""
        if self.state is None:
            return math.inf
        return asyncio.get_running_loop().time() - self.looked_at

    async def __call__(self, seconds: float, fresh_s: float = 0.0) -> FleetState:
        """The state of the jobs.

        Args:
            seconds: limit. The look itself goes on.
            fresh_s: a state that is not older will do.

        Raises:
            TimeoutError: storage does not respond.
            OSError, NdctlError: the jobs cannot be listed.
        """
        if self.state is not None and self.age_s < fresh_s:
            return self.state
        if self.looking is None or self.looking.done():
            self.looking = asyncio.create_task(self._look())
            self.looking.add_done_callback(look_at_error)
        return await asyncio.wait_for(asyncio.shield(self.looking), seconds)

    async def recent(self, seconds: float, fresh_s: float) -> FleetState:
        """As a call; but after `seconds` a state will do that is not older than `OLD_S`."""
        known, age_s = self.state, self.age_s
        if known is None or age_s > OLD_S:
            return await self(LOOK_S, fresh_s)
        try:
            return await self(seconds, fresh_s)
        except TimeoutError:
            return known

    async def _look(self) -> FleetState:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.state = await within(None, self.look)
        self.looked_at, self.took_s = loop.time(), loop.time() - began
        return self.state


def application(
    looker: Looker,
    access: Access,
    exposition: Exposition,
    figures: Figures = dict,
    more: Sequence[AddRoutes] = (),
) -> web.Application:
    """
    Args:
        figures: of the ranks of the only job.
        more: functions that add further routes.
    """
    app = web.Application(middlewares=[guarded(access)], client_max_size=1 << 10)
    app.on_response_prepare.append(protect)

    async def metrics(request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        try:
            state = await looker.recent(SCRAPE_S, FRESH_S)
            said = await exposition.lane.run(LOOK_S, exposition.text, state, accept, figures())
        except (OSError, NdctlError) as exc:  # TimeoutError is an OSError
            return web.Response(status=503, text=f"{exc or 'the storage does not respond'}\n")
        body, content_type = said
        return web.Response(body=body, headers={"Content-Type": content_type, **NO_CACHE})

    app.router.add_get("/metrics", metrics)
    for add in more:
        add(app)
    return app


@asynccontextmanager
async def serving(app: web.Application, listening: Listening) -> AsyncIterator[int]:
    """Serve until the block ends. Yields the port; 0 for a Unix socket.

    Raises:
        OSError: the port or the socket cannot be opened.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    assert runner.server is not None
    server, refusals = None, Refusals("the port of the pages")
    try:
        server = await _listen(_limited(runner.server, listening.most, refusals), listening)
        yield 0 if listening.socket is not None else server.sockets[0].getsockname()[1]
    finally:
        if server is not None:
            server.close()
        await runner.cleanup()
        refusals.close()
        if server is not None and listening.socket is not None:
            listening.socket.unlink(missing_ok=True)


async def _listen(accept: Callable[[], asyncio.Protocol], listening: Listening) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    if listening.socket is None:
        where = (listening.bind, listening.port)
        return await loop.create_server(accept, *where, ssl=listening.tls)
    # Between bind and chmod others could connect, so the socket is made without their rights.
    before = os.umask(0o177)
    try:
        return await loop.create_unix_server(accept, listening.socket)
    finally:
        os.umask(before)


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _limited(server: web.Server, most: int, refusals: Refusals) -> Callable[[], asyncio.Protocol]:
    return lambda: Connection(server, refusals) if len(server.connections) < most else _Refused()


async def keep_textfile(looker: Looker, exposition: Exposition, path: Path) -> None:
    """Write the file for node_exporter again and again."""
    writing = Lane()
    while True:
        try:
            text, _ = await exposition.lane.run(LOOK_S, exposition.text, await looker(LOOK_S), "")
            await writing.run(LOOK_S, write_whole, path, text)
        except (OSError, NdctlError) as exc:  # TimeoutError is an OSError
            log.warning("failed to write metrics to %s: %s", path, exc or "timed out")
        await asyncio.sleep(TEXTFILE_S)
