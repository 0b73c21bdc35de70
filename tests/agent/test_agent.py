"""An agent against a leader that says what the test wants."""

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from aiohttp import ClientWSTimeout, WSMsgType, web
from msgspec.structs import replace

from orchestrator.agent import host_processes
from orchestrator.agent.agent import ENDED_S, FIND_LEADER_S, LISTEN_S, Agent, AgentConfig
from orchestrator.agent.attempts import Attempts
from orchestrator.agent.connection import WebSockets
from orchestrator.agent.evidence import evidence_collector
from orchestrator.agent.handshake import challenge, proved
from orchestrator.agent.rank_socket import free_port
from orchestrator.contract.check_results import Finding
from orchestrator.contract.codec import decode, encode_tagged
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.leader_file import Term, announce, announce_end
from orchestrator.contract.files.run_dir import LAST_FILES
from orchestrator.contract.messages.agent_protocol import (
    AGENT_PATH,
    Checked,
    CheckFabric,
    Claim,
    Digest,
    Evidence,
    Gather,
    Leave,
    OfferPort,
    Order,
    Port,
    Pulse,
    Register,
    Report,
    Start,
    Stop,
)
from orchestrator.contract.messages.events import (
    AgentRegistered,
    CheckpointFailed,
    CheckpointSaved,
    EvidenceGathered,
    HostLeaving,
    HostStopped,
    RankExited,
)
from orchestrator.contract.messages.rank_messages import RankStarted, to_bytes
from orchestrator.contract.spec.failures import FailureRule, Reading
from orchestrator.health.host_probes import HostProbe
from orchestrator.job_secret import draw, secret_from, server_context
from orchestrator.posix.locks import is_free
from tests.agent.world import (
    LAUNCH,
    SECRET,
    SLEEPS,
    WAIT_S,
    LoopClock,
    a_place,
    a_start,
    is_gone,
    run_with_clock,
    until,
)
from tests.e2e.job import ROOT

T = TypeVar("T")
NONCE = "a-random-number"
TIMEOUT_S = 60.0
"""After which these agents give up their leader, unless a test says otherwise."""


@dataclass
class FakeLeader:
    """Takes in reports and says what it is told to say."""

    heard: list[Report] = field(default_factory=list)
    lines: list[web.WebSocketResponse] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    refuse: int | None = None
    pulses: bool = False
    frozen: bool = False
    """Takes nothing in, and answers not even a farewell."""

    async def agent(self, request: web.Request) -> web.WebSocketResponse:
        if (given := request.headers.get("Authorization")) is None:
            raise web.HTTPUnauthorized(headers=challenge(NONCE))
        self.headers.append(given)
        if self.refuse is not None:
            raise _refusal(self.refuse)
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        self.lines.append(ws)
        while self.frozen:
            await asyncio.sleep(0.01)
        async for message in ws:
            if message.type is WSMsgType.TEXT:
                self.heard.append(decode(Report, json.loads(message.data)))
        return ws

    async def say(self, *orders: Order) -> None:
        for order in orders:
            await self.lines[-1].send_str(json.dumps(encode_tagged(order)))

    def of(self, kind: type[T]) -> list[T]:
        return [report for report in self.heard if isinstance(report, kind)]

    async def hear(self, kind: type[T], count: int = 1) -> T:
        """The `count`-th report of a kind."""
        found: T = (await until(lambda: self.of(kind)[count - 1 :], kind.__name__))[0]
        return found


Pointer = Literal["rightly", "wrongly", "nothing"]
"""What `leader.json` says of the leader."""


def _refusal(status: int) -> web.HTTPException:
    return {401: web.HTTPUnauthorized, 503: web.HTTPServiceUnavailable}[status]()


