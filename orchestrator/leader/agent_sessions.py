"""The leader's lines to its agents: who is there, who fell silent, what is still to be said."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aiohttp import WSMessage, WSMsgType

from orchestrator.agent.connection import Line
from orchestrator.contract.messages import wire
from orchestrator.contract.messages.agent_protocol import (
    PULSE_S,
    Order,
    Pulse,
    Register,
    Report,
    Start,
)
from orchestrator.seams import Clock

HEARD_S = 3 * PULSE_S
RECONNECT_S = 2.0
"""After a connection broke, for an agent that lives to come back."""


@dataclass(slots=True)
class AgentSession:
    """One agent as the leader sees it; outlives a broken WebSocket."""

    host: str
    incarnation: str
    ws: Line | None
    heard: float
    """When it last said anything; monotonic."""
    orders: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)
    said: list[Order] = field(default_factory=list)
    """Orders of the present attempt, to be said again after a reconnection; each is idempotent."""
    awaited: bool = False
    """It followed the former leader, and has not come to this one yet."""


@dataclass(frozen=True, slots=True)
class Silence:
    host: str
    why: str
    silent_s: float


class AgentSessions:
    def __init__(self, launch: int, agent_timeout: float, clock: Clock) -> None:
        self.launch = launch
        self.agent_timeout = agent_timeout
        self.clock = clock
        self.by_host: dict[str, AgentSession] = {}
        self.begun = clock.monotonic()
        self.last_heard: dict[str, float] = {}
        """Of hosts whose agents were dropped."""
        self.still_s: float | None = None
        """Said with each pulse: agents tell at once of ranks that stand still for so long."""

    def admit(self, register: Register, ws: Line) -> tuple[AgentSession, bool]:
        """The connection of an agent, and whether the agent is a new one."""
        agent = register.agent
        known = self.by_host.get(agent.host)
        now = self.clock.monotonic()
        same = known is not None and known.incarnation == agent.incarnation
        if known is not None and same and not known.awaited:
            known.ws, known.heard, known.orders = ws, now, asyncio.Queue()
            for order in known.said:
                known.orders.put_nowait(order)
            return known, False
        connection = AgentSession(agent.host, agent.incarnation, ws=ws, heard=now)
        self.by_host[agent.host] = connection
        return connection, True

    def await_agents(self, incarnations: Mapping[str, str]) -> None:
        """Agents of a leader that is gone are to come to this one: each that does not, within the
        time that any agent may be silent, is lost. They are there, and look for it."""
        now = self.clock.monotonic()
        for host, incarnation in incarnations.items():
            self.by_host[host] = AgentSession(host, incarnation, ws=None, heard=now, awaited=True)

    def order(self, host: str, order: Order) -> None:
        """Say `order` to the agent of `host`; without one, nobody hears it."""
        connection = self.by_host.get(host)
        if connection is None:
            return
        if isinstance(order, Start):
            connection.said.clear()
        connection.said.append(order)
        connection.orders.put_nowait(order)

    async def speak(self, connection: AgentSession, ws: Line) -> None:
        """Send orders as they come, and a pulse when there are none, until `ws` breaks."""
        orders = connection.orders  # a later `ws` of the same agent has a queue of its own
        with contextlib.suppress(ConnectionError):
            while True:
                order: Order = Pulse(launch=self.launch, still_s=self.still_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PULSE_S):  # cheaper than `wait_for`: no task
                        order = await orders.get()
                await ws.send_str(wire.encode(order).decode())

    def knows(self, connection: AgentSession, ws: Line) -> bool:
        """Whether `ws` is still the line to that agent, and the agent not given up."""
        return self.by_host.get(connection.host) is connection and connection.ws is ws

    def excuse(self, seconds: float) -> None:
        """The leader did not listen for so long: nobody's silence counts."""
        now = self.clock.monotonic()
        for connection in self.by_host.values():
            connection.heard = min(now, connection.heard + seconds)

    def hears(self, hosts: Iterable[str]) -> bool:
        """Whether each of `hosts` has said something in the last few pulses."""
        since = self.clock.monotonic() - HEARD_S
        return all(host in self.by_host and self.by_host[host].heard >= since for host in hosts)

    def forget_silent(self) -> list[Silence]:
        """Drop the agents that were silent for too long, and say which and why."""
        now, limit = self.clock.monotonic(), self.agent_timeout
        silences = []
        for connection in list(self.by_host.values()):
            silent = now - connection.heard
            broken = connection.ws is None and not connection.awaited
            if silent <= (min(RECONNECT_S, limit) if broken else limit):
                continue
            why = f"it said nothing for {silent:.1f} s"
            if broken:
                why = f"its connection broke and it did not come back within {silent:.1f} s"
            elif connection.awaited:
                why = f"it did not come to the new leader within {silent:.1f} s"
            del self.by_host[connection.host]
            self.last_heard[connection.host] = connection.heard
            silences.append(Silence(connection.host, why, silent))
        return silences

    def silent_for(self, host: str) -> float:
        """Seconds since its agent was heard, or could have been for the first time."""
        known = self.by_host.get(host)
        heard = known.heard if known else self.last_heard.get(host, self.begun)
        return self.clock.monotonic() - heard

    @property
    def open(self) -> int:
        return sum(connection.ws is not None for connection in self.by_host.values())


def report_in(message: WSMessage) -> Report:
    """Raises ValueError when the message is none."""
    if message.type is not WSMsgType.TEXT:
        raise ValueError(f"{message.type.name} instead of a text")
    report: Report = wire.decode(Report, message.data.encode())
    return report
