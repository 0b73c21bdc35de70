"""How an agent reaches its leader: a seam. Outside the simulation it is a WebSocket over TLS."""

import logging
from http import HTTPStatus
from types import TracebackType
from typing import Protocol, Self

import aiohttp

from orchestrator.agent.handshake import nonce_in, proof_headers
from orchestrator.contract.messages.agent_protocol import AGENT_PATH, ORDER_BYTES, Claim
from orchestrator.job_secret import JobSecret

log = logging.getLogger(__name__)


class WrongLeader(ConnectionError):
    """The server shows a certificate that is not this job's."""


class NotAdmitted(ConnectionError):
    """The leader does not accept the agent's proof."""


class Line(Protocol):
    """One open connection; aiohttp's WebSockets are lines."""

    async def send_str(self, data: str) -> None:
        """Agent and leader send one message at a time. Raises ConnectionError once it is broken."""

    async def receive(self) -> aiohttp.WSMessage:
        """The next message; one that is no text once the other side has closed the line."""

    async def close(self) -> object:
        """Called by the agent when it does not want to hear this leader any more."""


class Connector(Protocol):
    """Opens lines to leaders; the agent enters it once, for as long as it runs."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    async def connect(self, place: str, claim: Claim) -> Line:
        """A line to the leader at `place`, HOST:PORT.

        Raises ConnectionRefusedError where no process listens, WrongLeader, NotAdmitted, and
        another ConnectionError, aiohttp.ClientError or TimeoutError where it cannot be reached.
        """


class WebSockets:
    """The real Connector."""

    def __init__(self, secret: JobSecret) -> None:
        self.secret = secret
        self.pin = aiohttp.Fingerprint(secret.fingerprint)

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.session.close()

    async def connect(self, place: str, claim: Claim) -> aiohttp.ClientWebSocketResponse:
        try:
            return await self._enter(f"https://{place}{AGENT_PATH}", claim)
        except aiohttp.ServerFingerprintMismatch as exc:
            raise WrongLeader(place) from exc
        except aiohttp.ClientConnectorError as exc:
            if isinstance(exc.os_error, ConnectionRefusedError):
                raise ConnectionRefusedError(str(exc)) from exc
            raise
        except aiohttp.WSServerHandshakeError as exc:
            if exc.status == HTTPStatus.UNAUTHORIZED:
                raise NotAdmitted(f"{exc.status}: {exc.message}") from exc
            raise

    async def _enter(self, url: str, claim: Claim) -> aiohttp.ClientWebSocketResponse:
        """The leader has shown the job's certificate before the agent says anything to it."""
        async with self.session.get(url, ssl=self.pin) as answer:
            nonce = nonce_in(answer.headers) or ""
            await answer.read()  # the proof has to go over the same connection
        headers = proof_headers(self.secret, nonce, claim)
        return await self.session.ws_connect(
            url, headers=headers, ssl=self.pin, max_msg_size=ORDER_BYTES
        )