@dataclass
class World:
    agent: Agent
    leader: FakeLeader
    clock: LoopClock
    task: "asyncio.Task[int]"

    def tell(self, *datagrams: Any) -> None:
        """As a rank of this host."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            for datagram in datagrams:
                data = datagram if isinstance(datagram, bytes) else to_bytes(datagram)
                sock.sendto(data, str(self.agent.config.place.socket))

    async def hears_nothing_for(self, seconds: float) -> None:
        """From the leader, from now on."""
        self.leader.pulses = False
        offered = len(self.leader.of(Port))
        await self.leader.say(OfferPort(attempt=1))
        await self.leader.hear(Port, offered + 1)  # so nothing that was said is under way
        await self.time_passes(seconds)

    async def time_passes(self, seconds: float) -> None:
        """Not at one leap, by which the agent would know that it stood still itself."""
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.clock.put_forward(LISTEN_S / 2)
            await asyncio.sleep(0.001)

    async def ends(self) -> int:
        return await asyncio.wait_for(self.task, WAIT_S)


XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus."
AER = "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received"


@contextlib.asynccontextmanager
async def world(
    folder: Path,
    clock: LoopClock,
    agent_timeout: float,
    pulses: bool,
    patience_s: float,
    told: Pointer,
    named: str,
) -> AsyncIterator[World]:
    place, leader = a_place(folder), FakeLeader(pulses=pulses)
    app = web.Application()
    app.router.add_get(AGENT_PATH, leader.agent)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    context = server_context(SECRET, folder)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    config = AgentConfig(
        place=place,
        secret=SECRET,
        term=Term(LAUNCH),
        devices=2,
        agent_timeout=agent_timeout,
        patience_s=patience_s,
        leader_at="" if told == "rightly" else f"127.0.0.1:{runner.addresses[0][1]}",
    )
    agent = Agent(config, os.environ, clock)
    port = runner.addresses[0][1] if told == "rightly" else free_port("127.0.0.1")
    if told != "nothing":
        announce(place.run_dir, Term(LAUNCH), "127.0.0.1", port, named)

    async def pulse() -> None:
        while True:
            await asyncio.sleep(0.05)
            if leader.pulses and leader.lines and not leader.lines[-1].closed:
                with contextlib.suppress(ConnectionError):
                    await leader.say(Pulse(launch=LAUNCH))

    pulsing = asyncio.create_task(pulse())
    running = asyncio.create_task(agent.run())
    try:
        yield World(agent, leader, clock, running)
    finally:
        agent.leave(exit_codes.OK)
        pulsing.cancel()
        await asyncio.gather(running, pulsing, return_exceptions=True)
        await runner.cleanup()


def play(
    folder: Path,
    script: Callable[[World], Awaitable[T]],
    agent_timeout: float = TIMEOUT_S,
    pulses: bool = True,
    patience_s: float = 0.0,
    told: Pointer = "rightly",
    named: str = "",
) -> T:
    async def run(clock: LoopClock) -> T:
        async with world(folder, clock, agent_timeout, pulses, patience_s, told, named) as here:
            return await asyncio.wait_for(script(here), WAIT_S)

    return run_with_clock(run)


def test_an_agent_registers_with_the_token_and_leaves_when_told(tmp_path: Path) -> None:
    async def script(here: World) -> tuple[Register, int]:
        register = await here.leader.hear(Register)
        await here.leader.hear(Digest)
        await here.leader.say(Leave(reason="the job is over"))
        return register, await here.ends()

    register, code = play(tmp_path, script)
    agent = AgentRegistered(
        host="host-0",
        address="127.0.0.1",
        devices=2,
        pid=os.getpid(),
        incarnation=register.agent.incarnation,
    )
    assert register == Register(agent=agent, launch=LAUNCH, sent_at=register.sent_at)
    assert len(agent.incarnation) == 16
    assert code == exit_codes.OK


def test_an_agent_looks_for_the_leaders_host_by_its_name_and_tells_what_is_not_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(name: str) -> tuple[str, ...]:
        raise OSError(f"{name}: Name or service not known")

    monkeypatch.setattr("orchestrator.health.clocks_and_names.addresses_of", nobody)

    async def script(here: World) -> Register:
        return await here.leader.hear(Register)

    (finding,) = play(tmp_path, script, named="node1").agent.findings
    assert (finding.what, finding.verdict) == ("name", "warns")
    assert finding.found == "host-0 cannot resolve node1: node1: Name or service not known"
    assert finding.fix == "make node1 resolvable on host-0 (DNS, /etc/hosts)"


@pytest.mark.parametrize("told", ["nothing", "wrongly"])
def test_a_leader_that_no_file_leads_to_is_found_where_the_scheduler_says(
    tmp_path: Path, told: Pointer
) -> None:
    async def script(here: World) -> int:
        await here.leader.hear(Register)
        await here.leader.say(Leave(reason="the job is over"))
        return await here.ends()

    assert play(tmp_path, script, told=told) == exit_codes.OK


def test_one_in_whose_place_another_is_to_come_leaves_as_one_that_is_made_anew(
    tmp_path: Path,
) -> None:
    """An operator lets a pod that ended with 0 be, and the job would lack it for good."""

    async def script(here: World) -> int:
        await here.leader.hear(Register)
        await here.leader.say(Leave(reason="all hosts are given back", again=True))
        return await here.ends()

    assert play(tmp_path, script) == exit_codes.REQUEUED


def test_it_proves_that_it_knows_the_secret_and_does_not_say_it(tmp_path: Path) -> None:
    async def script(here: World) -> tuple[list[str], str]:
        register = await here.leader.hear(Register)
        return here.leader.headers, register.agent.incarnation

    (header,), incarnation = play(tmp_path, script)
    assert SECRET.key.decode() not in header
    assert proved(SECRET, NONCE, header) == Claim(
        purpose="agent", launch=LAUNCH, host="host-0", incarnation=incarnation
    )
    assert proved(SECRET, "another", header) is None


def test_a_leader_of_another_job_hears_nothing_but_a_first_question(tmp_path: Path) -> None:
    """As one that has the port of a leader that is gone."""
    other = secret_from(draw())

    async def script(here: World) -> int:
        here.agent.connector = WebSockets(other)
        here.clock.put_forward(TIMEOUT_S + FIND_LEADER_S)
        return await here.ends()

    async def run(clock: LoopClock) -> tuple[int, list[str]]:
        told: Pointer = "rightly"
        async with world(tmp_path, clock, TIMEOUT_S, True, 0.0, told, "") as here:
            return await asyncio.wait_for(script(here), WAIT_S), here.leader.headers

    assert run_with_clock(run) == (exit_codes.LEADER_LOST, [])


def test_a_refused_agent_leaves_with_its_code(tmp_path: Path) -> None:
    async def script(here: World) -> int:
        here.leader.refuse = 401
        return await here.ends()

    assert play(tmp_path, script) == exit_codes.NOT_ADMITTED


def test_a_leader_that_is_not_ready_is_asked_again(tmp_path: Path) -> None:
    async def script(here: World) -> None:
        here.leader.refuse = 503
        await until(lambda: here.leader.headers, "the first attempt")
        here.leader.refuse = None
        await here.leader.hear(Register)

    play(tmp_path, script)


def test_an_agent_that_comes_after_the_end_does_not_look_for_a_leader(tmp_path: Path) -> None:
    async def script(here: World) -> int:
        run_dir = here.agent.config.place.run_dir
        announce_end(run_dir, Term(LAUNCH))
        return await here.ends()

    assert play(tmp_path, script) == exit_codes.OK


@pytest.mark.parametrize("text", ["", "[]", "{", '{"launch": 2, "address": "x", "port": 1}'])
def test_a_leader_of_another_launch_is_no_leader(tmp_path: Path, text: str) -> None:
    async def script(here: World) -> int:
        here.agent.config = replace(here.agent.config, find_leader_s=0.1)
        here.agent.config.place.run_dir.leader.write_text(text)
        return await here.ends()

    assert play(tmp_path, script, agent_timeout=0.1) == exit_codes.LEADER_LOST


def test_a_free_port_is_offered(tmp_path: Path) -> None:
    async def script(here: World) -> Port:
        await here.leader.hear(Register)
        await here.leader.say(OfferPort(attempt=4))
        return await here.leader.hear(Port)

    offer = play(tmp_path, script)
    assert offer.attempt == 4
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", offer.port))


@pytest.mark.process
def test_silence_of_the_leader_stops_the_ranks_and_the_agent_leaves(tmp_path: Path) -> None:
    async def script(here: World) -> tuple[int, int]:
        await here.leader.hear(Register)
        place = here.agent.config.place
        await here.leader.say(a_start(place, SLEEPS))
        attempt = await until(lambda: here.agent.attempts.attempt, "the attempt")
        record = await until(lambda: attempt.ranks.get(0), "the rank")
        await here.hears_nothing_for(TIMEOUT_S + 1.0)
        return record.pid, await here.ends()

    pid, code = play(tmp_path, script)
    assert code == exit_codes.LEADER_LOST
    assert is_gone(pid)


@pytest.mark.process
def test_an_agent_that_waits_in_place_stops_its_ranks_and_serves_the_next_leader(
    tmp_path: Path,
) -> None:
    async def script(here: World) -> None:
        await here.leader.hear(Register)
        place = here.agent.config.place
        await here.leader.say(a_start(place, SLEEPS))
        attempt = await until(lambda: here.agent.attempts.attempt, "the attempt")
        record = await until(lambda: attempt.ranks.get(0), "the rank")
        here.leader.refuse = HTTPStatus.UNAUTHORIZED  # another job's leader has its address now
        await here.leader.lines[-1].close()
        await until(lambda: len(here.leader.headers) > 1, "a knock")
        here.clock.put_forward(TIMEOUT_S + 1.0)
        await until(lambda: is_gone(record.pid), "the end of the rank")
        await until(lambda: len(here.leader.headers) > 2, "some knocking")
        assert not here.task.done()
        here.leader.refuse = None
        second = await here.leader.hear(Register, 2)
        assert second.agent.incarnation == here.agent.incarnation
        assert (await here.leader.hear(HostStopped)).attempt == attempt.start.attempt
        await here.leader.say(Leave(reason="over"))
        assert await here.ends() == exit_codes.OK

    play(tmp_path, script, patience_s=2 * WAIT_S)


@pytest.mark.process
def test_an_agent_that_stood_still_itself_waits_for_the_leader_that_did_as_well(
    tmp_path: Path,
) -> None:
    """`scontrol suspend` stops all processes of a job, and `resume` wakes them in any order."""

    async def script(here: World) -> None:
        await here.leader.hear(Register)
        place = here.agent.config.place
        await here.leader.say(a_start(place, SLEEPS))
        attempt = await until(lambda: here.agent.attempts.attempt, "the attempt")
        record = await until(lambda: attempt.ranks.get(0), "the rank")
        here.leader.pulses = False
        await asyncio.sleep(0.2)  # what was said is heard
        here.clock.put_forward(TIMEOUT_S + 1.0)
        await asyncio.sleep(0.2)
        here.leader.pulses = True
        digests = len(here.leader.of(Digest))
        await here.leader.hear(Digest, digests + 2)
        assert not is_gone(record.pid)
        assert len(here.leader.of(Register)) == 1, "the connection was kept"
        await here.leader.say(Leave(reason="over"))
        assert await here.ends() == exit_codes.OK

    play(tmp_path, script)


def outlives(here: World) -> None:
    here.agent.config = replace(here.agent.config, outlives_leader=True)


@pytest.mark.process
def test_an_agent_that_outlives_its_leader_stops_the_ranks_stays_and_says_why_to_the_next(
    tmp_path: Path,
) -> None:
    async def script(here: World) -> None:
        outlives(here)
        leader, place = here.leader, here.agent.config.place
        await leader.hear(Register)
        await leader.say(a_start(place, SLEEPS))
        attempt = await until(lambda: here.agent.attempts.attempt, "the attempt")
        await until(lambda: attempt.ranks.get(0), "the rank")
        leader.pulses, leader.frozen = False, True
        await leader.lines[-1].close()
        await here.time_passes(TIMEOUT_S + 1.0)
        await until(here.agent.alone.is_set, "it to be alone")
        assert is_free(place.lock), "no rank is left"
        assert not here.task.done()
        leader.pulses, leader.frozen = True, False
        await until(lambda: not here.agent.alone.is_set(), "a leader")
        stopped = await leader.hear(HostStopped)
        assert (stopped.attempt, stopped.finished) == (1, False)
        assert stopped.alone_s > TIMEOUT_S
        assert len(leader.of(HostStopped)) == 1, "once, as of now"

    play(tmp_path, script)


@pytest.mark.parametrize("held", [True, False])
def test_a_leader_whose_process_has_surely_ended_is_not_waited_for(
    tmp_path: Path, held: bool
) -> None:
    """Its port is closed, and the kernel has let go of its journal."""

    async def script(here: World) -> None:
        outlives(here)
        run_dir = here.agent.config.place.run_dir
        await here.leader.hear(Register)
        with run_dir.journal.open("w") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            announce(run_dir, Term(LAUNCH), "127.0.0.1", free_port("127.0.0.1"))
            await here.leader.lines[-1].close()
            await until(lambda: here.agent.unserved, "the closed port")
            here.clock.put_forward(ENDED_S + 1.0)
            if held:
                await asyncio.sleep(0.5)
                assert not here.agent.alone.is_set()
        await until(here.agent.alone.is_set, "it to be alone")
        assert here.agent.silent_for() < TIMEOUT_S

    play(tmp_path, script)


def test_one_that_does_not_answer_is_waited_for_whoever_holds_the_journal(tmp_path: Path) -> None:
    """It may be back in a moment."""

    async def script(here: World) -> None:
        outlives(here)
        await here.leader.hear(Register)
        here.leader.frozen = True
        await here.leader.lines[-1].close()
        here.clock.put_forward(ENDED_S + 1.0)
        await asyncio.sleep(0.5)
        assert not here.agent.alone.is_set()

    play(tmp_path, script, pulses=False)


def test_an_agent_waits_in_place_for_so_long_and_no_longer(tmp_path: Path) -> None:
    async def script(here: World) -> int:
        await here.leader.hear(Register)
        here.leader.frozen = True
        await here.leader.lines[-1].close()
        return await here.ends()

    code = play(tmp_path, script, agent_timeout=0.2, pulses=False, patience_s=0.3)
    assert code == exit_codes.LEADER_LOST


@pytest.mark.process
def test_a_host_that_has_to_go_says_so_and_goes_when_its_ranks_have_stopped(tmp_path: Path) -> None:
    async def script(here: World) -> None:
        await here.leader.hear(Register)
        place = here.agent.config.place
        await here.leader.say(a_start(place, SLEEPS))
        attempt = await until(lambda: here.agent.attempts.attempt, "the attempt")
        await until(lambda: attempt.ranks.get(0), "the rank")
        here.agent.warned("SIGTERM")
        assert await here.leader.hear(HostLeaving) == HostLeaving(host=place.host, why="SIGTERM")
        assert not here.task.done()
        await here.leader.say(Stop(attempt=attempt.start.attempt, grace_s=0.1))
        await here.leader.hear(HostStopped)
        assert await here.ends() == exit_codes.LEADER_LOST

    play(tmp_path, script, patience_s=60.0)


@pytest.mark.process
def test_a_host_that_has_to_go_without_a_leader_stops_its_own_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.agent.agent.HEARD_S", 0.3)

    async def script(here: World) -> None:
        await here.leader.hear(Register)
        await here.leader.say(a_start(here.agent.config.place, SLEEPS))
        attempt = await until(lambda: here.agent.attempts.attempt, "the attempt")
        record = await until(lambda: attempt.ranks.get(0), "the rank")
        here.leader.frozen = True
        await here.leader.lines[-1].close()
        here.agent.warned("SIGTERM")
        assert await here.ends() == exit_codes.LEADER_LOST
        assert is_gone(record.pid)

    play(tmp_path, script, pulses=False, patience_s=60.0)


def test_a_leader_that_answers_nothing_does_not_hold_the_agent_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp itself would wait for the answer to a farewell for ever."""
    patient = ClientWSTimeout(ws_close=None)
    monkeypatch.setattr("aiohttp.client.DEFAULT_WS_CLIENT_TIMEOUT", patient)

    async def script(here: World) -> int:
        here.leader.frozen = True
        await until(lambda: here.leader.lines, "the agent")
        return await here.ends()

    assert play(tmp_path, script, agent_timeout=0.3, pulses=False) == exit_codes.LEADER_LOST


