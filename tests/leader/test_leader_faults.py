"""Faults that a leader survives: lost agents and connections, a full disk, bad input, a pause."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.messages.agent_protocol import PULSE_S, Digest, Leave, Pulse, Start, Stop
from orchestrator.contract.messages.events import AgentLost, AgentRegistered, RunDirLost
from orchestrator.journal.journal import Decided, Journal, read
from orchestrator.journal.supervisor import Supervisor
from tests.agent.world import WAIT_S, until
from tests.leader.leader_world import (
    CHECK_S,
    SILENT_S,
    LedJob,
    exited,
    run_script,
    start_attempt,
    stopped,
)


def test_a_silent_agent_is_lost_and_replaced(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        while not (found := job.events(AgentLost)):
            await job.pass_time(zero)
        (lost,) = found
        assert lost.host == "host-1"
        assert lost.why.startswith("it was silent for")
        await zero.expect(Stop)
        await until(lambda: job.backend.replaced == ["host-1"], "the backend")
        # The agent was only frozen. The leader ignores its messages until it registers again.
        await one.send(Digest(attempt=1, ranks=()))
        await one.wait_closed()

    run_script(tmp_path, script)


def test_a_backend_that_cannot_replace_a_host_does_not_end_the_leader(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        job.backend.broken = True
        one = await job.agent("host-1")
        await one.ws.close()
        await job.wait_for_event(AgentLost)
        await until(lambda: job.backend.replaced, "the backend")
        await job.agent("host-1", pid=101)
        await job.wait_for_event(AgentRegistered, 2)

    run_script(tmp_path, script, agent_timeout=0.3)


def test_an_agent_that_reconnects_in_time_is_not_lost_and_gets_its_orders_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.agent_sessions.RECONNECT_S", SILENT_S)

    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        await one.ws.close()
        back = await job.agent("host-1")
        assert (await back.expect(Start)).attempt == 1
        await zero.send(exited(0, "host-0"))
        assert (await back.expect(Stop)).attempt == 1
        assert job.events(AgentLost) == []
        assert len(job.events(AgentRegistered)) == 2

    run_script(tmp_path, script)


def test_orders_go_to_the_new_connection_even_while_the_old_one_looks_alive(
    tmp_path: Path,
) -> None:
    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        back = await job.agent("host-1")  # `one` stays open, as after a network cut
        assert (await back.expect(Start)).attempt == 1
        for _ in range(2):  # the old connection still gets pulses
            job.clock.put_forward(PULSE_S)
            assert isinstance(await one.next_order(), Pulse)
        await zero.send(exited(0, "host-0"))
        assert (await back.expect(Stop)).attempt == 1
        await one.send(Digest(attempt=1, ranks=()))
        await one.wait_closed()

    run_script(tmp_path, script)


def test_a_new_agent_of_the_same_host_replaces_the_old_one(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        again = await job.agent("host-1", pid=101)
        assert (await zero.expect(Stop)).attempt == 1
        await one.send(Digest(attempt=1, ranks=()))
        await one.wait_closed()
        await again.expect(Stop)
        await zero.send(stopped("host-0"))
        await start_attempt(zero, again, 2)
        assert job.backend.replaced == []

    run_script(tmp_path, script)


@pytest.mark.parametrize("text", ["{", "null", '{"kind": "Nonsense"}', '{"kind": []}', "[" * 9999])
def test_an_unreadable_message_closes_its_connection_and_nothing_else(
    tmp_path: Path, text: str
) -> None:
    async def script(job: LedJob) -> None:
        bad = await job.connect("host-0")
        await bad.ws.send_str(text)
        await bad.wait_closed()
        worse = await job.agent("host-0")
        await worse.ws.send_str(text)
        await worse.wait_closed()
        binary = await job.agent("host-0")
        await binary.ws.send_bytes(b"\x00")
        await binary.wait_closed()
        await job.agent("host-0")
        one = await job.agent("host-1")
        assert await job.wait_for_event(AgentRegistered, 2)
        assert not one.ws.closed
        assert not job.task.done()

    run_script(tmp_path, script)


def test_a_failed_write_of_the_journal_is_repeated_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.event_queue.JOURNAL_RETRY_S", 0.05)
    extend, failures = Journal.extend, [OSError(28, "no space left"), OSError(5, "I/O error")]

    def failing(journal: Journal, decided: Decided) -> Any:
        if failures and any(isinstance(event, AgentRegistered) for event, _ in decided):
            raise failures.pop()
        return extend(journal, decided)

    monkeypatch.setattr(Journal, "extend", failing)

    async def script(job: LedJob) -> list[AgentRegistered]:
        await job.start_both()
        return job.events(AgentRegistered)

    registered = run_script(tmp_path, script)
    assert failures == []
    assert [event.host for event in registered] == ["host-0", "host-1"]


def test_the_leader_sends_pulses_during_a_slow_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend, written = Journal.extend, threading.Event()

    def slow(journal: Journal, decided: Decided) -> Any:
        if any(isinstance(event, AgentRegistered) for event, _ in decided):
            assert written.wait(WAIT_S)
        return extend(journal, decided)

    monkeypatch.setattr(Journal, "extend", slow)

    async def script(job: LedJob) -> None:
        zero = await job.agent("host-0")
        try:
            for _ in range(2):
                job.clock.put_forward(PULSE_S)
                assert isinstance(await zero.next_order(), Pulse)
            assert job.events(AgentRegistered) == []
        finally:
            written.set()
        await job.wait_for_event(AgentRegistered)

    run_script(tmp_path, script)


def test_after_a_pause_of_the_leader_no_agent_is_lost(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, _ = await job.start_both()
        job.clock.put_forward(
            SILENT_S + 1.0
        )  # the whole process pauses, as on a machine that swaps
        for _ in range(3):
            await job.pass_time()
        assert job.events(AgentLost) == []
        await zero.send(stopped("host-0", finished=True))

    run_script(tmp_path, script)


def test_an_exception_in_a_decision_ends_the_leader_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.leader_server.CLOSE_S", 0.1)

    def broken(supervisor: Supervisor, events: object) -> Any:
        raise KeyError("a defect")

    async def script(job: LedJob) -> None:
        await job.agent("host-0")
        monkeypatch.setattr(Supervisor, "take", broken)
        with pytest.raises(KeyError, match="a defect"):
            await job.end()

    run_script(tmp_path, script)


def test_moving_the_run_directory_ends_the_job_and_its_journal_says_so(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    folder.mkdir()

    async def script(job: LedJob) -> Leave:
        zero, one = await job.start_both()
        folder.rename(elsewhere)
        leave = asyncio.create_task(zero.expect(Leave))
        checks = 0
        while not leave.done():
            job.clock.put_forward(CHECK_S)
            await asyncio.sleep(0.02)
            checks += 1
            assert checks < 500
        await asyncio.gather(zero.ws.close(), one.ws.close())
        assert (await job.end()).state == "FAILED"
        return await leave

    leave = run_script(folder, script)
    (*_, last) = read(elsewhere / "journal.jsonl")
    assert isinstance(last.event, RunDirLost)
    assert last.event.why == leave.reason
    assert f"{folder}/journal.jsonl is gone since" in leave.reason
    assert not folder.exists()
