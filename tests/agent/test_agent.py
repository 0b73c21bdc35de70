"""An agent with a fake leader that sends the orders of the test."""

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
    HostWarned,
    RankExited,
)
from orchestrator.contract.messages.rank_messages import RankStarted, to_bytes
from orchestrator.contract.spec.failures import FailureRule, Reading
from orchestrator.health.host_probes import HostProbe
from orchestrator.health.host_warnings import Warned, Watch
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
"""Silence after which these agents lose their leader, unless a test sets another limit."""


@dataclass
class FakeLeader:
    """Records reports and sends the orders of a test."""

    heard: list[Report] = field(default_factory=list)
    lines: list[web.WebSocketResponse] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    refuse: int | None = None
    pulses: bool = False
    frozen: bool = False
    """Reads nothing, and does not even answer a close frame."""

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

    async def send(self, *orders: Order) -> None:
        for order in orders:
            await self.lines[-1].send_str(json.dumps(encode_tagged(order)))

    def of(self, kind: type[T]) -> list[T]:
        return [report for report in self.heard if isinstance(report, kind)]

    async def expect(self, kind: type[T], count: int = 1) -> T:
        """Wait for the `count`-th report of a kind."""
        found: T = (await until(lambda: self.of(kind)[count - 1 :], kind.__name__))[0]
        return found


LeaderFile = Literal["right", "wrong", "missing"]
"""Whether `leader.json` has the right address, a wrong one, or does not exist."""


def _refusal(status: int) -> web.HTTPException:
    return {401: web.HTTPUnauthorized, 503: web.HTTPServiceUnavailable}[status]()


