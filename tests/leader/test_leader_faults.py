"""What a leader survives: lost agents and lines, a full disk, nonsense, its own standstill."""

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
from tests.leader.leader_world import LOOKS, SILENT_S, Led, exited, go, play, stopped


def test_an_agent_that_falls_silent_is_lost_and_replaced(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        zero, one = await job.started()
        while not (found := job.events(AgentLost)):
            await job.pass_time(zero)
        (lost,) = found
        assert lost.host == "host-1"
        assert lost.why.startswith("it was silent for")
        await zero.hear(Stop)
        await until(lambda: job.backend.replaced == ["host-1"], "the backend")
        # It was only frozen: what it says is no longer heard, and it has to come again.
        await one.say(Digest(attempt=1, ranks=()))
        await one.is_closed()

    play(tmp_path, script)


def test_that_a_host_cannot_be_replaced_does_not_end_the_leader(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        job.backend.broken = True
        one = await job.agent("host-1")
        await one.ws.close()
        await job.happens(AgentLost)
        await until(lambda: job.backend.replaced, "the backend")
        await job.agent("host-1", pid=101)
        await job.happens(AgentRegistered, 2)

    play(tmp_path, script, agent_timeout=0.3)


def test_an_agent_that_comes_back_in_time_is_not_lost_and_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.agent_sessions.RECONNECT_S", SILENT_S)

    async def script(job: Led) -> None:
        zero, one = await job.started()
        await one.ws.close()
        back = await job.agent("host-1")
        assert (await back.hear(Start)).attempt == 1
        await zero.say(exited(0, "host-0"))
        assert (await back.hear(Stop)).attempt == 1
        assert job.events(AgentLost) == []
        assert len(job.events(AgentRegistered)) == 2

    play(tmp_path, script)


def test_orders_go_to_the_new_connection_even_while_the_old_one_looks_alive(
    tmp_path: Path,
) -> None:
    async def script(job: Led) -> None:
        zero, one = await job.started()
        back = await job.agent("host-1")  # and `one` is not closed: half-open, as after a cut
        assert (await back.hear(Start)).attempt == 1
        for _ in range(2):  # the old connection's pulse comes, and it waits for more
            job.clock.put_forward(PULSE_S)
            assert isinstance(await one.next_order(), Pulse)
        await zero.say(exited(0, "host-0"))
        assert (await back.hear(Stop)).attempt == 1
        await one.say(Digest(attempt=1, ranks=()))
        await one.is_closed()

    play(tmp_path, script)


def test_another_agent_of_the_same_host_takes_its_place(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        zero, one = await job.started()
        again = await job.agent("host-1", pid=101)
        assert (await zero.hear(Stop)).attempt == 1
        await one.say(Digest(attempt=1, ranks=()))
        await one.is_closed()
        await again.hear(Stop)
        await zero.say(stopped("host-0"))
        await go(zero, again, 2)
        assert job.backend.replaced == []

    play(tmp_path, script)


@pytest.mark.parametrize("text", ["{", "null", '{"kind": "Nonsense"}', '{"kind": []}', "[" * 9999])
def test_a_message_that_cannot_be_read_closes_its_connection_and_nothing_else(
    tmp_path: Path, text: str
) -> None:
    async def script(job: Led) -> None:
        bad = await job.connect("host-0")
        await bad.ws.send_str(text)
        await bad.is_closed()
        worse = await job.agent("host-0")
        await worse.ws.send_str(text)
        await worse.is_closed()
        binary = await job.agent("host-0")
        await binary.ws.send_bytes(b"\x00")
        await binary.is_closed()
        await job.agent("host-0")
        one = await job.agent("host-1")
        assert await job.happens(AgentRegistered, 2)
        assert not one.ws.closed
        assert not job.task.done()

    play(tmp_path, script)


def test_a_journal_that_cannot_be_written_is_tried_again_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.event_queue.JOURNAL_RETRY_S", 0.05)
    extend, failures = Journal.extend, [OSError(28, "no space left"), OSError(5, "I/O error")]

    def failing(journal: Journal, decided: Decided) -> Any:
        if failures and any(isinstance(event, AgentRegistered) for event, _ in decided):
            raise failures.pop()
        return extend(journal, decided)

    monkeypatch.setattr(Journal, "extend", failing)

    async def script(job: Led) -> list[AgentRegistered]:
        await job.started()
        return job.events(AgentRegistered)

    registered = play(tmp_path, script)
    assert failures == []
    assert [event.host for event in registered] == ["host-0", "host-1"]


def test_a_slow_disk_does_not_silence_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend, written = Journal.extend, threading.Event()

    def slow(journal: Journal, decided: Decided) -> Any:
        if any(isinstance(event, AgentRegistered) for event, _ in decided):
            assert written.wait(WAIT_S)
        return extend(journal, decided)

    monkeypatch.setattr(Journal, "extend", slow)

    async def script(job: Led) -> None:
        zero = await job.agent("host-0")
        try:
            for _ in range(2):
                job.clock.put_forward(PULSE_S)
                assert isinstance(await zero.next_order(), Pulse)
            assert job.events(AgentRegistered) == []
        finally:
            written.set()
        await job.happens(AgentRegistered)

    play(tmp_path, script)


def test_a_leader_that_stood_still_blames_nobody(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        zero, _ = await job.started()
        job.clock.put_forward(SILENT_S + 1.0)  # the whole process, as a machine that swaps
        for _ in range(3):
            await job.pass_time()
        assert job.events(AgentLost) == []
        await zero.say(stopped("host-0", finished=True))

    play(tmp_path, script)


def test_a_defect_in_deciding_ends_the_leader_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.leader_server.CLOSE_S", 0.1)

    def broken(supervisor: Supervisor, events: object) -> Any:
        raise KeyError("a defect")

    async def script(job: Led) -> None:
        await job.agent("host-0")
        monkeypatch.setattr(Supervisor, "take", broken)
        with pytest.raises(KeyError, match="a defect"):
            await job.end()

    play(tmp_path, script)


def test_a_run_directory_that_is_moved_ends_the_job_and_its_journal_says_so(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    folder.mkdir()

    async def script(job: Led) -> Leave:
        zero, one = await job.started()
        folder.rename(elsewhere)
        leave = asyncio.create_task(zero.hear(Leave))
        looks = 0
        while not leave.done():
            job.clock.put_forward(LOOKS)
            await asyncio.sleep(0.02)
            looks += 1
            assert looks < 500
        await asyncio.gather(zero.ws.close(), one.ws.close())
        assert (await job.end()).state == "FAILED"
        return await leave

    leave = play(folder, script)
    (*_, last) = read(elsewhere / "journal.jsonl")
    assert isinstance(last.event, RunDirLost)
    assert last.event.why == leave.reason
    assert f"{folder}/journal.jsonl is gone since" in leave.reason
    assert not folder.exists()