@pytest.mark.process
def test_an_attempt_is_run_and_told_from_its_first_word_to_its_last(tmp_path: Path) -> None:
    program = "import sys; print('out of data'); sys.exit(4)"

    async def script(here: World) -> tuple[RankExited, HostStopped]:
        await here.leader.hear(Register)
        start = a_start(here.agent.config.place, program, attempt=2)
        await here.leader.say(start, start)
        return await here.leader.hear(RankExited), await here.leader.hear(HostStopped)

    exited, stopped = play(tmp_path, script)
    assert (exited.attempt, exited.rank, exited.exit_code, exited.signal) == (2, 0, 4, None)
    assert exited.log_tail == ("out of data",)
    assert (stopped.attempt, stopped.finished) == (2, False)


@pytest.mark.process
def test_the_host_of_a_rank_that_ended_speaks_of_broken_hardware_before_the_end_is_told(
    tmp_path: Path,
) -> None:
    def probe(pids: Mapping[int, int], limit_s: float) -> HostProbe:
        now = time.monotonic()
        return HostProbe(
            kernel=(
                f"[{now - 100:.6f}] NVRM: Xid (PCI:0000:1b:00): 79, of an earlier job",
                f"[{now:.6f}] usb 1-1: new device",
                f"[{now:.6f}] {XID}",
                f"[{now:.6f}] {AER}",
            )
        )

    async def script(here: World) -> list[Report]:
        here.agent.probe = probe
        await here.leader.hear(Register)
        start = a_start(here.agent.config.place, "raise SystemExit(4)", attempt=2)
        own = FailureRule(name="pcie", scope="host", action="replace", patterns=("AER: Uncorr",))
        await here.leader.say(replace(start, classes=(own,)))
        await here.leader.hear(HostStopped)
        return [
            it for it in here.leader.heard if isinstance(it, (RankExited, Evidence, HostStopped))
        ]

    exited, evidence, stopped = play(tmp_path, script)
    assert isinstance(exited, RankExited)
    assert isinstance(stopped, HostStopped)
    assert isinstance(evidence, Evidence)
    event = evidence.event
    assert [line.split("] ")[1] for line in event.kernel] == [XID, AER]
    assert (event.attempt, event.host, event.unasked) == (2, "host-0", True)
    assert (tmp_path / "job" / "traces" / "attempt-2" / "host-host-0.jsonl").exists()


