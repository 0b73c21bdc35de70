"""The leader's connections to its agents: which agents are connected, which are silent, and which
orders are still to be sent."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aiohttp import WSMessage, WSMsgType
from msgspec import Struct

from orchestrator.agent.connection import Line
from orchestrator.contract.memory.peers import OfferSlots
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

REPORTS = wire.Decoder(Report)
HEARD_S = 3 * PULSE_S
RECONNECT_S = 2.0
"""Limit for a live agent to reconnect after its connection broke."""


@dataclass(slots=True)
class AgentSession:
    """One agent as the leader sees it. It survives a broken WebSocket."""

    host: str
    incarnation: str
    ws: Line | None
    heard: float
    """When its last message came (monotonic)."""
    orders: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)
    said: list[Order] = field(default_factory=list)
    """Orders of the present attempt. They are sent again after a reconnection, because some may
    have been lost. Each order is idempotent."""
    awaited: bool = False
    """It was connected to the former leader, and has not connected to this one yet."""


class Silence(Struct, frozen=True):
    host: str
    why: str
    silent_s: float
    closed: bool
    """The connection was closed. The kernel of a host does that for a process that ends."""


class AgentSessions:
    def __init__(self, launch: int, agent_timeout: float, clock: Clock) -> None:
        self.launch = launch
        self.agent_timeout = agent_timeout
        self.clock = clock
        self.by_host: dict[str, AgentSession] = {}
        self.begun = clock.monotonic()
        self.last_heard: dict[str, float] = {}
        """Hosts whose agents were dropped -> when the agent was last heard (monotonic)."""
        self.still_s: float | None = None
        """Sent with each pulse: agents report at once if their ranks make no progress for so long.
        """

    def admit(self, register: Register, ws: Line) -> tuple[AgentSession, bool]:
        """Returns the session of an agent, and whether the agent is new."""
        agent = register.agent
        known = self.by_host.get(agent.host)
        now = self.clock.monotonic()
        # A restarted agent has the same host name but another incarnation. It knows of no attempt,
        # so it counts as new.
        same = known is not None and known.incarnation == agent.incarnation
        # An awaited agent counts as new too. This leader needs its registration, which says which
        # attempt its ranks run.
        if known is not None and same and not known.awaited:
            # The old line may still be waiting for an order. With the same queue it would take one
            # that the new line needs.
            known.ws, known.heard, known.orders = ws, now, asyncio.Queue()
            for order in known.said:
                known.orders.put_nowait(order)
            return known, False
        # An older line of this host may still look alive. It is dropped at its next message,
        # because `knows` is now false for it.
        connection = AgentSession(agent.host, agent.incarnation, ws=ws, heard=now)
        self.by_host[agent.host] = connection
        return connection, True

    def await_agents(self, incarnations: Mapping[str, str]) -> None:
        """Expect the agents of the former leader. They run and look for this leader. An agent that
        does not connect within `agent_timeout` is lost."""
        now = self.clock.monotonic()
        for host, incarnation in incarnations.items():
            self.by_host[host] = AgentSession(host, incarnation, ws=None, heard=now, awaited=True)

    def order(self, host: str, order: Order) -> None:
        """Send `order` to the agent of `host`. Without an agent the order is dropped."""
        connection = self.by_host.get(host)
        # The agent was given up meanwhile. It must register as a new one, and gets other orders
        # then.
        if connection is None:
            return
        # A new attempt makes all orders for the previous one obsolete.
        if isinstance(order, Start):
            connection.said.clear()
        # A host that is not used is asked for its slots again and again, and is never started.
        if isinstance(order, OfferSlots):
            connection.said = [one for one in connection.said if not isinstance(one, OfferSlots)]
        connection.said.append(order)
        connection.orders.put_nowait(order)

    async def speak(self, connection: AgentSession, ws: Line) -> None:
        """Send orders as they come, and a pulse when there is none, until `ws` breaks."""
        orders = connection.orders  # after a reconnection the new `ws` gets a new queue
        # The line broke. The agent reconnects and gets its orders again, or is given up for its
        # silence.
        with contextlib.suppress(ConnectionError):
            while True:
                order: Order = Pulse(launch=self.launch, still_s=self.still_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PULSE_S):  # cheaper than `wait_for`: no task
                        order = await orders.get()
                await ws.send_str(wire.encode(order).decode())

    def knows(self, connection: AgentSession, ws: Line) -> bool:
        """Whether `ws` is still the connection of that agent, and the agent is not given up."""
        return self.by_host.get(connection.host) is connection and connection.ws is ws

    def excuse(self, seconds: float) -> None:
        """Ignore a time in which the leader did not run: it could not hear its agents."""
        now = self.clock.monotonic()
        for connection in self.by_host.values():
            # An agent that was heard after the pause must not count as heard in the future.
            connection.heard = min(now, connection.heard + seconds)

    def hears(self, hosts: Iterable[str]) -> bool:
        """Whether each of `hosts` has sent a message within the last few pulses."""
        since = self.clock.monotonic() - HEARD_S
        return all(host in self.by_host and self.by_host[host].heard >= since for host in hosts)

    def forget_silent(self) -> list[Silence]:
        """Drop the agents that were silent for too long. Returns them with the reasons."""
        now, limit = self.clock.monotonic(), self.agent_timeout
        silences = []
        for connection in list(self.by_host.values()):
            silent = now - connection.heard
            # The connection of a killed agent breaks at once. A live one reconnects within a
            # second or two, so a broken connection needs less patience than silence.
            broken = connection.ws is None and not connection.awaited
            if silent <= (min(RECONNECT_S, limit) if broken else limit):
                continue
            why = f"it was silent for {silent:.1f} s"
            if broken:
                why = f"its connection broke and it did not reconnect within {silent:.1f} s"
            elif connection.awaited:
                why = f"it did not connect to the new leader within {silent:.1f} s"
            del self.by_host[connection.host]
            # The scheduler is asked later what it did to this host since then.
            self.last_heard[connection.host] = connection.heard
            silences.append(Silence(connection.host, why, silent, closed=broken))
        return silences

    def silent_for(self, host: str) -> float:
        """Seconds since its agent was heard. If it was never heard: since the leader started."""
        known = self.by_host.get(host)
        heard = known.heard if known else self.last_heard.get(host, self.begun)
        return self.clock.monotonic() - heard

    @property
    def open(self) -> int:
        return sum(connection.ws is not None for connection in self.by_host.values())


def report_in(message: WSMessage) -> Report:
    """The report in a message. Raises ValueError if it has none."""
    if message.type is not WSMsgType.TEXT:
        raise ValueError(f"{message.type.name} instead of text")
    report: Report = REPORTS.decode(message.data.encode())
    return report
