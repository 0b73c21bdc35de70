"""Sends slots of this host to partners, and fetches slots from them."""

import os
import threading
from collections.abc import Sequence

from orchestrator.agent.memory.digest import is_sound
from orchestrator.agent.memory.line import Answer, Broken, Limit, Line, Request, connect
from orchestrator.contract.memory.peers import Peer, Wanted
from orchestrator.contract.memory.slot_file import (
    BEGIN,
    Label,
    clear,
    complete,
    header_of,
    label_of,
)
from orchestrator.contract.messages.agent_protocol import Claim
from orchestrator.job_secret import JobSecret


class Damaged(Broken):
    """The partner's copy is not what the rank wrote."""


class Stopped(Exception):
    """The attempt is over, so nothing is sent any more."""


class PeerClient:
    """Called from several threads. It keeps a connection for each thread and partner."""

    def __init__(self, secret: JobSecret, claim: Claim) -> None:
        self.secret, self.claim = secret, claim
        self.limit = Limit()
        self.stopped = threading.Event()
        self._idle: dict[Peer, list[Line]] = {}
        self._busy: set[Line] = set()
        self._lock = threading.Lock()

    def put(self, file: int, label: Label, peer: Peer) -> None:
        """Copy the slot in `file` to `peer`.

        Raises:
            OSError: the partner is unreachable or refuses; the message says why.
            Stopped: `stop` was called.
        """
        size, header = os.fstat(file).st_size, header_of(file) or b""
        request = Request(kind="put", label=label, num_bytes=size, header_bytes=len(header))
        line = self._line(peer)
        try:
            line.send(request)
            _accepted(line.receive(Answer))
            line.send_file(file, size, self._rest)
            torn = "" if label_of(file) == label else "it was overwritten"
            line.send(Answer(why=torn))
            _accepted(line.receive(Answer))
        except BaseException:
            self._drop(line)
            raise
        self._keep(peer, line)

    def get(self, wanted: Wanted, peer: Peer, file: int) -> None:
        """Fetch a slot from `peer` into `file`, which is complete then. Raises OSError."""
        line = self._line(peer)
        try:
            line.send(Request(kind="get", label=wanted.label))
            found = line.receive(Answer)
            _accepted(found)
            clear(file)
            if os.fstat(file).st_size != found.num_bytes:
                os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, found.num_bytes)
            line.receive_file(file, found.num_bytes, skip=BEGIN.size)
            _accepted(line.receive(Answer))
            if not is_sound(file, found.header_bytes):
                raise Damaged(f"the copy of rank {wanted.rank} has changed since it was made")
            complete(file, found.header_bytes)
            if label_of(file) != wanted.label:
                clear(file)
                raise Broken(f"{peer.host} sent another slot than that of rank {wanted.rank}")
        except BaseException:
            self._drop(line)
            raise
        self._keep(peer, line)

    def _rest(self, num_bytes: int) -> None:
        if self.stopped.wait(self.limit.passed(num_bytes)):
            raise Stopped

    def stop(self) -> None:
        """End what is being sent. A partner whose host has died would keep a thread waiting."""
        self.stopped.set()
        with self._lock:
            for line in self._busy:
                line.interrupt()

    def _line(self, peer: Peer) -> Line:
        with self._lock:
            idle = self._idle.get(peer)
            line = idle.pop() if idle else None
        if line is None:
            line = connect(peer.address, peer.port, self.secret, self.claim)
        with self._lock:
            self._busy.add(line)
            if self.stopped.is_set():
                line.interrupt()
        return line

    def _keep(self, peer: Peer, line: Line) -> None:
        with self._lock:
            self._busy.discard(line)
            self._idle.setdefault(peer, []).append(line)

    def _drop(self, line: Line) -> None:
        with self._lock:
            self._busy.discard(line)
            line.close()

    def forget(self, but: Sequence[Peer]) -> None:
        """Close the connections to all other agents, and stop no more."""
        with self._lock:
            for peer in set(self._idle) - set(but):
                for line in self._idle.pop(peer):
                    line.close()
        self.stopped.clear()


def _accepted(answer: Answer) -> None:
    if answer.why:
        raise Broken(answer.why)