@pytest.mark.process
def test_traces_that_hang_keep_neither_what_the_host_says_nor_the_end_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(evidence_collector, "_write", lambda attempt, found: goes_on.wait(WAIT_S))
    monkeypatch.setattr(host_processes, "keep", partial(evidence_collector.keep, limit_s=0.1))

    def probe(pids: Mapping[int, int], limit_s: float) -> HostProbe:
        return HostProbe(kernel=(f"[{time.monotonic():.6f}] {XID}",))

    async def script(here: World) -> list[Report]:
        here.agent.probe = probe
        await here.leader.hear(Register)
        await here.leader.say(a_start(here.agent.config.place, "raise SystemExit(4)"))
        await here.leader.hear(HostStopped)
        return [
            it for it in here.leader.heard if isinstance(it, (RankExited, Evidence, HostStopped))
        ]

    assert [type(report) for report in play(tmp_path, script)] == [
        RankExited,
        Evidence,
        HostStopped,
    ]
    assert not goes_on.is_set(), "nobody waited for it"
    goes_on.set()


@pytest.mark.process
def test_after_a_broken_connection_the_ends_are_said_again_and_duplicates_change_nothing(
    tmp_path: Path,
) -> None:
    async def script(here: World) -> None:
        leader, place = here.leader, here.agent.config.place
        await leader.hear(Register)
        start = a_start(place, SLEEPS)
        await leader.say(start)
        attempt = await until(lambda: here.agent.attempts.attempt, "the attempt")
        await until(lambda: attempt.ranks, "the rank")
        here.tell(RankStarted(attempt=1, rank=7, local_rank=1, pid=2_000_000_000))
        here.tell(RankExited(attempt=1, rank=7, exit_code=1, signal=None))
        await leader.hear(RankExited)

        await leader.lines[-1].close()
        await leader.hear(Register, 2)
        again = await leader.hear(RankExited, 2)
        assert (again.rank, again.stopped) == (7, False)

        await leader.say(start, Stop(attempt=1, grace_s=0.5), Stop(attempt=1, grace_s=0.5))
        stopped = await leader.hear(HostStopped)
        assert not stopped.finished
        await leader.lines[-1].close()
        await leader.hear(Register, 3)
        assert await leader.hear(HostStopped, 2) == stopped
        await leader.say(start, Stop(attempt=1, grace_s=0.5))
        assert await leader.hear(HostStopped, 3) == stopped
        assert here.agent.attempts.attempt is None, "what has been stopped is not started again"

    play(tmp_path, script)


