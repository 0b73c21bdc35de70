"""Servers that get messages: real HTTP and SMTP on this machine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Hook:
    """An HTTP server that answers with these codes in turn, then with 200; 0: never."""

    codes: list[int] = field(default_factory=list)
    got: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    port: int = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/{tail:.*}", self._take)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield f"http://127.0.0.1:{self.port}/hook/s3cret-path"
        finally:
            await runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        code = self.codes.pop(0) if self.codes else 200
        if code == 0:
            await asyncio.sleep(3600)
        if code < 300:
            self.got.append(await request.json())
            self.ids.append(request.headers["Idempotency-Key"])
        return web.Response(status=code)


@dataclass
class MailServer:
    """Speaks as much SMTP as smtplib needs (RFC 5321). `refuses` maps a verb to an answer."""

    refuses: dict[str, str] = field(default_factory=dict)
    mails: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        talks: list[asyncio.Task[None]] = []

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            talks.append(asyncio.create_task(self._talk(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]
            await asyncio.gather(*talks)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(text: str) -> None:
            writer.write(f"{text}\r\n".encode())

        say("220 here")
        while line := (await reader.readline()).decode():
            verb = line.split()[0].upper()
            if verb in self.refuses:
                say(self.refuses[verb])
            elif verb == "DATA":
                say("354 go on")
                text = b""
                while (row := await reader.readline()) != b".\r\n":
                    text += row
                self.mails.append(text.decode())
                say("250 taken")
            elif verb == "QUIT":
                say("221 bye")
                break
            else:
                say("250 ok")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)
