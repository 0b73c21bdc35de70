"""The port of the leader: TLS, and limits for connections without a proof that they are of the job.

Connections that have proved nothing are few, live for seconds, and send little; what they do wrong
is counted, not logged one by one, since the log is on the storage that the whole cluster shares.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from functools import partial

from aiohttp import web

log = logging.getLogger(__name__)
SILENT = logging.getLogger(f"{__name__}.access")
"""aiohttp's log of every request, which is not written."""
SILENT.setLevel(logging.CRITICAL)

ENTER_S = 10.0
"""From the connection to the proof."""
STRANGERS = 256
"""Connections without a proof. The next ones wait in the kernel's queue: thousands of handshakes at
once would all end together, and late. Half a second of the processor is enough for so many."""
GRACE_S = 5.0
"""For which a connection may keep others waiting; then it makes room for them."""
STRANGER_BYTES = 128 << 10
"""What a connection may send before its proof is read: headers, and the body that follows."""
BACKLOG = 4_096
TLS_BUFFER_BYTES = 32 << 10
"""Of each connection, instead of asyncio's 256 KiB, which is half a GiB for 2,048 agents. A record
of TLS has 16 KiB at most."""
RETRY_S = 0.5
TELL_S = 60.0
"""Between two lines of the log on what was turned away."""


class Visitor(web.RequestHandler):
    """One connection, which aiohttp serves."""

    __slots__ = ("door", "entered", "nonce", "sent")

    def __init__(self, door: "Door", server: web.Server) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=SILENT)
        self.door = door
        self.nonce: str | None = None
        """Good for one proof on this connection."""
        self.entered = asyncio.Event()
        """It has proved that it is of the job, or it is gone."""
        self.sent = 0

    def challenge(self) -> str:
        self.nonce = secrets.token_urlsafe(32)
        return self.nonce

    def take_nonce(self) -> str | None:
        nonce, self.nonce = self.nonce, None
        return nonce

    def data_received(self, data: bytes) -> None:
        if not self.entered.is_set():
            self.sent += len(data)
            if self.sent > STRANGER_BYTES:
                self.door.turned_away("sent too much before any proof")
                self.abort()
                return
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.entered.set()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:  # a defect of ours, which is to be seen
            return super().handle_error(request, status, exc, message)
        self.door.turned_away("sent what is no HTTP request")
        refusal = web.Response(status=status, text="this is no request")
        refusal.force_close()
        return refusal

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Door:
    """Lets connections in, one task each until it has proved what it is."""

    def __init__(self, server: web.Server, context: ssl.SSLContext) -> None:
        self.server = server
        self.context = context
        self.strangers: dict[asyncio.Task[None], float] = {}
        """And when each came, by the loop's time; the oldest first."""
        self.one_less = asyncio.Event()
        self.listening: socket.socket | None = None
        self.accepting: asyncio.Task[None] | None = None
        self.refusals = Refusals()

    def open(self, bind: str, port: int) -> int:
        """Listen at `port`; the port, where that was 0. Raises OSError."""
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
        self.listening = socket.create_server((bind, port), family=family, backlog=BACKLOG)
        self.listening.setblocking(False)
        self.accepting = asyncio.create_task(self._accept(self.listening))
        taken: int = self.listening.getsockname()[1]
        return taken

    async def close(self) -> None:
        tasks = [*self.strangers, *filter(None, [self.accepting])]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # a leader that is closing may be cancelled once more
            if self.listening is not None:
                self.listening.close()
            self.refusals.close()

    def turned_away(self, why: str) -> None:
        self.refusals.count(why)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._have_room()
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as exc:  # no file descriptor is left: those that are open go on
                self.turned_away(f"could not be accepted: {exc.strerror}")
                await asyncio.sleep(RETRY_S)
                continue
            visitor = Visitor(self, self.server)
            task = asyncio.create_task(self._meet(visitor, sock))
            self.strangers[task] = loop.time()
            task.add_done_callback(partial(self._met, visitor, sock))
            # One that is there already is accepted without a pause, and the others have to go on.
            await asyncio.sleep(0)

    async def _have_room(self) -> None:
        while len(self.strangers) >= STRANGERS:
            oldest, came = next(iter(self.strangers.items()))
            left = came + GRACE_S - asyncio.get_running_loop().time()
            if left <= 0:
                del self.strangers[oldest]
                oldest.cancel()
                self.turned_away("had to make room for later ones")
                continue
            self.one_less.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.one_less.wait(), left)

    async def _meet(self, visitor: Visitor, sock: socket.socket) -> None:
        """Until it has proved what it is, or its time is over."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ENTER_S):
                await loop.connect_accepted_socket(lambda: visitor, sock, ssl=self.context)
                await visitor.entered.wait()
        except TimeoutError:
            self.turned_away("proved nothing in time")
        except OSError:  # an SSL error is one
            self.turned_away("spoke no TLS of ours")

    def _met(self, visitor: Visitor, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self.strangers.pop(task, None)
        self.one_less.set()
        if not visitor.entered.is_set():
            visitor.abort()
            sock.close()


class Refusals:
    """What was turned away, told once a minute at most."""

    def __init__(self, tell: Callable[[str], None] = log.warning) -> None:
        self.counts: Counter[str] = Counter()
        self.total = 0
        self.tell = tell
        self.later: asyncio.TimerHandle | None = None

    def count(self, why: str) -> None:
        self.counts[why] += 1
        self.total += 1
        if self.later is None:
            self.later = asyncio.get_running_loop().call_later(TELL_S, self._tell_more)
            self._tell()

    def close(self) -> None:
        if self.later is not None:
            self.later.cancel()
        self._tell()

    def _tell_more(self) -> None:
        self.later = None
        if self.counts:
            self.later = asyncio.get_running_loop().call_later(TELL_S, self._tell_more)
            self._tell()

    def _tell(self) -> None:
        if self.counts:
            found = ", ".join(f"{count} {why}" for why, count in sorted(self.counts.items()))
            self.tell(f"turned away at the leader's port: {found}")
            self.counts.clear()