@dataclass
class AgentRun:
    agent: Agent
    leader: FakeLeader
    clock: LoopClock
    task: "asyncio.Task[int]"

    def send_datagrams(self, *datagrams: Any) -> None:
        """Send messages as a rank of this host does."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            for datagram in datagrams:
                data = datagram if isinstance(datagram, bytes) else to_bytes(datagram)
                sock.sendto(data, str(self.agent.config.place.socket))

    async def hears_nothing_for(self, seconds: float) -> None:
        """The leader sends nothing from now on."""
        self.leader.pulses = False
        offered = len(self.leader.of(Port))
        await self.leader.send(OfferPort(attempt=1))
        await self.leader.expect(Port, offered + 1)  # so no earlier message is in flight
        await self.time_passes(seconds)

    async def time_passes(self, seconds: float) -> None:
        """In small steps: a large step would look like a pause of the agent itself."""
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.clock.put_forward(LISTEN_S / 2)
            await asyncio.sleep(0.001)

    async def wait_for_exit(self) -> int:
        return await asyncio.wait_for(self.task, WAIT_S)


XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus."
AER = "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received"


@contextlib.asynccontextmanager
async def run_agent(
    folder: Path,
    clock: LoopClock,
    agent_timeout: float,
    pulses: bool,
    patience_s: float,
    leader_file: LeaderFile,
    leader_name: str,
    watch: Watch | None,
) -> AsyncIterator[AgentRun]:
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
        leader_at="" if leader_file == "right" else f"127.0.0.1:{runner.addresses[0][1]}",
        watch=watch,
    )
    agent = Agent(config, os.environ, clock)
    port = runner.addresses[0][1] if leader_file == "right" else free_port("127.0.0.1")
    if leader_file != "missing":
        announce(place.run_dir, Term(LAUNCH), "127.0.0.1", port, leader_name)

    async def pulse() -> None:
        while True:
            await asyncio.sleep(0.05)
            if leader.pulses and leader.lines and not leader.lines[-1].closed:
                with contextlib.suppress(ConnectionError):
                    await leader.send(Pulse(launch=LAUNCH))

    pulsing = asyncio.create_task(pulse())
    running = asyncio.create_task(agent.run())
    try:
        yield AgentRun(agent, leader, clock, running)
    finally:
        agent.leave(exit_codes.OK)
        pulsing.cancel()
        await asyncio.gather(running, pulsing, return_exceptions=True)
        await runner.cleanup()


async def with_a_rank(run: AgentRun) -> tuple[Any, Any]:
    """The attempt that the agent starts, and the record of its rank, which sleeps."""
    await run.leader.expect(Register)
    await run.leader.send(a_start(run.agent.config.place, SLEEPS))
    attempt = await until(lambda: run.agent.attempts.attempt, "the attempt")
    return attempt, await until(lambda: attempt.ranks.get(0), "the rank")


def run_script(
    folder: Path,
    script: Callable[[AgentRun], Awaitable[T]],
    agent_timeout: float = TIMEOUT_S,
    pulses: bool = True,
    patience_s: float = 0.0,
    leader_file: LeaderFile = "right",
    leader_name: str = "",
    watch: Watch | None = None,
) -> T:
    async def with_clock(clock: LoopClock) -> T:
        async with run_agent(
            folder, clock, agent_timeout, pulses, patience_s, leader_file, leader_name, watch
        ) as run:
            return await asyncio.wait_for(script(run), WAIT_S)

    return run_with_clock(with_clock)


def test_an_agent_registers_and_leaves_when_ordered(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> tuple[Register, int]:
        register = await run.leader.expect(Register)
        await run.leader.expect(Digest)
        await run.leader.send(Leave(reason="the job is over"))
        return register, await run.wait_for_exit()

    register, code = run_script(tmp_path, script)
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


def test_an_agent_reports_that_the_leaders_name_does_not_resolve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_name(name: str) -> tuple[str, ...]:
        raise OSError(f"{name}: Name or service not known")

    monkeypatch.setattr("orchestrator.health.clocks_and_names.addresses_of", no_name)

    async def script(run: AgentRun) -> Register:
        return await run.leader.expect(Register)

    (finding,) = run_script(tmp_path, script, leader_name="node1").agent.findings
    assert (finding.what, finding.verdict) == ("name", "warns")
    assert finding.found == "host-0 cannot resolve node1: node1: Name or service not known"
    assert finding.fix == "make node1 resolvable on host-0 (DNS, /etc/hosts)"


@pytest.mark.parametrize("leader_file", ["missing", "wrong"])
def test_without_a_right_leader_file_the_address_of_the_scheduler_is_used(
    tmp_path: Path, leader_file: LeaderFile
) -> None:
    async def script(run: AgentRun) -> int:
        await run.leader.expect(Register)
        await run.leader.send(Leave(reason="the job is over"))
        return await run.wait_for_exit()

    assert run_script(tmp_path, script, leader_file=leader_file) == exit_codes.OK


def test_an_agent_that_will_be_replaced_exits_with_the_requeue_code(
    tmp_path: Path,
) -> None:
    """An operator does not recreate a pod that exited with 0, so the job would miss it for ever."""

    async def script(run: AgentRun) -> int:
        await run.leader.expect(Register)
        await run.leader.send(Leave(reason="all hosts are given back", again=True))
        return await run.wait_for_exit()

    assert run_script(tmp_path, script) == exit_codes.REQUEUED


def test_an_agent_proves_the_secret_without_sending_it(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> tuple[list[str], str]:
        register = await run.leader.expect(Register)
        return run.leader.headers, register.agent.incarnation

    (header,), incarnation = run_script(tmp_path, script)
    assert SECRET.key.decode() not in header
    assert proved(SECRET, NONCE, header) == Claim(
        purpose="agent", launch=LAUNCH, host="host-0", incarnation=incarnation
    )
    assert proved(SECRET, "another", header) is None


def test_a_leader_of_another_job_gets_no_proof(tmp_path: Path) -> None:
    """The leader of another job may have the port of a leader that has ended."""
    other = secret_from(draw())

    async def script(run: AgentRun) -> int:
        run.agent.connector = WebSockets(other)
        run.clock.put_forward(TIMEOUT_S + FIND_LEADER_S)
        return await run.wait_for_exit()

    async def with_clock(clock: LoopClock) -> tuple[int, list[str]]:
        leader_file: LeaderFile = "right"
        async with run_agent(tmp_path, clock, TIMEOUT_S, True, 0.0, leader_file, "", None) as run:
            return await asyncio.wait_for(script(run), WAIT_S), run.leader.headers

    assert run_with_clock(with_clock) == (exit_codes.LEADER_LOST, [])


def test_a_refused_agent_exits_with_its_code(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> int:
        run.leader.refuse = 401
        return await run.wait_for_exit()

    assert run_script(tmp_path, script) == exit_codes.NOT_ADMITTED


def test_an_agent_connects_again_to_a_leader_that_is_not_ready(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> None:
        run.leader.refuse = 503
        await until(lambda: run.leader.headers, "the first attempt")
        run.leader.refuse = None
        await run.leader.expect(Register)

    run_script(tmp_path, script)


def test_an_agent_that_starts_after_the_end_of_the_job_exits(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> int:
        run_dir = run.agent.config.place.run_dir
        announce_end(run_dir, Term(LAUNCH))
        return await run.wait_for_exit()

    assert run_script(tmp_path, script) == exit_codes.OK


@pytest.mark.parametrize("text", ["", "[]", "{", '{"launch": 2, "address": "x", "port": 1}'])
def test_the_leader_file_of_another_launch_is_ignored(tmp_path: Path, text: str) -> None:
    async def script(run: AgentRun) -> int:
        run.agent.config = replace(run.agent.config, find_leader_s=0.1)
        run.agent.config.place.run_dir.leader.write_text(text)
        return await run.wait_for_exit()

    assert run_script(tmp_path, script, agent_timeout=0.1) == exit_codes.LEADER_LOST


def test_a_free_port_is_offered(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> Port:
        await run.leader.expect(Register)
        await run.leader.send(OfferPort(attempt=4))
        return await run.leader.expect(Port)

    offer = run_script(tmp_path, script)
    assert offer.attempt == 4
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", offer.port))


@pytest.mark.process
def test_silence_of_the_leader_stops_the_ranks_and_the_agent_exits(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> tuple[int, int]:
        _, record = await with_a_rank(run)
        await run.hears_nothing_for(TIMEOUT_S + 1.0)
        return record.pid, await run.wait_for_exit()

    pid, code = run_script(tmp_path, script)
    assert code == exit_codes.LEADER_LOST
    assert is_gone(pid)


@pytest.mark.process
def test_an_agent_with_patience_stops_its_ranks_and_serves_the_next_leader(
    tmp_path: Path,
) -> None:
    async def script(run: AgentRun) -> None:
        attempt, record = await with_a_rank(run)
        run.leader.refuse = HTTPStatus.UNAUTHORIZED  # the leader of another job has its address now
        await run.leader.lines[-1].close()
        await until(lambda: len(run.leader.headers) > 1, "a second connection")
        run.clock.put_forward(TIMEOUT_S + 1.0)
        await until(lambda: is_gone(record.pid), "the end of the rank")
        await until(lambda: len(run.leader.headers) > 2, "a third connection")
        assert not run.task.done()
        run.leader.refuse = None
        second = await run.leader.expect(Register, 2)
        assert second.agent.incarnation == run.agent.incarnation
        assert (await run.leader.expect(HostStopped)).attempt == attempt.start.attempt
        await run.leader.send(Leave(reason="over"))
        assert await run.wait_for_exit() == exit_codes.OK

    run_script(tmp_path, script, patience_s=2 * WAIT_S)


@pytest.mark.process
def test_after_a_pause_of_the_whole_job_the_agent_waits_for_the_leader(
    tmp_path: Path,
) -> None:
    """`scontrol suspend` stops all processes of a job, and `resume` wakes them in any order."""

    async def script(run: AgentRun) -> None:
        _, record = await with_a_rank(run)
        run.leader.pulses = False
        await asyncio.sleep(0.2)  # earlier messages arrive
        run.clock.put_forward(TIMEOUT_S + 1.0)
        await asyncio.sleep(0.2)
        run.leader.pulses = True
        digests = len(run.leader.of(Digest))
        await run.leader.expect(Digest, digests + 2)
        assert not is_gone(record.pid)
        assert len(run.leader.of(Register)) == 1, "the connection was kept"
        await run.leader.send(Leave(reason="over"))
        assert await run.wait_for_exit() == exit_codes.OK

    run_script(tmp_path, script)


def set_outlives_leader(run: AgentRun) -> None:
    run.agent.config = replace(run.agent.config, outlives_leader=True)


@pytest.mark.process
def test_an_agent_that_outlives_its_leader_stops_ranks_and_reports_that_to_the_next_leader(
    tmp_path: Path,
) -> None:
    async def script(run: AgentRun) -> None:
        set_outlives_leader(run)
        leader, place = run.leader, run.agent.config.place
        await with_a_rank(run)
        leader.pulses, leader.frozen = False, True
        await leader.lines[-1].close()
        await run.time_passes(TIMEOUT_S + 1.0)
        await until(run.agent.alone.is_set, "the agent to give up its leader")
        assert is_free(place.lock), "no rank is left"
        assert not run.task.done()
        leader.pulses, leader.frozen = True, False
        await until(lambda: not run.agent.alone.is_set(), "a leader")
        stopped = await leader.expect(HostStopped)
        assert (stopped.attempt, stopped.finished) == (1, False)
        assert stopped.alone_s > TIMEOUT_S
        assert len(leader.of(HostStopped)) == 1, "reported once, with the present time"

    run_script(tmp_path, script)


@pytest.mark.parametrize("held", [True, False])
def test_a_leader_whose_process_has_ended_is_given_up_early(tmp_path: Path, held: bool) -> None:
    """Its port is closed, and the kernel has released the lock of its journal."""

    async def script(run: AgentRun) -> None:
        set_outlives_leader(run)
        run_dir = run.agent.config.place.run_dir
        await run.leader.expect(Register)
        with run_dir.journal.open("w") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            announce(run_dir, Term(LAUNCH), "127.0.0.1", free_port("127.0.0.1"))
            await run.leader.lines[-1].close()
            await until(lambda: run.agent.unserved, "the closed port")
            run.clock.put_forward(ENDED_S + 1.0)
            if held:
                await asyncio.sleep(0.5)
                assert not run.agent.alone.is_set()
        await until(run.agent.alone.is_set, "the agent to give up its leader")
        assert run.agent.silent_for() < TIMEOUT_S

    run_script(tmp_path, script)


def test_a_leader_that_does_not_answer_is_not_given_up_early(tmp_path: Path) -> None:
    """It may answer again in a moment, although the lock of the journal is free."""

    async def script(run: AgentRun) -> None:
        set_outlives_leader(run)
        await run.leader.expect(Register)
        run.leader.frozen = True
        await run.leader.lines[-1].close()
        run.clock.put_forward(ENDED_S + 1.0)
        await asyncio.sleep(0.5)
        assert not run.agent.alone.is_set()

    run_script(tmp_path, script, pulses=False)


def test_an_agent_exits_when_its_patience_is_over(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> int:
        await run.leader.expect(Register)
        run.leader.frozen = True
        await run.leader.lines[-1].close()
        return await run.wait_for_exit()

    code = run_script(tmp_path, script, agent_timeout=0.2, pulses=False, patience_s=0.3)
    assert code == exit_codes.LEADER_LOST


def test_an_agent_reports_what_its_host_warns_of_and_repeats_it_after_a_reconnection(
    tmp_path: Path,
) -> None:
    looks = [(Warned("links", "port mlx5_0/1 loses its link again and again"),)]

    def watch(now: float) -> tuple[Warned, ...]:
        return looks.pop() if looks else ()

    async def script(run: AgentRun) -> None:
        warned = await run.leader.expect(HostWarned)
        assert (warned.host, warned.problem, warned.lasts) == ("host-0", "links", True)
        run.agent.warnings["links"] = warned, run.agent.clock.monotonic() - 100.0
        await run.leader.lines[-1].close()
        await run.leader.expect(Register, 2)
        again = await run.leader.expect(HostWarned, 2)
        assert 100.0 <= again.age_s < 100.0 + WAIT_S
        assert replace(again, age_s=0.0) == replace(warned, age_s=0.0)

    run_script(tmp_path, script, watch=watch)


def test_a_driver_that_hangs_ends_the_watch_and_not_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.agent.agent.WATCH_LIMIT_S", 0.05)
    hangs = threading.Event()

    def watch(now: float) -> tuple[Warned, ...]:
        hangs.wait(WAIT_S)
        return (Warned("gpu", "too late"),)

    async def script(run: AgentRun) -> None:
        await run.leader.expect(Register)
        await until(lambda: not run.agent.tasks, "the end of the watch")
        hangs.set()
        await run.leader.expect(Digest, 3)
        assert run.leader.of(HostWarned) == []

    run_script(tmp_path, script, watch=watch)


def test_a_defect_of_the_watch_ends_the_watch_and_not_the_agent(tmp_path: Path) -> None:
    def watch(now: float) -> tuple[Warned, ...]:
        raise ValueError("an output that no version had before")

    async def script(run: AgentRun) -> None:
        await run.leader.expect(Register)
        await until(lambda: not run.agent.tasks, "the end of the watch")
        await run.leader.expect(Digest, 3)

    run_script(tmp_path, script, watch=watch)


@pytest.mark.process
def test_a_host_that_must_leave_reports_it_and_exits_after_its_ranks(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> None:
        place = run.agent.config.place
        attempt, _ = await with_a_rank(run)
        run.agent.warned("SIGTERM")
        assert await run.leader.expect(HostLeaving) == HostLeaving(host=place.host, why="SIGTERM")
        assert not run.task.done()
        await run.leader.send(Stop(attempt=attempt.start.attempt, grace_s=0.1))
        await run.leader.expect(HostStopped)
        assert await run.wait_for_exit() == exit_codes.LEADER_LOST

    run_script(tmp_path, script, patience_s=60.0)


@pytest.mark.process
def test_a_host_that_must_leave_without_a_leader_stops_its_ranks_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.agent.agent.HEARD_S", 0.3)

    async def script(run: AgentRun) -> None:
        _, record = await with_a_rank(run)
        run.leader.frozen = True
        await run.leader.lines[-1].close()
        run.agent.warned("SIGTERM")
        assert await run.wait_for_exit() == exit_codes.LEADER_LOST
        assert is_gone(record.pid)

    run_script(tmp_path, script, pulses=False, patience_s=60.0)


def test_a_leader_that_does_not_answer_a_close_does_not_block_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default aiohttp waits for the answer to a close frame without limit."""
    patient = ClientWSTimeout(ws_close=None)
    monkeypatch.setattr("aiohttp.client.DEFAULT_WS_CLIENT_TIMEOUT", patient)

    async def script(run: AgentRun) -> int:
        run.leader.frozen = True
        await until(lambda: run.leader.lines, "the agent")
        return await run.wait_for_exit()

    assert run_script(tmp_path, script, agent_timeout=0.3, pulses=False) == exit_codes.LEADER_LOST


