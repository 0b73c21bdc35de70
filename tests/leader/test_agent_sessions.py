"""Sessions of agents: which are silent, the current connection, repeated orders."""

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


class FakeWebSocket:
    """A WebSocket that records what is sent, and that a test can break."""

    def __init__(self) -> None:
        self.sent: list[Order] = []
        self.broken = False

    async def send_str(self, text: str) -> None:
        if self.broken:
            raise ConnectionResetError
        self.sent.append(decode(Order, json.loads(text)))


def ws() -> web.WebSocketResponse:
    socket: web.WebSocketResponse = cast(Any, FakeWebSocket())
    return socket


def register(host: str = "host-0", pid: int = 1) -> Register:
    agent = AgentRegistered(host=host, address="a", devices=1, pid=pid, incarnation=str(pid))
    return Register(agent=agent, launch=1, sent_at=0.0)


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def sessions(clock: TurnedClock) -> AgentSessions:
    return AgentSessions(1, TIMEOUT, clock)


def test_an_agent_is_silent_after_the_timeout_and_reported_once(
    sessions: AgentSessions, clock: TurnedClock
) -> None:
    sessions.admit(register(), ws())
    clock.sleep(TIMEOUT)
    assert sessions.forget_silent() == []
    clock.sleep(0.5)
    (silence,) = sessions.forget_silent()
    assert (silence.host, silence.why) == ("host-0", "it was silent for 10.5 s")
    assert sessions.forget_silent() == []
    assert sessions.open == 0


def test_a_broken_connection_has_a_shorter_timeout(
    sessions: AgentSessions, clock: TurnedClock
) -> None:
    session, _ = sessions.admit(register(), ws())
    sessions.admit(register("host-1"), ws())
    session.ws = None
    assert sessions.open == 1
    clock.sleep(RECONNECT_S)
    assert sessions.forget_silent() == []
    clock.sleep(0.1)
    (silence,) = sessions.forget_silent()
    assert silence.host == "host-0"
    assert "did not reconnect within 2.1 s" in silence.why


def test_the_silence_of_lost_and_of_unknown_hosts_is_known(
    sessions: AgentSessions, clock: TurnedClock
) -> None:
    clock.sleep(3.0)
    assert sessions.silent_for("host-0") == 3.0
    sessions.admit(register(), ws())
    clock.sleep(TIMEOUT + 1.0)
    sessions.forget_silent()
    clock.sleep(2.0)
    assert sessions.silent_for("host-0") == TIMEOUT + 3.0
    sessions.admit(register(pid=2), ws())
    assert sessions.silent_for("host-0") == 0.0


def test_a_pause_of_the_leader_itself_is_no_silence_of_agents(
    sessions: AgentSessions, clock: TurnedClock
) -> None:
    sessions.admit(register(), ws())
    clock.sleep(TIMEOUT + 30)
    sessions.excuse(30.0)
    assert sessions.forget_silent() == []
    clock.sleep(0.1)
    assert len(sessions.forget_silent()) == 1


def test_only_the_newest_connection_of_an_agent_is_current(sessions: AgentSessions) -> None:
    old, new = ws(), ws()
    session, is_new = sessions.admit(register(), old)
    assert is_new
    assert sessions.knows(session, old)
    again, is_new = sessions.admit(register(), new)
    assert (again is session, is_new) == (True, False)
    assert not sessions.knows(session, old)
    other, is_new = sessions.admit(register(pid=2), old)
    assert is_new
    assert not sessions.knows(session, new)
    assert sessions.knows(other, old)


def test_orders_of_the_present_attempt_are_sent_again_after_a_reconnection(
    sessions: AgentSessions,
) -> None:
    stop = Stop(attempt=1, grace_s=1.0)
    sessions.admit(register(), ws())
    for order in (OfferPort(attempt=1), START, stop):
        sessions.order("host-0", order)
    sessions.order("nobody-here", stop)
    session, _ = sessions.admit(register(), ws())
    assert [session.orders.get_nowait() for _ in range(2)] == [START, stop]
    assert session.orders.empty()


def test_orders_and_pulses_are_sent_until_the_connection_breaks(
    sessions: AgentSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.agent_sessions.PULSE_S", 0.01)

    async def run() -> None:
        socket = ws()
        session, _ = sessions.admit(register(), socket)
        sessions.order("host-0", START)
        speaking = asyncio.create_task(sessions.speak(session, socket))
        sent = cast(FakeWebSocket, socket).sent
        while len(sent) < 3:
            await asyncio.sleep(0.005)
        assert sent[0] == START
        assert sent[1:] == [Pulse(launch=1)] * len(sent[1:])
        cast(FakeWebSocket, socket).broken = True
        await asyncio.wait_for(speaking, 5.0)

    asyncio.run(run())


def test_an_old_connection_takes_no_orders_from_the_new_one(
    sessions: AgentSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.agent_sessions.PULSE_S", 0.01)

    async def run() -> None:
        old, new = ws(), ws()
        session, _ = sessions.admit(register(), old)
        speaking = asyncio.create_task(sessions.speak(session, old))
        await asyncio.sleep(0)
        sessions.admit(register(), new)
        await asyncio.sleep(0.03)
        sessions.order("host-0", Leave(reason="over"))
        await asyncio.sleep(0.03)
        speaking.cancel()
        assert not any(isinstance(order, Leave) for order in cast(FakeWebSocket, old).sent)
        assert session.orders.get_nowait() == Leave(reason="over")

    asyncio.run(run())


def test_hosts_are_heard_while_each_sends_something_every_few_pulses(
    sessions: AgentSessions, clock: TurnedClock
) -> None:
    zero, _ = sessions.admit(register("host-0"), ws())
    sessions.admit(register("host-1"), ws())
    assert sessions.hears(("host-0", "host-1"))
    assert not sessions.hears(("host-0", "host-2")), "host-2 never registered"
    clock.sleep(HEARD_S + 0.5)
    zero.heard = clock.monotonic()
    assert sessions.hears(("host-0",))
    assert not sessions.hears(("host-0", "host-1"))
