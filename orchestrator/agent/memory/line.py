"""The connection on which two agents of a job pass slots: TLS, and both know the job's secret.

The client checks the server's certificate, which is the job's, and answers the server's random
number with a proof, as agents do at the leader. Then it sends any number of requests. Each message
is a length and JSON; the bytes of a slot follow without a frame, and without a checksum: TLS
authenticates each record of 16 KiB, so bytes that change on the way break the connection. All calls
block, with a limit for each wait, so they run in threads.
"""

import contextlib
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from orchestrator.contract.memory.slot_file import Label
from orchestrator.contract.messages.agent_protocol import Claim, Proof
from orchestrator.job_secret import JobSecret, client_context, is_pinned, is_proved, prove

IDLE_S = 10.0
"""Longest wait for the other side to send or take anything."""
ENTER_S = 10.0
"""Limit from the connection to the proof."""
CHUNK_BYTES = 64 << 10
"""Bytes that are read and encrypted, or decrypted and written, at once: they stay in the cache."""
MESSAGE_BYTES = 64 << 10
PROOF_BYTES = 4 << 10
LENGTH = struct.Struct("<I")
T = TypeVar("T")


class Request(Struct, frozen=True, kw_only=True):
    kind: Literal["put", "get"]
    label: Label
    num_bytes: int = 0
    """Size of the slot of a `put`."""
    header_bytes: int = 0


class Answer(Struct, frozen=True, kw_only=True):
    why: str = ""
    """Why the request is refused, or why the bytes that were sent are not a slot."""
    num_bytes: int = 0
    """Size of the slot of a `get`."""
    header_bytes: int = 0


class Broken(ConnectionError):
    """The other side does not follow the protocol, or is not of this job."""


class Limit:
    """Holds all threads together to a number of bytes per second, and counts what they send."""

    def __init__(self) -> None:
        self.bytes_per_s: int | None = None
        self.sent = 0
        self._free_at = 0.0
        self._lock = threading.Lock()

    def passed(self, num_bytes: int) -> float:
        """Count bytes that were sent. Returns the seconds to wait before the next ones."""
        with self._lock:
            self.sent += num_bytes
            if self.bytes_per_s is None:
                return 0.0
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_s
            return self._free_at - now


def end_connection(sock: socket.socket) -> None:
    """Threads that use `sock` fail at once."""
    with contextlib.suppress(OSError):
        # Not the method of SSLSocket: it drops TLS first, and another thread might then send the
        # rest of a slot in the clear.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Line:
    """One connection, as either side uses it. All calls raise OSError if it breaks."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock = sock

    def send(self, message: Struct) -> None:
        text = msgspec.json.encode(message)
        self.sock.sendall(LENGTH.pack(len(text)) + text)

    def receive(self, kind: type[T], most: int = MESSAGE_BYTES, until: float | None = None) -> T:
        """The next message.

        Args:
            most: largest number of its bytes.
            until: time (of `time.monotonic`) at which it must be complete. Without it only each
                wait is limited.
        """
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size, until))
        if length > most:
            raise Broken(f"a message of {length} bytes")
        try:
            return msgspec.json.decode(self._exactly(length, until), type=kind)
        except msgspec.MsgspecError as exc:
            raise Broken(f"not a message: {exc}") from exc

    def _exactly(self, num_bytes: int, until: float | None = None) -> bytes:
        data = bytearray(num_bytes)
        self._fill(memoryview(data), until)
        return bytes(data)

    def _fill(self, view: memoryview, until: float | None = None) -> None:
        while view:
            if until is not None:
                self.sock.settimeout(_left(until))
            count = self.sock.recv_into(view)
            if not count:
                raise Broken("the other side closed the connection")
            view = view[count:]

    def send_file(self, file: int, num_bytes: int, rest: Callable[[int], None]) -> None:
        """Send the first bytes of `file`.

        Args:
            rest: called with the bytes of each chunk after it was sent; it waits, or raises.
        """
        buffer = bytearray(min(CHUNK_BYTES, num_bytes))
        # Not mapped: if a rank made the file shorter, touching a map would kill this process.
        for at in range(0, num_bytes, CHUNK_BYTES):
            view = memoryview(buffer)[: min(CHUNK_BYTES, num_bytes - at)]
            if os.preadv(file, [view], at) != len(view):
                raise Broken("the slot became shorter while it was sent")
            self.sock.sendall(view)
            rest(len(view))

    def receive_file(self, file: int, num_bytes: int, skip: int) -> None:
        """Write what comes into `file`, except for the first `skip` bytes."""
        buffer = bytearray(min(CHUNK_BYTES, num_bytes))
        at = 0
        while at < num_bytes:
            view = memoryview(buffer)[: min(CHUNK_BYTES, num_bytes - at)]
            self._fill(view)
            begin = max(0, skip - at)
            os.pwrite(file, view[begin:], at + begin)
            at += len(view)

    def interrupt(self) -> None:
        """Have the thread that uses this connection fail at once."""
        end_connection(self.sock)

    def close(self) -> None:
        self.sock.close()


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left


def connect(address: str, port: int, secret: JobSecret, claim: Claim) -> Line:
    """A connection that both sides trust. Raises OSError."""
    plain = socket.create_connection((address, port), timeout=IDLE_S)
    try:
        sock = client_context().wrap_socket(plain)
    except BaseException:
        plain.close()
        raise
    line = Line(sock)
    try:
        if not is_pinned(secret, sock.getpeercert(binary_form=True)):
            raise Broken(f"{address}:{port} is not an agent of this job")
        nonce = line.receive(str)
        line.send(Proof(claim=claim, mac=prove(secret, nonce, claim)))
    except BaseException:
        line.close()
        raise
    return line


def admit(sock: ssl.SSLSocket, secret: JobSecret, launch: int) -> Line:
    """The server's side of `connect`, from the TLS handshake on. Anybody may connect, so it has a
    time limit. Raises OSError for a client that is not of this job."""
    until = time.monotonic() + ENTER_S
    sock.settimeout(ENTER_S)
    sock.do_handshake()
    line = Line(sock)
    nonce = secrets.token_urlsafe(32)
    text = msgspec.json.encode(nonce)
    sock.sendall(LENGTH.pack(len(text)) + text)
    proof = line.receive(Proof, PROOF_BYTES, until)
    claim = proof.claim
    if claim.purpose != "memory" or claim.launch != launch:
        raise Broken(f"{claim.host} of launch {claim.launch} asks for {claim.purpose}")
    if not is_proved(secret, nonce, claim, proof.mac):
        raise Broken("wrong proof")
    return line
