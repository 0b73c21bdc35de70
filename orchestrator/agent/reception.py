"""The leader's door: agents come in by WebSocket, and whoever cancels by a request, both with the
job's token.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import WSCloseCode, web

from orchestrator.agent.connections import report_in
from orchestrator.contract.protocol import AGENT_PATH, CANCEL_PATH, Register

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""For requests to end once nobody is led any more."""

Listen = Callable[[Register, web.WebSocketResponse], Awaitable[None]]
"""Take in what an agent says until it goes. May raise ValueError or TypeError: no report."""


class Reception:
    def __init__(
        self, token: str, launch: int, listen: Listen, cancel: Callable[[str], None]
    ) -> None:
        self.token = token
        self.launch = launch
        self.listen = listen
        self.cancel = cancel
        self.runner: web.AppRunner | None = None

    async def open(self, bind: str, port: int) -> int:
        """At `port`, if it is free; where else, is returned. Raises OSError."""
        self.runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=CLOSE_S)
        await self.runner.setup()
        await _listen_at(self.runner, bind, port)
        taken: int = self.runner.addresses[0][1]
        return taken

    async def close(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._authenticate])
        app.router.add_get(AGENT_PATH, self._agent)
        app.router.add_post(CANCEL_PATH, self._cancel)
        return app

    @web.middleware
    async def _authenticate(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        sent = given.encode(errors="surrogateescape")
        if not hmac.compare_digest(sent, f"Bearer {self.token}".encode()):
            raise web.HTTPUnauthorized(text="this job's token is needed")
        return await handler(request)

    async def _cancel(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(text='the body must be {"by": "who cancels"}')
        self.cancel(str(body.get("by", "somebody")))
        return web.Response(status=202, text="cancelling")

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(max_msg_size=0)
        await ws.prepare(request)
        try:
            register = report_in(await ws.receive())
            if not isinstance(register, Register) or register.launch != self.launch:
                await ws.close(code=WSCloseCode.POLICY_VIOLATION, message=b"not of this launch")
                return ws
            await self.listen(register, ws)
        except (ValueError, TypeError) as exc:
            log.error("a message that cannot be read, closing its connection: %s", exc)
            await ws.close(code=WSCloseCode.INVALID_TEXT, message=b"not a report")
        return ws


async def _listen_at(runner: web.AppRunner, bind: str, port: int) -> None:
    try:
        await web.TCPSite(runner, bind, port).start()
    except OSError as exc:
        if port == 0:
            raise
        log.warning("port %s cannot be had, so any other is taken: %s", port, exc)
        await web.TCPSite(runner, bind, 0).start()
