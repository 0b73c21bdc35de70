"""Who may read: those who know the token, or users of this machine if the server asks for none.

A browser keeps the token in a cookie, so it is in the address only once.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec import Struct

COOKIE = "ndctl_token"
LOCAL_NAMES = ("localhost",)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Text of jobs is escaped. If it were not, a browser would still run none of it."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
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


def guarded(access: Access) -> Middleware:
    """Lets only permitted requests pass."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await _answer(access, request, handler)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    return guard


async def _answer(access: Access, request: web.Request, handler: Handler) -> web.StreamResponse:
    if access.names is not None and _host(request) not in access.names:
        return web.Response(status=421, text="this server has another name\n")
    if access.token is None:
        return await _handled(request, handler)
    if (given := request.query.get("token")) is not None and _is(access.token, given):
        return _remembering(request, given)
    if not _is(access.token, _shown(request)):
        return web.Response(
            status=401,
            text="open the address that `ndctl serve` printed, or send the header"
            " Authorization: Bearer TOKEN\n",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return await _handled(request, handler)


async def _handled(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as exc:  # 404 and 405 need the headers too
        return web.Response(status=exc.status, text=f"{exc.reason}\n")


def _host(request: web.Request) -> str:
    host = request.host
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _shown(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")


def _is(token: str, given: str) -> bool:
    return hmac.compare_digest(token.encode(), given.encode(errors="surrogateescape"))


def _remembering(request: web.Request, token: str) -> web.Response:
    """The same address without the token. The browser sends it as a cookie from now on."""
    query = [(key, value) for key, value in request.query.items() if key != "token"]
    there = str(request.rel_url.with_query(query))
    response = web.Response(status=303, headers={"Location": there})
    secure = request.secure
    response.set_cookie(COOKIE, token, httponly=True, samesite="Strict", secure=secure)
    return response
