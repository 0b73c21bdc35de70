"""Serves the slots of this host to other agents of the job, and takes their copies."""

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ndctl.rank.priority import give_way
from orchestrator.agent.memory.held import Refused
from orchestrator.agent.memory.line import (
    IDLE_S,
    Answer,
    Line,
    Request,
    admit,
    end_connection,
)
from orchestrator.contract.memory.slot_file import BEGIN, Label, header_of, label_of
from orchestrator.job_secret import JobSecret, server_context

log = logging.getLogger(__name__)

KEEPALIVE_S = 60
"""Silence after which the kernel asks whether the other host is there."""
MOST_LINES = 256
"""Connections of partners; more are closed at once."""
MOST_STRANGERS = 256
"""Connections without a proof. One more closes the oldest: a partner gives its proof within
milliseconds, so it is hardly ever the oldest."""


class Store(Protocol):
    """Where the slots are. Called from many threads."""

    def find(self, label: Label) -> int | None:
        """A file that holds this slot, complete. The caller closes it."""

    def begin(self, label: Label, num_bytes: int) -> int:
        """As in `HeldCopies`."""

    def commit(self, file: int, header_bytes: int) -> None: ...

    def end(self, file: int) -> None: ...


class PeerServer:
    def __init__(self, store: Store, secret: JobSecret, launch: int) -> None:
        self.store, self.secret, self.launch = store, secret, launch
        self._listening: socket.socket | None = None
        self._context: ssl.SSLContext | None = None
        self._open: set[socket.socket] = set()
        """Connections of partners."""
        self._strangers: dict[socket.socket, socket.socket] = {}
        """Each accepted connection without a proof -> the same under TLS; the oldest first."""
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def open(self, address: str, folder: Path) -> int:
        """Listen at any port of `address`; returns the port. Raises OSError.

        Args:
            folder: as in `server_context`.
        """
        self._context = server_context(self.secret, folder)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family)
        self._begin(self._accept, self._listening)
        port: int = self._listening.getsockname()[1]
        return port

    def close(self) -> None:
        """Returns when no thread is left."""
        with self._lock:
            self._closed = True
            open_now = [*self._open, *self._strangers.values(), *filter(None, [self._listening])]
        for sock in open_now:
            end_connection(sock)
            sock.close()
        for thread in list(self._threads):
            thread.join(IDLE_S)

    def _begin(self, work: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(sock,), daemon=True)
        with self._lock:
            self._threads = {one for one in self._threads if one.is_alive()} | {thread}
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listening.accept()
            except OSError:  # closed, or no file descriptor is left
                if self._closed:
                    return
                threading.Event().wait(0.5)
                continue
            sock.settimeout(IDLE_S)
            # A partner whose host died says nothing. Its thread ends when the kernel finds out.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                if len(self._strangers) >= MOST_STRANGERS:
                    end_connection(self._strangers.pop(next(iter(self._strangers))))
                self._strangers[sock] = sock
            self._begin(self._serve, sock)

    def _serve(self, plain: socket.socket) -> None:
        give_way()
        sock: socket.socket = plain
        try:
            assert self._context is not None
            sock = tls = self._context.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False
            )
            if not self._moved(plain, tls):
                return
            line = admit(tls, self.secret, self.launch)
            if not self._has_proved(plain, tls):
                return
            while not self._closed:
                # The next slot may come only after a long step.
                sock.settimeout(None)
                request = line.receive(Request)
                sock.settimeout(IDLE_S)
                self._answer(line, request)
        except OSError as exc:
            log.debug("connection of a partner ended: %s", exc)
        finally:
            with self._lock:
                self._strangers.pop(plain, None)
                self._open.discard(sock)
            sock.close()

    def _moved(self, plain: socket.socket, tls: socket.socket) -> bool:
        """`tls` has taken the connection over from `plain`. False: it was to be closed."""
        with self._lock:
            stays = plain in self._strangers and not self._closed
            if stays:
                self._strangers[plain] = tls
            return stays

    def _has_proved(self, plain: socket.socket, tls: socket.socket) -> bool:
        """The connection is a partner's. False: there are too many, or it was to be closed."""
        with self._lock:
            known = self._strangers.pop(plain, None) is not None
            stays = known and len(self._open) < MOST_LINES and not self._closed
            if stays:
                self._open.add(tls)
            return stays

    def _answer(self, line: Line, request: Request) -> None:
        if request.kind == "put":
            self._take(line, request)
        else:
            self._give(line, request.label)

    def _take(self, line: Line, request: Request) -> None:
        try:
            file = self.store.begin(request.label, request.num_bytes)
        except Refused as exc:
            line.send(Answer(why=str(exc)))
            return
        try:
            line.send(Answer())
            line.receive_file(file, request.num_bytes, skip=BEGIN.size)
            # The sender looks whether the slot has changed meanwhile.
            if not line.receive(Answer).why:
                self.store.commit(file, request.header_bytes)
            line.send(Answer(why="" if label_of(file) == request.label else "it is another slot"))
        finally:
            self.store.end(file)

    def _give(self, line: Line, label: Label) -> None:
        file = self.store.find(label)
        if file is None:
            line.send(Answer(why=f"it has no complete slot of rank {label.rank}"))
            return
        try:
            size, header = os.fstat(file).st_size, header_of(file) or b""
            line.send(Answer(num_bytes=size, header_bytes=len(header)))
            line.send_file(file, size, lambda _: None)
            torn = "" if label_of(file) == label else "it was overwritten"
            line.send(Answer(why=torn))
        finally:
            os.close(file)
