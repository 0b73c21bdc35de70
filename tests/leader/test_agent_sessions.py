import asyncio
import json
from typing import Any, cast

import pytest
from aiohttp import web

from orchestrator.contract.codec import decode
from orchestrator.contract.messages.agent_protocol import (
    Leave,
    OfferPort,
    Order,
    Pulse,
    Register,
    Start,
    Stop,
)
from orchestrator.contract.messages.events import AgentRegistered
from orchestrator.leader.agent_sessions import HEARD_S, RECONNECT_S, AgentSessions
from tests.agent.world import TurnedClock

TIMEOUT = 10.0
START = Start(
    attempt=1,
    node_rank=0,
    nodes=1,
    ranks_per_host=1,
    master_address="a",
    master_port=1,
    config="c",
    drills=(),
)


class Line:
    """A WebSocket that keeps what is sent, and breaks when told to."""

    def __init__(self) -> None:
        self.sent: list[Order] = []
        self.broken = False

    async def send_str(self, text: str) -> None:
        if self.broken:
            raise ConnectionResetError
        self.sent.append(decode(Order, json.loads(text)))


def ws() -> web.WebSocketResponse:
    line: web.WebSocketResponse = cast(Any, Line())
    return line


def register(host: str = "host-0", pid: int = 1) -> Register:
    agent = AgentRegistered(host=host, address="a", devices=1, pid=pid, incarnation=str(pid))
    return Register(agent=agent, launch=1, sent_at=0.0)


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def connections(clock: TurnedClock) -> AgentSessions:
    return AgentSessions(1, TIMEOUT, clock)


def test_an_agent_is_silent_after_the_timeout_and_told_of_once(
    connections: AgentSessions, clock: TurnedClock
) -> None:
    connections.admit(register(), ws())
    clock.sleep(TIMEOUT)
    assert connections.forget_silent() == []
    clock.sleep(0.5)
    (silence,) = connections.forget_silent()
    assert (silence.host, silence.why) == ("host-0", "it was silent for 10.5 s")
    assert connections.forget_silent() == []
    assert connections.open == 0


def test_a_broken_connection_has_less_time(connections: AgentSessions, clock: TurnedClock) -> None:
    connection, _ = connections.admit(register(), ws())
    connections.admit(register("host-1"), ws())
    connection.ws = None
    assert connections.open == 1
    clock.sleep(RECONNECT_S)
    assert connections.forget_silent() == []
    clock.sleep(0.1)
    (silence,) = connections.forget_silent()
    assert silence.host == "host-0"
    assert "did not reconnect within 2.1 s" in silence.why


def test_how_long_a_host_is_silent_is_known_of_those_given_up_and_of_strangers(
    connections: AgentSessions, clock: TurnedClock
) -> None:
    clock.sleep(3.0)
    assert connections.silent_for("host-0") == 3.0
    connections.admit(register(), ws())
    clock.sleep(TIMEOUT + 1.0)
    connections.forget_silent()
    clock.sleep(2.0)
    assert connections.silent_for("host-0") == TIMEOUT + 3.0
    connections.admit(register(pid=2), ws())
    assert connections.silent_for("host-0") == 0.0


def test_the_leaders_own_standstill_is_no_silence(
    connections: AgentSessions, clock: TurnedClock
) -> None:
    connections.admit(register(), ws())
    clock.sleep(TIMEOUT + 30)
    connections.excuse(30.0)
    assert connections.forget_silent() == []
    clock.sleep(0.1)
    assert len(connections.forget_silent()) == 1


def test_only_the_newest_line_of_an_agent_is_its_line(connections: AgentSessions) -> None:
    old, new = ws(), ws()
    connection, is_new = connections.admit(register(), old)
    assert is_new
    assert connections.knows(connection, old)
    again, is_new = connections.admit(register(), new)
    assert (again is connection, is_new) == (True, False)
    assert not connections.knows(connection, old)
    other, is_new = connections.admit(register(pid=2), old)
    assert is_new
    assert not connections.knows(connection, new)
    assert connections.knows(other, old)


def test_orders_of_the_present_attempt_are_said_again_after_a_reconnection(
    connections: AgentSessions,
) -> None:
    stop = Stop(attempt=1, grace_s=1.0)
    connections.admit(register(), ws())
    for order in (OfferPort(attempt=1), START, stop):
        connections.order("host-0", order)
    connections.order("nobody-here", stop)
    connection, _ = connections.admit(register(), ws())
    assert [connection.orders.get_nowait() for _ in range(2)] == [START, stop]
    assert connection.orders.empty()


def test_orders_are_sent_and_pulses_between_them_until_the_line_breaks(
    connections: AgentSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.agent_sessions.PULSE_S", 0.01)

    async def run() -> None:
        line = ws()
        connection, _ = connections.admit(register(), line)
        connections.order("host-0", START)
        speaking = asyncio.create_task(connections.speak(connection, line))
        sent = cast(Line, line).sent
        while len(sent) < 3:
            await asyncio.sleep(0.005)
        assert sent[0] == START
        assert sent[1:] == [Pulse(launch=1)] * len(sent[1:])
        cast(Line, line).broken = True
        await asyncio.wait_for(speaking, 5.0)

    asyncio.run(run())


def test_an_old_line_takes_no_orders_from_the_new_one(
    connections: AgentSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.agent_sessions.PULSE_S", 0.01)

    async def run() -> None:
        old, new = ws(), ws()
        connection, _ = connections.admit(register(), old)
        speaking = asyncio.create_task(connections.speak(connection, old))
        await asyncio.sleep(0)
        connections.admit(register(), new)
        await asyncio.sleep(0.03)
        connections.order("host-0", Leave(reason="over"))
        await asyncio.sleep(0.03)
        speaking.cancel()
        assert not any(isinstance(order, Leave) for order in cast(Line, old).sent)
        assert connection.orders.get_nowait() == Leave(reason="over")

    asyncio.run(run())


def test_hosts_are_heard_while_each_speaks_every_few_pulses(
    connections: AgentSessions, clock: TurnedClock
) -> None:
    zero, _ = connections.admit(register("host-0"), ws())
    connections.admit(register("host-1"), ws())
    assert connections.hears(("host-0", "host-1"))
    assert not connections.hears(("host-0", "host-2")), "it never came"
    clock.sleep(HEARD_S + 0.5)
    zero.heard = clock.monotonic()
    assert connections.hears(("host-0",))
    assert not connections.hears(("host-0", "host-1"))