def test_the_stop_of_an_attempt_that_never_began_is_answered_and_its_start_not_obeyed(
    tmp_path: Path,
) -> None:
    async def script(here: World) -> None:
        await here.leader.hear(Register)
        await here.leader.say(Stop(attempt=2, grace_s=1.0))
        assert await here.leader.hear(HostStopped) == HostStopped(
            attempt=2, host="host-0", finished=False
        )
        place = here.agent.config.place
        await here.leader.say(a_start(place, SLEEPS, attempt=2), Stop(attempt=1, grace_s=1.0))
        await here.leader.hear(HostStopped, 2)
        await here.leader.say(a_start(place, SLEEPS, attempt=2))
        await here.leader.say(OfferPort(attempt=3))
        await here.leader.hear(Port)
        assert here.agent.attempts.attempt is None

    play(tmp_path, script)


@pytest.mark.process
def test_a_new_attempt_ends_one_that_the_leader_gave_up(tmp_path: Path) -> None:
    async def script(here: World) -> None:
        leader, place = here.leader, here.agent.config.place
        await leader.hear(Register)
        await leader.say(a_start(place, SLEEPS, attempt=1))
        attempt = await until(lambda: here.agent.attempts.attempt, "the attempt")
        await until(lambda: attempt.ranks, "its rank")
        await leader.say(a_start(place, "print('second')", attempt=2))
        assert (await leader.hear(HostStopped)).attempt == 1
        second = await leader.hear(HostStopped, 2)
        assert (second.attempt, second.finished) == (2, True)
        assert is_free(place.lock)

    play(tmp_path, script)


