"""Who may read: those who know the token, or users of this machine if the server asks for none.

A browser keeps the token in a cookie, so it is in the address only once. It does not send the
cookie when a person follows a link from another site, such as a message about an incident. The
answer is then a page that opens the same address again, and that request comes from this site.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec import Struct

COOKIE = "ndctl_token_"
"""With the port behind it: browsers send a cookie to all ports of a host, and each server has its
own token."""
AGAIN = """\
<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ndctl</title>\
<meta http-equiv="refresh" content="0"></head><body></body></html>
"""
HOW = """\
open the address that `ndctl serve` printed, or send the header Authorization: Bearer TOKEN
"""
MOST_SAID = 100
"""Characters of a header that are kept."""
LOCAL_NAMES = ("localhost",)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Text of jobs is escaped. If it were not, a browser would still run none of it."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # without a referrer, browsers hide where a form comes from
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Access(Struct, frozen=True, kw_only=True):
    token: str | None = None
    """None: no token is needed."""
    names: frozenset[str] | None = None
    """Names and addresses by which a browser may ask; None: any. Without a token this must be
    given: else a web page whose name resolves to 127.0.0.1 could read the answers (DNS rebinding).
    """


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of this machine that no other machine reaches."""
    if host in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def sender(request: web.Request) -> str:
    """Who sent a request, as far as it is known: the address, and what a proxy says. Only a proxy
    on this machine is believed, because anybody else may send its headers too."""
    address = request.remote or ""
    if address and not is_loopback(address):
        return f"someone at {address}"
    user, before = (_said(request, name) for name in ("X-Forwarded-User", "X-Forwarded-For"))
    if user or before:
        at = f" at {before}" if before else ""
        return f"{user or 'someone'}{at}, as the proxy says,"
    return "someone on this machine"


def _said(request: web.Request, header: str) -> str:
    text = request.headers.get(header, "")[:MOST_SAID]
    return "".join(one for one in text if one.isprintable())


def guarded(access: Access) -> Middleware:
    """Lets only permitted requests pass."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _answer(access, request, handler)

    return guard


async def protect(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of each response before it is sent."""
    response.headers.update(HEADERS)


async def _answer(access: Access, request: web.Request, handler: Handler) -> web.StreamResponse:
    if access.names is not None and _host(request) not in access.names:
        return web.Response(status=421, text="this server has another name\n")
    if access.token is None:
        return await _handled(request, handler)
    if (given := request.query.get("token")) is not None and _is(access.token, given):
        return _remembering(request, given)
    if not _is(access.token, _shown(request)):
        headers = {"WWW-Authenticate": "Bearer", "Cache-Control": "no-store"}
        if _follows_a_link(request):
            return web.Response(status=401, text=AGAIN, content_type="text/html", headers=headers)
        return web.Response(status=401, text=HOW, headers=headers)
    return await _handled(request, handler)


def _follows_a_link(request: web.Request) -> bool:
    """Whether a browser may have kept its cookie back, because a link of another site led here."""
    asked = request.headers.get
    elsewhere = asked("Sec-Fetch-Site") == "cross-site"
    return elsewhere and asked("Sec-Fetch-Mode") == "navigate" and request.method == "GET"


async def _handled(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPFound as exc:
        return web.Response(status=exc.status, headers={"Location": str(exc.location)})
    except web.HTTPException as exc:  # without aiohttp's own words
        return web.Response(status=exc.status, text=f"{exc.reason}\n")


def _host(request: web.Request) -> str:
    host = request.host
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _cookie(request: web.Request) -> str:
    """The port is the one that the browser knows, for example that of a tunnel."""
    _, _, port = request.host.rpartition(":")
    return f"{COOKIE}{port if port.isdecimal() else 'default'}"


def _shown(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else request.cookies.get(_cookie(request), "")


def _is(token: str, given: str) -> bool:
    return hmac.compare_digest(token.encode(), given.encode(errors="surrogateescape"))


def _remembering(request: web.Request, token: str) -> web.Response:
    """The same address without the token. The browser sends it as a cookie from now on."""
    query = [(key, value) for key, value in request.query.items() if key != "token"]
    # One slash: with two the browser would take what follows for the name of another server.
    there = "/" + str(request.rel_url.with_query(query)).lstrip("/")
    response = web.Response(status=303, headers={"Location": there})
    secure = request.secure
    response.set_cookie(_cookie(request), token, httponly=True, samesite="Strict", secure=secure)
    return response