@pytest.mark.process
def test_an_attempt_is_run_and_its_exits_are_reported(tmp_path: Path) -> None:
    program = "import sys; print('out of data'); sys.exit(4)"

    async def script(run: AgentRun) -> tuple[RankExited, HostStopped]:
        await run.leader.expect(Register)
        start = a_start(run.agent.config.place, program, attempt=2)
        await run.leader.send(start, start)
        return await run.leader.expect(RankExited), await run.leader.expect(HostStopped)

    exited, stopped = run_script(tmp_path, script)
    assert (exited.attempt, exited.rank, exited.exit_code, exited.signal) == (2, 0, 4, None)
    assert exited.log_tail == ("out of data",)
    assert (stopped.attempt, stopped.finished) == (2, False)


@pytest.mark.process
def test_hardware_errors_are_reported_before_the_end_of_the_attempt(
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

    async def script(run: AgentRun) -> list[Report]:
        run.agent.probe = probe
        await run.leader.expect(Register)
        start = a_start(run.agent.config.place, "raise SystemExit(4)", attempt=2)
        own = FailureRule(name="pcie", scope="host", action="replace", patterns=("AER: Uncorr",))
        await run.leader.send(replace(start, classes=(own,)))
        await run.leader.expect(HostStopped)
        return [
            it for it in run.leader.heard if isinstance(it, (RankExited, Evidence, HostStopped))
        ]

    exited, evidence, stopped = run_script(tmp_path, script)
    assert isinstance(exited, RankExited)
    assert isinstance(stopped, HostStopped)
    assert isinstance(evidence, Evidence)
    event = evidence.event
    assert [line.split("] ")[1] for line in event.kernel] == [XID, AER]
    assert (event.attempt, event.host, event.unasked) == (2, "host-0", True)
    assert (tmp_path / "job" / "traces" / "attempt-2" / "host-host-0.jsonl").exists()


@pytest.mark.process
def test_a_trace_folder_that_hangs_delays_neither_evidence_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(evidence_collector, "_write", lambda attempt, found: released.wait(WAIT_S))
    monkeypatch.setattr(host_processes, "keep", partial(evidence_collector.keep, limit_s=0.1))

    def probe(pids: Mapping[int, int], limit_s: float) -> HostProbe:
        return HostProbe(kernel=(f"[{time.monotonic():.6f}] {XID}",))

    async def script(run: AgentRun) -> list[Report]:
        run.agent.probe = probe
        await run.leader.expect(Register)
        await run.leader.send(a_start(run.agent.config.place, "raise SystemExit(4)"))
        await run.leader.expect(HostStopped)
        return [
            it for it in run.leader.heard if isinstance(it, (RankExited, Evidence, HostStopped))
        ]

    assert [type(report) for report in run_script(tmp_path, script)] == [
        RankExited,
        Evidence,
        HostStopped,
    ]
    assert not released.is_set(), "no task waited for the write"
    released.set()


@pytest.mark.process
def test_after_a_reconnection_exits_are_reported_again_and_duplicate_orders_change_nothing(
    tmp_path: Path,
) -> None:
    async def script(run: AgentRun) -> None:
        leader, place = run.leader, run.agent.config.place
        await leader.expect(Register)
        start = a_start(place, SLEEPS)
        await leader.send(start)
        attempt = await until(lambda: run.agent.attempts.attempt, "the attempt")
        await until(lambda: attempt.ranks, "the rank")
        run.send_datagrams(RankStarted(attempt=1, rank=7, local_rank=1, pid=2_000_000_000))
        run.send_datagrams(RankExited(attempt=1, rank=7, exit_code=1, signal=None))
        await leader.expect(RankExited)

        await leader.lines[-1].close()
        await leader.expect(Register, 2)
        again = await leader.expect(RankExited, 2)
        assert (again.rank, again.stopped) == (7, False)

        await leader.send(start, Stop(attempt=1, grace_s=0.5), Stop(attempt=1, grace_s=0.5))
        stopped = await leader.expect(HostStopped)
        assert not stopped.finished
        await leader.lines[-1].close()
        await leader.expect(Register, 3)
        assert await leader.expect(HostStopped, 2) == stopped
        await leader.send(start, Stop(attempt=1, grace_s=0.5))
        assert await leader.expect(HostStopped, 3) == stopped
        assert run.agent.attempts.attempt is None, "a stopped attempt is not started again"

    run_script(tmp_path, script)


def test_a_stop_before_the_start_is_answered_and_the_later_start_is_ignored(
    tmp_path: Path,
) -> None:
    async def script(run: AgentRun) -> None:
        await run.leader.expect(Register)
        await run.leader.send(Stop(attempt=2, grace_s=1.0))
        assert await run.leader.expect(HostStopped) == HostStopped(
            attempt=2, host="host-0", finished=False
        )
        place = run.agent.config.place
        await run.leader.send(a_start(place, SLEEPS, attempt=2), Stop(attempt=1, grace_s=1.0))
        await run.leader.expect(HostStopped, 2)
        await run.leader.send(a_start(place, SLEEPS, attempt=2))
        await run.leader.send(OfferPort(attempt=3))
        await run.leader.expect(Port)
        assert run.agent.attempts.attempt is None

    run_script(tmp_path, script)


@pytest.mark.process
def test_a_new_attempt_ends_the_previous_one(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> None:
        leader, place = run.leader, run.agent.config.place
        await leader.expect(Register)
        await leader.send(a_start(place, SLEEPS, attempt=1))
        attempt = await until(lambda: run.agent.attempts.attempt, "the attempt")
        await until(lambda: attempt.ranks, "its rank")
        await leader.send(a_start(place, "print('second')", attempt=2))
        assert (await leader.expect(HostStopped)).attempt == 1
        second = await leader.expect(HostStopped, 2)
        assert (second.attempt, second.finished) == (2, True)
        assert is_free(place.lock)

    run_script(tmp_path, script)


def test_the_recorded_collectives_of_an_ended_attempt_can_be_gathered(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> None:
        await run.leader.expect(Register)
        place = run.agent.config.place
        await run.leader.send(a_start(place, "print('done')", ranks=2))
        await run.leader.expect(HostStopped)
        dump = (ROOT / "tests" / "captured" / "flight" / "trace_0").read_bytes()
        (place.run_dir.traces(1) / f"{LAST_FILES}0").write_bytes(dump)
        await run.leader.send(Gather(attempt=1, timeout_s=1.0, ended=True))
        evidence = await run.leader.expect(Evidence)
        assert (set(evidence.dumps), evidence.event.dumps, evidence.event.ranks) == ({"0"}, 1, ())
        assert set(evidence.event.missing) == {"dump of rank 1"}
        await run.leader.send(Gather(attempt=2, timeout_s=1.0, ended=True))
        other = await run.leader.expect(Evidence, 2)
        assert other.event.missing == {"ranks": "this agent did not see the attempt"}

    run_script(tmp_path, script)


def test_unreadable_messages_on_the_socket_are_ignored(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> None:
        await run.leader.expect(Register)
        await run.leader.send(Gather(attempt=9, timeout_s=0.1))
        evidence = await run.leader.expect(Evidence)
        nothing = {"ranks": "no attempt runs here"}
        event = EvidenceGathered(attempt=9, host="host-0", ranks=(), missing=nothing)
        assert evidence == Evidence(event=event)
        junk = [b"", b"\xff", b"{}", b"null", b'{"kind": "Beat"}', b'{"kind": []}']
        run.send_datagrams(*junk, CheckpointSaved(attempt=1, step=3))
        await run.leader.send(OfferPort(attempt=3))
        await run.leader.expect(Port)
        assert run.leader.of(CheckpointSaved) == [], "its attempt is over"
        assert not run.task.done()

    run_script(tmp_path, script)


FORGED = Reading(name="sdc", scope="host", action="replace")


def test_saved_and_failed_checkpoints_are_reported_at_once(tmp_path: Path) -> None:
    saved = CheckpointSaved(attempt=1, step=3)
    failed = CheckpointFailed(attempt=1, step=4, why="No space left on device", reading=FORGED)

    async def script(run: AgentRun) -> tuple[CheckpointSaved, CheckpointFailed]:
        await run.leader.expect(Register)
        await run.leader.send(a_start(run.agent.config.place, SLEEPS))
        await until(lambda: run.agent.attempts.attempt, "the attempt")
        run.send_datagrams(saved, failed)
        return await run.leader.expect(CheckpointSaved), await run.leader.expect(CheckpointFailed)

    leader_file, failed_report = run_script(tmp_path, script)
    assert leader_file == saved
    assert replace(failed_report, reading=FORGED) == failed
    assert failed_report.reading is not None
    assert failed_report.reading.name == "disk-full", "the agent classifies the failure itself"


def test_a_torchrun_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    async def script(run: AgentRun) -> HostStopped:
        await run.leader.expect(Register)
        place = run.agent.config.place
        start = a_start(place, SLEEPS)
        waiting = run.agent.standby.waiting
        assert waiting is not None
        words = Path(f"/proc/{waiting.pid}/cmdline")
        # The script must have started the real python before the script is deleted.
        await until(lambda: words.read_bytes().startswith(sys.executable.encode()), "python")
        Path(place.python).unlink()
        await run.leader.send(start)
        return await run.leader.expect(HostStopped)

    stopped = run_script(tmp_path, script)
    assert not stopped.finished
    assert stopped.why.startswith("torchrun ended with code 127\n")
    assert "python: [Errno 2]" in stopped.why


def test_an_exception_in_a_task_ends_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(attempts: Attempts, order: Start) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Attempts, "start", broken)

    async def script(run: AgentRun) -> int:
        await run.leader.expect(Register)
        await run.leader.send(a_start(run.agent.config.place, SLEEPS))
        return await run.wait_for_exit()

    assert run_script(tmp_path, script) == exit_codes.FAILED


def test_an_agent_registers_with_the_findings_of_its_host(tmp_path: Path) -> None:
    full = Finding(what="scratch", verdict="stops", found="1 MiB free in /tmp")

    async def script(run: AgentRun) -> Register:
        run.agent.config = replace(run.agent.config, findings=(full,))
        return await run.leader.expect(Register)

    assert run_script(tmp_path, script).agent.findings == (full,)


@pytest.mark.process
def test_a_repeated_order_for_the_fabric_check_does_not_run_it_again(tmp_path: Path) -> None:
    verdict = Checked(check=1, host="host-0", state="ok")
    order = CheckFabric(
        check=1,
        rank=0,
        hosts=("host-0",),
        master_address="127.0.0.1",
        master_port=1,
        timeout_s=20.0,
    )

    async def script(run: AgentRun) -> list[Checked]:
        line = json.dumps({key: getattr(verdict, key) for key in ("check", "host", "state")})
        child = Path(run.agent.config.place.python)
        child.write_text(
            f'#!/bin/sh\n[ $3 = trainer.rank.allreduce_check ] || exec {sys.executable} "$@"\n'
        )
        with child.open("a") as program:
            program.write(f"echo run >> {tmp_path}/runs\necho '{line}'\n")
        await run.leader.expect(Register)
        await run.leader.send(order)
        await run.leader.expect(Checked)
        await run.leader.send(order)  # as after a reconnection
        await run.leader.expect(Checked, 2)
        return run.leader.of(Checked)

    assert run_script(tmp_path, script) == [verdict, verdict]
    assert (tmp_path / "runs").read_text() == "run\n"