def test_of_an_attempt_that_is_over_it_tells_what_its_ranks_had_called(tmp_path: Path) -> None:
    async def script(here: World) -> None:
        await here.leader.hear(Register)
        place = here.agent.config.place
        await here.leader.say(a_start(place, "print('done')", ranks=2))
        await here.leader.hear(HostStopped)
        dump = (ROOT / "tests" / "captured" / "flight" / "trace_0").read_bytes()
        (place.run_dir.traces(1) / f"{LAST_FILES}0").write_bytes(dump)
        await here.leader.say(Gather(attempt=1, timeout_s=1.0, ended=True))
        evidence = await here.leader.hear(Evidence)
        assert (set(evidence.dumps), evidence.event.dumps, evidence.event.ranks) == ({"0"}, 1, ())
        assert set(evidence.event.missing) == {"dump of rank 1"}
        await here.leader.say(Gather(attempt=2, timeout_s=1.0, ended=True))
        other = await here.leader.hear(Evidence, 2)
        assert other.event.missing == {"ranks": "this agent did not see the attempt"}

    play(tmp_path, script)


def test_what_cannot_be_read_on_the_socket_is_passed_over(tmp_path: Path) -> None:
    async def script(here: World) -> None:
        await here.leader.hear(Register)
        await here.leader.say(Gather(attempt=9, timeout_s=0.1))
        evidence = await here.leader.hear(Evidence)
        nothing = {"ranks": "no attempt runs here"}
        event = EvidenceGathered(attempt=9, host="host-0", ranks=(), missing=nothing)
        assert evidence == Evidence(event=event)
        junk = [b"", b"\xff", b"{}", b"null", b'{"kind": "Beat"}', b'{"kind": []}']
        here.tell(*junk, CheckpointSaved(attempt=1, step=3))
        await here.leader.say(OfferPort(attempt=3))
        await here.leader.hear(Port)
        assert here.leader.of(CheckpointSaved) == [], "it is of an attempt that is over"
        assert not here.task.done()

    play(tmp_path, script)


