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
from orchestrator.simulation.world.network import Line

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess

CLOSED = WSMessage(WSMsgType.CLOSED, None, None)
RESET_S = 0.1
"""Seconds until the other end sees that a connection is closed."""


class End:
    """One end of a connection, which stands for a websocket."""

    def __init__(self, process: "AgentProcess", line: Line) -> None:
        self.process, self.line = process, line
        self.came: asyncio.Queue[WSMessage] = asyncio.Queue()
        self.other: End = self

    async def send_str(self, data: str) -> None:
        if not self.line.open:
            raise ConnectionResetError("the connection is closed")
        world, host = self.process.world, self.process.host.name
        world.network.send(self.line, host, partial(self.other.hears, data))

    def hears(self, data: str) -> None:
        if self.process.alive:
            self.came.put_nowait(WSMessage(WSMsgType.TEXT, data, None))

    async def receive(self) -> WSMessage:
        if not self.line.open and self.came.empty():
            return CLOSED
        return await self.came.get()

    async def close(self) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection. Messages in flight are lost; a reachable peer sees the close."""
        if not self.line.open:
            return
        self.line.open = False
        self.came.put_nowait(CLOSED)
        self.process.world.timeline.after(RESET_S, self._close_other)

    def _close_other(self) -> None:
        if self.process.world.network.reaches(self.line.one, self.line.other):
            self.other.came.put_nowait(CLOSED)

    def breaks(self) -> None:
        self.came.put_nowait(CLOSED)
        self.other.came.put_nowait(CLOSED)


class SimulatedServer:
    """The `Server` of a leader."""

    def __init__(self, process: "AgentProcess", listen: Listen, cancel: Callable[[str], object]):
        self.process, self.listen, self.cancel = process, listen, cancel
        self.ends: list[End] = []
        self.port = 0

    async def open(self, bind: str, port: int, folder: object) -> int:
        self.port = self.process.world.drawn()
        self.process.server = self
        return self.port

    async def close(self) -> None:
        self.process.server = None
        for end in self.ends:
            end.hang_up()

    def takes(self, end: End) -> None:
        self.ends.append(end)
        self.process.loop.create_task(self._serve(end))

    async def _serve(self, end: End) -> None:
        message = await end.receive()
        if message.type is not WSMsgType.TEXT:
            return
        register = report_in(message)
        if isinstance(
            register, Register
        ):  # otherwise messages were reordered, and the agent tries again
            await self.listen(register, end)
        end.hang_up()


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

    async def connect(self, place: str, claim: Claim) -> End:
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
        line = Line(mine, host)
        end, other = End(self.process, line), End(server.process, line)
        end.other, other.other = other, end
        line.broken = end.breaks
        self.process.ends.append(end)
        server.takes(other)
        return end
