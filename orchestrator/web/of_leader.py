"""The server inside a leader, for its own job. It never stops or slows the job: if it cannot start,
the leader's log says why.

Pages and metrics cost the leader bounded time, however many clients there are: see `live/hub.py`,
and the limits below."""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.reporting.web_spec import WebSpec
from orchestrator.dashboard.command_hints import Commands
from orchestrator.job_secret import JobSecret, server_context
from orchestrator.posix.run_with_timeout import within
from orchestrator.posix.secret_ref import NoSecret, secret_of
from orchestrator.seams import Clock
from orchestrator.web.access import Access
from orchestrator.web.fleet import Fleet, Place
from orchestrator.web.live.hub import Hub
from orchestrator.web.live.routes import page_routes
from orchestrator.web.live.static import static_files
from orchestrator.web.live.streams import Streams
from orchestrator.web.metrics.exposition import Exposition
from orchestrator.web.pages.address import job_path
from orchestrator.web.pages.render import Renderer
from orchestrator.web.server import Figures, Listening, Looker, application, serving

log = logging.getLogger(__name__)

MOST_STREAMS, MOST_CONNECTIONS = 16, 64
"""Pages that are open, and connections, at the same time. The leader needs its time and its files
for its agents."""
READ_S = 10.0
"""Limit for reading the token."""


class LeaderWeb(Struct, frozen=True, kw_only=True):
    """What the server needs of its leader."""

    run_dir: RunDir
    secret: JobSecret
    folder: Path
    """For the certificate; only this process may enter it."""
    figures: Figures


@asynccontextmanager
async def serving_job(
    spec: WebSpec, leader: LeaderWeb, environ: Mapping[str, str], clock: Clock
) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        try:
            app, listening = await _prepared(spec, leader, environ, clock)
            port = await stack.enter_async_context(serving(app, listening))
            log.info("serving pages and metrics at %s port %s", spec.bind, port)
        except (OSError, NoSecret) as exc:  # TimeoutError is an OSError
            log.warning("serving no pages and no metrics: %s", exc or "reading the token timed out")
        yield


async def _prepared(
    spec: WebSpec, leader: LeaderWeb, environ: Mapping[str, str], clock: Clock
) -> tuple[web.Application, Listening]:
    token = None
    if spec.token is not None:
        token = await within(READ_S, secret_of, spec.token, environ)
    names = frozenset({"localhost", spec.bind, f"[{spec.bind}]"}) if token is None else None
    path = leader.run_dir.path
    root = ("--run-root", str(path.parent))
    commands = Commands(job=path.name, spec=str(leader.run_dir.spec), root=root)
    place = Place(run_dir=leader.run_dir, commands=lambda: commands)
    fleet = Fleet(lambda: [place], clock, led=True)
    looker = Looker(fleet.look)
    hub = Hub(fleet, looker, Renderer())
    pages = page_routes(
        hub, static_files(), Streams(hub, MOST_STREAMS), only=job_path(path, alone=True)
    )
    tls = None if spec.is_private else server_context(leader.secret, leader.folder)
    app = application(
        looker, Access(token=token, names=names), Exposition(), leader.figures, more=[pages]
    )
    return app, Listening(bind=spec.bind, port=spec.port, tls=tls, most=MOST_CONNECTIONS)