FORGED = Reading(name="sdc", scope="host", action="replace")


def test_what_becomes_of_checkpoints_is_told_to_the_leader_at_once(tmp_path: Path) -> None:
    saved = CheckpointSaved(attempt=1, step=3)
    failed = CheckpointFailed(attempt=1, step=4, why="No space left on device", reading=FORGED)

    async def script(here: World) -> tuple[CheckpointSaved, CheckpointFailed]:
        await here.leader.hear(Register)
        await here.leader.say(a_start(here.agent.config.place, SLEEPS))
        await until(lambda: here.agent.attempts.attempt, "the attempt")
        here.tell(saved, failed)
        return await here.leader.hear(CheckpointSaved), await here.leader.hear(CheckpointFailed)

    told, read = play(tmp_path, script)
    assert told == saved
    assert replace(read, reading=FORGED) == failed
    assert read.reading is not None
    assert read.reading.name == "disk-full", "the agent classifies, whatever the rank sent"


def test_a_torchrun_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    async def script(here: World) -> HostStopped:
        await here.leader.hear(Register)
        place = here.agent.config.place
        start = a_start(place, SLEEPS)
        waiting = here.agent.standby.waiting
        assert waiting is not None
        words = Path(f"/proc/{waiting.pid}/cmdline")
        # A shell until it has read what is taken away.
        await until(lambda: words.read_bytes().startswith(sys.executable.encode()), "python")
        Path(place.python).unlink()
        await here.leader.say(start)
        return await here.leader.hear(HostStopped)

    stopped = play(tmp_path, script)
    assert not stopped.finished
    assert stopped.why.startswith("torchrun ended with code 127\n")
    assert "python: [Errno 2]" in stopped.why


