"""The leader's HTTP server: agents connect by WebSocket; `ndctl cancel`, `ndctl snapshot` and
`ndctl profile` send requests.

All prove that they know the job's secret.
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import WSCloseCode, web
from msgspec import Struct

from orchestrator.agent.connection import Line
from orchestrator.agent.handshake import challenge, proved
from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.messages.agent_protocol import (
    AGENT_PATH,
    CANCEL_PATH,
    PROFILE_PATH,
    REPORT_BYTES,
    STACKS_PATH,
    Claim,
    ProfileWish,
    Purpose,
    RankProfiles,
    RankStacks,
    Register,
)
from orchestrator.contract.read_json import read_json
from orchestrator.errors import JobError
from orchestrator.job_secret import JobSecret, server_context
from orchestrator.leader.agent_sessions import report_in
from orchestrator.leader.tls_port import Door, Visitor

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""Limit for open requests to end when the leader exits."""
BODY_BYTES = 64 << 10
PURPOSES: dict[str, Purpose] = {
    AGENT_PATH: "agent",
    CANCEL_PATH: "cancel",
    STACKS_PATH: "stacks",
    PROFILE_PATH: "profile",
}
CLAIM = web.RequestKey("claim", Claim)

Listen = Callable[[Register, Line], Awaitable[None]]
"""Handles an agent's messages until it disconnects. Raises ValueError or TypeError for a message
that is not a report."""


class Questions(Struct, frozen=True, kw_only=True):
    """What a person may ask a leader about ranks. Both raise JobError if none run now."""

    stacks: Callable[[], Awaitable[RankStacks]]
    """Asks where all ranks are."""
    profiles: Callable[[ProfileWish], Awaitable[RankProfiles]]
    """Has some ranks profiled."""


class LeaderServer:
    def __init__(
        self,
        secret: JobSecret,
        launch: int,
        listen: Listen,
        cancel: Callable[[str], object],
        questions: Questions,
    ) -> None:
        self.secret = secret
        self.launch = launch
        self.listen = listen
        self.cancel = cancel
        self.questions = questions
        self.runner: web.AppRunner | None = None
        self.door: Door | None = None

    async def open(self, bind: str, port: int, folder: Path) -> int:
        """Listen at `port`, or at any other port if that one is taken. Returns the port. Raises
        OSError.

        Args:
            folder: for the certificate; only this process may enter it.
        """
        self.runner = web.AppRunner(self.application(), shutdown_timeout=CLOSE_S)
        await self.runner.setup()
        assert self.runner.server is not None
        self.door = Door(self.runner.server, server_context(self.secret, folder))
        try:
            return self.door.open(bind, port)
        except OSError as exc:
            # The kernel may choose any port already, so trying another one would not help.
            if port == 0:
                raise
            log.warning("port %s is not available, using another one: %s", port, exc)
            return self.door.open(bind, 0)

    async def close(self) -> None:
        if self.door is not None:
            await self.door.close()
        if self.runner is not None:
            await self.runner.cleanup()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._authenticate], client_max_size=BODY_BYTES)
        app.router.add_get(AGENT_PATH, self._agent)
        app.router.add_post(CANCEL_PATH, self._cancel)
        app.router.add_post(STACKS_PATH, self._stacks)
        app.router.add_post(PROFILE_PATH, self._profile)
        return app

    @web.middleware
    async def _authenticate(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        visitor = request.protocol
        assert isinstance(visitor, Visitor)
        given = request.headers.get("Authorization")
        if given is None:  # every client asks first without a proof, to get the challenge
            return _ask_for_proof(visitor, "prove that you know the job's secret")
        nonce = visitor.take_nonce()
        claim = proved(self.secret, nonce, given) if nonce else None
        # The purpose is part of the proof, so a proof of an agent cannot be replayed as a cancel.
        if claim is None or claim.purpose != PURPOSES.get(request.path):
            visitor.door.turned_away("gave an invalid proof")
            return _ask_for_proof(visitor, "the proof is invalid")
        # From here on the time limit for strangers does not apply.
        visitor.entered.set()
        request[CLAIM] = claim
        return await handler(request)

    async def _cancel(self, request: web.Request) -> web.Response:
        # A cancel that was meant for an earlier launch must not end this one.
        if request[CLAIM].launch != self.launch:
            raise web.HTTPConflict(text=f"this is launch {self.launch}")
        try:
            body = read_json(await request.text())
        except (ValueError, LookupError):  # an unknown charset is a LookupError
            body = None
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(text='the body must be {"by": "who cancels"}')
        self.cancel(str(body.get("by", "somebody")))
        return web.Response(status=202, text="cancelling")

    async def _stacks(self, request: web.Request) -> web.Response:
        if request[CLAIM].launch != self.launch:
            raise web.HTTPConflict(text=f"this is launch {self.launch}")
        try:
            taken = await self.questions.stacks()
        except JobError as exc:
            raise web.HTTPConflict(text=exc.message) from exc
        return web.json_response(encode(taken))

    async def _profile(self, request: web.Request) -> web.Response:
        if request[CLAIM].launch != self.launch:
            raise web.HTTPConflict(text=f"this is launch {self.launch}")
        try:
            wish: ProfileWish = decode(ProfileWish, read_json(await request.text()))
        except (ValueError, LookupError, Invalid) as exc:
            raise web.HTTPBadRequest(text=f"this is no request for a profile: {exc}") from exc
        try:
            taken = await self.questions.profiles(wish)
        except JobError as exc:
            raise web.HTTPConflict(text=exc.message) from exc
        return web.json_response(encode(taken))

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(max_msg_size=REPORT_BYTES)
        await ws.prepare(request)
        try:
            register = report_in(await ws.receive())
            # The proof is of one host and one launch. With another host's name the agent could
            # replace its session.
            if not isinstance(register, Register) or not self._is_of(register, request[CLAIM]):
                await ws.close(code=WSCloseCode.POLICY_VIOLATION, message=b"not of this launch")
                return ws
            await self.listen(register, ws)
        # The message is from a defective or older agent. Only its own connection ends.
        except (ValueError, TypeError) as exc:
            log.error("closing a connection after an invalid message: %s", exc)
            await ws.close(code=WSCloseCode.INVALID_TEXT, message=b"not a report")
        return ws

    def _is_of(self, register: Register, claim: Claim) -> bool:
        """Whether the agent is of this launch and registers for the host of its proof."""
        named = (register.agent.host, register.agent.incarnation, register.launch)
        return named == (claim.host, claim.incarnation, claim.launch) == (*named[:2], self.launch)


def _ask_for_proof(visitor: Visitor, why: str) -> web.Response:
    return web.Response(status=401, headers=challenge(visitor.challenge()), text=why)
