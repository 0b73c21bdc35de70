"""Server-sent events: what changed on a page that is open."""

import asyncio
import contextlib
import socket

from aiohttp import web

from orchestrator.web.live.hub import Hub, Version
from orchestrator.web.pages.address import Address

MOST_STREAMS = 256
"""Pages that are open at the same time. More get 503 and try again."""
BEAT_S = 5.0
"""A stream says something at least so often, so that both sides notice when the other is gone."""
WRITE_S = 20.0
"""A client that takes nothing for so long is dropped."""
MOST_UNREAD = 1 << 18
"""Bytes that the kernel keeps for a client that does not read. Its own limit is megabytes."""
HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # a proxy such as nginx must pass each event on at once
}


class Streams:
    def __init__(self, hub: Hub, most: int = MOST_STREAMS) -> None:
        self.hub, self.most = hub, most
        self.open = 0

    async def answer(self, request: web.Request, address: Address) -> web.StreamResponse:
        if self.open >= self.most:
            text = f"{self.most} pages are open already; this one shows the state at its start\n"
            return web.Response(status=503, text=text, headers={"Retry-After": "30"})
        response = web.StreamResponse(headers=HEADERS)
        self.open += 1
        try:
            async with self.hub.watching(address):
                await response.prepare(request)
                _limit_buffer(request)
                # TimeoutError: a slow client. ConnectionError: a client that went away.
                with contextlib.suppress(TimeoutError, ConnectionError):
                    await self._send(response, address)
        finally:
            self.open -= 1
            if request.transport is not None:
                request.transport.abort()  # what a slow client did not take is not waited for
        return response

    async def _send(self, response: web.StreamResponse, address: Address) -> None:
        sent: Version | None = None
        while True:
            number = 0 if sent is None else sent.number
            version = await self.hub.after(address, number, BEAT_S)
            if version is None:
                await _write(response, b": still here\n\n")
                continue
            await _write(response, await self._message(sent, version))
            sent = version

    async def _message(self, sent: Version | None, version: Version) -> bytes:
        kind = "problem" if version.problem else "at"
        text = f"event: {kind}\ndata: {version.at}\n\n".encode()
        if version.page is None or (sent is not None and sent.page is version.page):
            return text
        follows = sent is not None and sent.page is not None and sent.number == version.number - 1
        data = version.delta if follows else await self.hub.whole(version.page)
        return b"event: change\ndata: %s\n\n%s" % (data, text) if data else text


def _limit_buffer(request: web.Request) -> None:
    known = None if request.transport is None else request.transport.get_extra_info("socket")
    if known is not None:
        with contextlib.suppress(OSError):
            known.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_UNREAD)


async def _write(response: web.StreamResponse, data: bytes) -> None:
    await asyncio.wait_for(response.write(data), WRITE_S)