def test_a_defect_in_a_task_makes_the_agent_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(attempts: Attempts, order: Start) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Attempts, "start", broken)

    async def script(here: World) -> int:
        await here.leader.hear(Register)
        await here.leader.say(a_start(here.agent.config.place, SLEEPS))
        return await here.ends()

    assert play(tmp_path, script) == exit_codes.FAILED


def test_an_agent_says_what_is_not_in_order_on_its_host(tmp_path: Path) -> None:
    full = Finding(what="scratch", verdict="stops", found="1 MiB free in /tmp")

    async def script(here: World) -> Register:
        here.agent.config = replace(here.agent.config, findings=(full,))
        return await here.leader.hear(Register)

    assert play(tmp_path, script).agent.findings == (full,)


@pytest.mark.process
def test_an_agent_takes_part_in_a_check_of_the_fabric_once(tmp_path: Path) -> None:
    verdict = Checked(check=1, host="host-0", state="ok", seconds=0.25)
    order = CheckFabric(
        check=1,
        rank=0,
        hosts=("host-0",),
        master_address="127.0.0.1",
        master_port=1,
        timeout_s=20.0,
    )

    async def script(here: World) -> list[Checked]:
        said = json.dumps({key: getattr(verdict, key) for key in ("check", "host", "state")})
        child = Path(here.agent.config.place.python)
        line = said[:-1] + ', "seconds": 0.25}'
        child.write_text(
            f'#!/bin/sh\n[ $3 = trainer.rank.allreduce_check ] || exec {sys.executable} "$@"\n'
        )
        with child.open("a") as program:
            program.write(f"echo run >> {tmp_path}/runs\necho '{line}'\n")
        await here.leader.hear(Register)
        await here.leader.say(order)
        await here.leader.hear(Checked)
        await here.leader.say(order)  # as after a reconnection
        await here.leader.hear(Checked, 2)
        return here.leader.of(Checked)

    assert play(tmp_path, script) == [verdict, verdict]
    assert (tmp_path / "runs").read_text() == "run\n"
