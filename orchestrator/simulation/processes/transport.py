"""The transport between agents and leaders over connections of the simulated network."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aiohttp import WSMessage, WSMsgType

from orchestrator.agent.connection import NotAdmitted
from orchestrator.contract.messages.agent_protocol import Claim, Register
from orchestrator.leader.agent_sessions import report_in
from orchestrator.leader.leader import Listen
from orchestrator.leader.leader_server import Questions
from orchestrator.simulation.world.network import Connection

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess

CLOSED = WSMessage(WSMsgType.CLOSED, None, None)
RESET_S = 0.1
"""Seconds until the other end sees that a connection is closed."""


class SimulatedWebsocket:
    """One end of a simulated connection. It has the methods of an aiohttp websocket."""

    def __init__(self, process: "AgentProcess", connection: Connection) -> None:
        self.process, self.connection = process, connection
        self.inbox: asyncio.Queue[WSMessage] = asyncio.Queue()
        self.other: SimulatedWebsocket = self

    async def send_str(self, data: str) -> None:
        if not self.connection.open:
            raise ConnectionResetError("the connection is closed")
        world, host = self.process.world, self.process.host.name
        world.network.send(self.connection, host, partial(self.other.deliver, data))

    def deliver(self, data: str) -> None:
        if self.process.alive:
            self.inbox.put_nowait(WSMessage(WSMsgType.TEXT, data, None))

    async def receive(self) -> WSMessage:
        if not self.connection.open and self.inbox.empty():
            return CLOSED
        return await self.inbox.get()

    async def close(self) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection. Messages in flight are lost; a reachable peer sees the close."""
        if not self.connection.open:
            return
        self.connection.open = False
        self.inbox.put_nowait(CLOSED)
        self.process.world.timeline.after(RESET_S, self._close_other)

    def _close_other(self) -> None:
        if self.process.world.network.reaches(self.connection.one, self.connection.other):
            self.other.inbox.put_nowait(CLOSED)

    def break_now(self) -> None:
        self.inbox.put_nowait(CLOSED)
        self.other.inbox.put_nowait(CLOSED)


class SimulatedServer:
    """The `Server` of a leader."""

    def __init__(
        self,
        process: "AgentProcess",
        listen: Listen,
        cancel: Callable[[str], object],
        questions: Questions,
    ):
        self.process, self.listen, self.cancel = process, listen, cancel
        self.questions = questions
        self.websockets: list[SimulatedWebsocket] = []
        self.port = 0

    async def open(self, bind: str, port: int, folder: object) -> int:
        self.port = self.process.world.next_number()
        self.process.server = self
        return self.port

    async def close(self) -> None:
        self.process.server = None
        for websocket in self.websockets:
            websocket.disconnect()

    def accept(self, websocket: SimulatedWebsocket) -> None:
        self.websockets.append(websocket)
        self.process.loop.create_task(self._serve(websocket))

    async def _serve(self, websocket: SimulatedWebsocket) -> None:
        message = await websocket.receive()
        if message.type is not WSMsgType.TEXT:
            return
        register = report_in(message)
        if isinstance(
            register, Register
        ):  # otherwise messages were reordered, and the agent tries again
            await self.listen(register, websocket)
        websocket.disconnect()


class SimulatedConnector:
    """The `Connector` of an agent."""

    def __init__(self, process: "AgentProcess") -> None:
        self.process = process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    async def connect(self, place: str, claim: Claim) -> SimulatedWebsocket:
        world, mine = self.process.world, self.process.host.name
        host, _, port = place.partition(":")
        if not world.network.reaches(mine, host) or not world.hosts[host].up:
            never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            await never  # the agent has a timeout of its own
        agents = world.hosts[host].agents
        servers = [one.server for one in agents if one.alive and one.server]
        server = next((one for one in servers if one.port == int(port)), None)
        if server is None:
            raise ConnectionRefusedError(f"no process listens at {place}")
        if claim.launch != server.process.launch:
            raise NotAdmitted(f"{place} leads another launch")
        connection = Connection(mine, host)
        websocket, other = (
            SimulatedWebsocket(self.process, connection),
            SimulatedWebsocket(server.process, connection),
        )
        websocket.other, other.other = other, websocket
        connection.on_break = websocket.break_now
        self.process.websockets.append(websocket)
        server.accept(other)
        return websocket
