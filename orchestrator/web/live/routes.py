"""The addresses of pages, of their events, and of what they load."""

from aiohttp import web

from orchestrator.errors import NdctlError
from orchestrator.web.live.hub import Hub
from orchestrator.web.live.static import StaticFiles, type_of
from orchestrator.web.live.streams import Streams
from orchestrator.web.pages.address import ANY, Address
from orchestrator.web.pages.document import document
from orchestrator.web.pages.page import Page
from orchestrator.web.server import NO_CACHE, AddRoutes

KEEP = {"Cache-Control": "private, max-age=86400"}
PAGES = ("/", "/job/{name}", r"/job/{name}/incident/{incident:\d{1,9}}")
HTML = "text/html"


def page_routes(
    hub: Hub, static: StaticFiles, streams: Streams, only: str | None = None
) -> AddRoutes:
    """
    Args:
        only: path of the page of the only job, which is then the first page.
    """

    async def page(request: web.Request) -> web.Response:
        if only is not None and request.path == "/":
            raise web.HTTPFound(only)
        return await _page(request, hub, static)

    async def live(request: web.Request) -> web.StreamResponse:
        return await streams.answer(request, address_of(request))

    async def static_file(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in static.contents:
            raise web.HTTPNotFound
        headers = {"Content-Type": type_of(name), **KEEP}
        return web.Response(body=static.contents[name], headers=headers)

    async def close(app: web.Application) -> None:
        await hub.close()

    def add(app: web.Application) -> None:
        for path in PAGES:
            app.router.add_get(path, page)
            app.router.add_get(f"/live{path}", live, allow_head=False)
        app.router.add_get("/static/{name}", static_file)
        app.on_shutdown.append(close)

    return add


def address_of(request: web.Request) -> Address:
    """Raises HTTPNotFound if the address has a number that is none."""
    known = request.match_info
    incident = known.get("incident")
    name, digest = known.get("name"), request.query.get("in")
    if name == ANY and digest is None:
        raise web.HTTPNotFound
    return Address(
        name=name,
        digest=digest,
        incident=None if incident is None else int(incident),
        everything=name is None and request.query.get("all") == "1",
    )


async def _page(request: web.Request, hub: Hub, static: StaticFiles) -> web.Response:
    try:
        made, at = await hub.page(address_of(request))
    except TimeoutError:
        return still_reading()
    except (OSError, NdctlError) as exc:
        return web.Response(status=500, text=f"the jobs cannot be read: {exc}\n")
    return answer(made, static, at, f"/live{request.rel_url}")


def answer(made: Page, static: StaticFiles, at: str, live: str | None) -> web.Response:
    """`at` and `live`: as for `document`."""
    headers = {"Content-Type": f"{HTML}; charset=utf-8", **NO_CACHE}
    body = document(made, static.version, at, live)
    return web.Response(status=made.status, body=body, headers=headers)


def still_reading() -> web.Response:
    """At the start, while the first look at many jobs takes long, or with a storage that hangs."""
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ndctl</title>'
        '<meta http-equiv="refresh" content="5"></head><body><p>The run directories are still being'
        " read, or their file system does not respond. This page tries again every 5 s.</p></body>"
        "</html>"
    )
    headers = {"Content-Type": f"{HTML}; charset=utf-8", "Retry-After": "5", **NO_CACHE}
    return web.Response(status=503, body=text.encode(), headers=headers)
