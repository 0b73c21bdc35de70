"""How an agent connects to its leader: an interface, implemented by a WebSocket over TLS."""

from http import HTTPStatus
from types import TracebackType
from typing import Protocol, Self

import aiohttp

from orchestrator.agent.handshake import nonce_in, proof_headers
from orchestrator.contract.messages.agent_protocol import AGENT_PATH, ORDER_BYTES, Claim
from orchestrator.job_secret import JobSecret


class WrongLeader(ConnectionError):
    """The server shows a certificate that is not this job's."""


class NotAdmitted(ConnectionError):
    """The leader does not accept the agent's proof."""


class Line(Protocol):
    """One open connection. aiohttp's WebSockets implement it."""

    async def send_str(self, data: str) -> None:
        """Send one message; callers never overlap. Raises ConnectionError if the line is broken."""

    async def receive(self) -> aiohttp.WSMessage:
        """The next message. It is not of type TEXT when the other side has closed the line."""

    async def close(self) -> object:
        """The agent calls this when it is done with this leader."""


class Connector(Protocol):
    """Opens lines to leaders. The agent enters it once, for as long as it runs."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    async def connect(self, place: str, claim: Claim) -> Line:
        """Open a line to the leader at `place` (HOST:PORT).

        Raises:
            ConnectionRefusedError: no process listens there.
            WrongLeader: the leader of another job listens there.
            NotAdmitted: the leader refused the agent's proof.
            ConnectionError, aiohttp.ClientError, TimeoutError: the leader is unreachable.
        """


class WebSockets:
    """The Connector of real agents."""

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
            # aiohttp hides it. The agent must know that the host is up but that no process listens
            # there.
            if isinstance(exc.os_error, ConnectionRefusedError):
                raise ConnectionRefusedError(str(exc)) from exc
            raise
        except aiohttp.WSServerHandshakeError as exc:
            # Any other status is not about the secret: the leader may not be ready, so the agent
            # tries again.
            if exc.status == HTTPStatus.UNAUTHORIZED:
                raise NotAdmitted(f"{exc.status}: {exc.message}") from exc
            raise

    async def _enter(self, url: str, claim: Claim) -> aiohttp.ClientWebSocketResponse:
        # TLS checks the leader's certificate first, so the agent proves nothing to another server.
        async with self.session.get(url, ssl=self.pin) as answer:
            nonce = nonce_in(answer.headers) or ""
            await answer.read()  # keeps the connection open: the nonce is valid only on it
        headers = proof_headers(self.secret, nonce, claim)
        return await self.session.ws_connect(
            url, headers=headers, ssl=self.pin, max_msg_size=ORDER_BYTES
        )
