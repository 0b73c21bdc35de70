"""The leader's port: TLS, and limits for connections that have not proved that they are of the job.

Unproved connections are limited in number, in time and in bytes. Their errors are counted and
logged once a minute, because the log is on storage that the whole cluster shares.
"""

import asyncio
import contextlib
import secrets
import socket
import ssl
from asyncio import sslproto
from functools import partial

from aiohttp import web

from orchestrator.web.refusals import Connection, Refusals

ENTER_S = 10.0
"""Limit from the connection to the proof."""
STRANGERS = 256
"""Most connections without a proof; further ones wait in the kernel's queue. With thousands of
handshakes at once, all of them would be late. This many take half a second of CPU time."""
GRACE_S = 5.0
"""When connections wait in the queue, an unproved one is closed after so long."""
STRANGER_BYTES = 128 << 10
"""Limit of bytes before the proof: headers, and the body after them."""
BACKLOG = 4_096
TLS_BUFFER_BYTES = 32 << 10
"""Buffer of each connection. asyncio's 256 KiB would take half a GiB for 2,048 agents; a TLS record
has at most 16 KiB."""
RETRY_S = 0.5


class Visitor(Connection):
    """One connection that aiohttp serves."""

    __slots__ = ("door", "entered", "nonce", "sent")

    def __init__(self, door: "Door", server: web.Server) -> None:
        super().__init__(server, door.refusals)
        self.door = door
        self.nonce: str | None = None
        """Valid for one proof on this connection."""
        self.entered = asyncio.Event()
        """It has proved that it is of the job, or it is closed."""
        self.sent = 0

    def challenge(self) -> str:
        self.nonce = secrets.token_urlsafe(32)
        return self.nonce

    def take_nonce(self) -> str | None:
        nonce, self.nonce = self.nonce, None
        return nonce

    def data_received(self, data: bytes) -> None:
        # After the proof the limits of aiohttp apply, which count each message for itself.
        if not self.entered.is_set():
            self.sent += len(data)
            if self.sent > STRANGER_BYTES:
                self.door.turned_away("sent too much before any proof")
                self.abort()
                return
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        # A client that leaves without a proof must not keep its place among the strangers until
        # `ENTER_S`.
        self.entered.set()
        super().connection_lost(exc)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Door:
    """Accepts connections, with one task each until the connection has proved that it is of the
    job."""

    def __init__(self, server: web.Server, context: ssl.SSLContext) -> None:
        self.server = server
        self.context = context
        self.strangers: dict[asyncio.Task[None], float] = {}
        """The task of each unproved connection -> when it came (loop time); the oldest first."""
        self.one_less = asyncio.Event()
        self.listening: socket.socket | None = None
        self.accepting: asyncio.Task[None] | None = None
        self.refusals = Refusals("the leader's port")

    def open(self, bind: str, port: int) -> int:
        """Listen at `port`. Returns the port, which the kernel chooses if `port` is 0. Raises
        OSError."""
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        # asyncio has no parameter for the size of the buffer.
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
        finally:  # the task that closes the leader may itself be cancelled
            if self.listening is not None:
                self.listening.close()
            self.refusals.close()

    def turned_away(self, why: str) -> None:
        self.refusals.count(why)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Without a free place the next connection stays in the kernel's queue, where it costs
            # nothing.
            await self._have_room()
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as exc:  # no file descriptor is left; open connections keep working
                self.turned_away(f"could not be accepted: {exc.strerror}")
                await asyncio.sleep(RETRY_S)
                continue
            visitor = Visitor(self, self.server)
            task = asyncio.create_task(self._meet(visitor, sock))
            self.strangers[task] = loop.time()
            task.add_done_callback(partial(self._met, visitor, sock))
            # If a connection is waiting, sock_accept returns without yielding to the loop. Other
            # tasks must run between two connections.
            await asyncio.sleep(0)

    async def _have_room(self) -> None:
        while len(self.strangers) >= STRANGERS:
            oldest, came = next(iter(self.strangers.items()))
            left = came + GRACE_S - asyncio.get_running_loop().time()
            if left <= 0:
                # The task ends only at the next turn of the loop, but its place is free at once.
                del self.strangers[oldest]
                oldest.cancel()
                self.turned_away("had to make room for later ones")
                continue
            self.one_less.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.one_less.wait(), left)

    async def _meet(self, visitor: Visitor, sock: socket.socket) -> None:
        """Return when the connection has proved that it is of the job, or at the time limit."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ENTER_S):
                await loop.connect_accepted_socket(lambda: visitor, sock, ssl=self.context)
                await visitor.entered.wait()
        except TimeoutError:
            self.turned_away("gave no proof in time")
        except OSError:  # SSL errors are OSErrors
            self.turned_away("failed the TLS handshake")

    def _met(self, visitor: Visitor, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self.strangers.pop(task, None)
        self.one_less.set()
        # Before the TLS handshake begins there is no transport to abort, only the socket.
        if not visitor.entered.is_set():
            visitor.abort()
            sock.close()
