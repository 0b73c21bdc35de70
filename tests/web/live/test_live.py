"""What a browser is sent while a page is open, without a browser."""

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import StepReached
from orchestrator.dashboard.reading.job_reader import JobReader
from orchestrator.errors import JobError
from orchestrator.journal.journal import Entry, read, to_line
from orchestrator.web import server as server_module
from orchestrator.web.live import hub as hub_module
from orchestrator.web.live import streams as streams_module
from orchestrator.web.live.static import static_files
from tests.dashboard.dashboard_story import START, journal, recovered, started
from tests.web.live.live_server import Served
from tests.web.pages.test_pages import applied
from tests.web.served_jobs import renamed, written


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other faster than in reality."""
    monkeypatch.setattr(hub_module, "LIVE_S", 0.02)
    monkeypatch.setattr(hub_module, "SHARE", 0.5)
    monkeypatch.setattr(streams_module, "BEAT_S", 0.2)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return written(tmp_path / "quickstart", started(), range(1, 5))


async def events(said: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """(event, data) as a browser understands them."""
    kind, data = "message", list[str]()
    async for raw in said.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif not line and data:
            yield kind, "\n".join(data)
            kind, data = "message", []


async def until(said: aiohttp.ClientResponse, wanted: str) -> str:
    async for kind, data in events(said):
        if kind == wanted:
            return data
    raise AssertionError(f"the stream ended without {wanted}")


def add_step(run_dir: RunDir, step: int) -> None:
    entry = read(run_dir.journal)[-1]
    event = StepReached(at=START + 50, attempt=1, step=step, loss=1.5, tokens_per_second=7.0)
    with run_dir.journal.open("ab") as file:
        file.write(to_line(Entry(seq=entry.seq + 1, event=event, actions=())))


def test_an_open_page_gets_all_rows_and_then_those_that_change(run_dir: RunDir) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/live/job/quickstart") as said:
            assert said.headers["Content-Type"] == "text/event-stream"
            assert said.headers["Content-Security-Policy"].startswith("default-src 'none'")
            first = await until(said, "change")
            assert json.loads(first)["title"] == "quickstart: RUNNING"
            assert json.loads(first)["charts"]["unit"] == "tokens/s"
            rows = applied({}, first.encode())
            add_step(run_dir, 77)
            second = await until(said, "change")
            assert set(json.loads(second)["blocks"]) == {"events", "head", "facts"}
            after = applied(rows, second.encode())
            assert "reached step 77" in next(iter(after["events"].values()))
            assert len(after["events"]) == len(rows["events"]) + 1

    Served(run_dir).run(use)


def test_a_page_that_does_not_change_only_tells_the_time(run_dir: RunDir) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/live/") as said:
            await until(said, "change")
            kinds = []
            async for kind, data in events(said):
                kinds.append(kind)
                assert data.startswith("as of 2023-11-14")
                if len(kinds) == 4:
                    break
            assert set(kinds) == {"at"}

    Served(run_dir).run(use)


def test_many_clients_cost_no_more_looks_than_one(run_dir: RunDir) -> None:
    served = Served(run_dir, most=100)

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        hub_module.LIVE_S = 0.3

        async def one() -> None:
            async with session.get(f"{base}/live/job/quickstart") as said:
                await until(said, "at")
                await until(said, "at")

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as many:
            session = many
            began = time.monotonic()
            await asyncio.gather(*(one() for _ in range(60)))
        allowed = 2 + (time.monotonic() - began) / 0.3
        assert served.looks <= allowed
        assert not served.hub.watched or served.streams.open

    served.run(use)


def test_nothing_looks_while_no_page_is_open(run_dir: RunDir) -> None:
    served = Served(run_dir)

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/live/") as said:
            await until(said, "at")
        while served.streams.open:
            await asyncio.sleep(0.02)
        assert served.hub.tasks == {}
        assert (served.hub.watched, served.hub.versions) == ({}, {})

    served.run(use)


def test_a_client_that_reads_nothing_is_dropped_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "WRITE_S", 0.3)
    jobs = [written(tmp_path / f"j{n}", renamed(started(), f"j{n}")) for n in range(200)]
    served = Served(*jobs)

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        slow = socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2])))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /live/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.closing(slow):
            while not served.streams.open:
                await asyncio.sleep(0.01)
            async with session.get(f"{base}/live/job/j1") as said:
                number = 0
                async for kind, _ in events(said):
                    served.clock.at += 3600  # the age of each job changes
                    number += kind == "at"
                    if served.streams.open == 1:
                        break
                assert number > 3
                await until(said, "at")

    served.run(use)


def test_a_page_too_many_is_refused_and_still_readable(run_dir: RunDir) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/live/") as first:
            await until(first, "at")
            async with session.get(f"{base}/live/") as second:
                assert second.status == 503
                assert second.headers["Retry-After"] == "30"
            async with session.get(f"{base}/job/quickstart") as page:
                assert page.status == 200

    Served(run_dir, most=1).run(use)


def test_a_job_that_vanishes_and_comes_back(run_dir: RunDir, tmp_path: Path) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/live/job/quickstart") as said:
            await until(said, "change")
            shutil.move(run_dir.path, tmp_path / "moved")
            gone = json.loads(await until(said, "change"))
            assert "No such file" in gone["blocks"]["notice"]["set"]["said"]
            shutil.move(tmp_path / "moved", run_dir.path)
            back = json.loads(await until(said, "change"))
            assert "RUNNING" in back["blocks"]["head"]["set"]["state"]
            async with session.get(f"{base}/job/other") as page:
                assert page.status == 404
                assert "No job other is known here" in await page.text()

    Served(run_dir).run(use)


def test_a_new_incident_is_found_although_the_last_look_is_older(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", recovered()[:-4], range(1, 5))
    served = Served(run_dir)

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/job/quickstart/incident/1") as page:
            assert page.status == 404
        served.hold_s = 0.5  # longer than a page waits for a new look
        lines = b"".join(map(to_line, journal(recovered())))
        run_dir.journal.write_bytes(lines)
        while served.hub.looker.age_s <= served.hub._pause_s():
            await asyncio.sleep(0.01)
        async with session.get(f"{base}/job/quickstart/incident/1") as page:
            assert page.status == 200

    served.run(use)


def test_a_page_says_of_which_time_the_job_is(run_dir: RunDir, monkeypatch: Any) -> None:
    """If its storage is slow, a job is shown as it was at an earlier look."""
    served, back = Served(run_dir), threading.Event()
    look = JobReader.look

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/job/quickstart") as page:
            assert "as of 2023-11-14 22:15:00" in await page.text()
        served.fleet.crew.slow_s = 0.01
        hang = lambda reader, now: back.wait(60) and look(reader, now)  # noqa: E731
        monkeypatch.setattr(JobReader, "look", hang)
        served.clock.at += 10
        text = ""
        while "as of 2023-11-14 22:15:10" not in text:
            await asyncio.sleep(0.01)
            async with session.get(f"{base}/") as page:
                text = await page.text()
        assert "1 job shown as of a moment ago" in text
        async with session.get(f"{base}/job/quickstart") as page:
            assert "as of 2023-11-14 22:15:00" in await page.text()
        back.set()

    served.run(use)


@pytest.mark.parametrize("problem", [OSError("stale file handle"), JobError("the index is away")])
def test_a_look_that_fails_is_told_and_the_next_one_counts(
    run_dir: RunDir, problem: Exception
) -> None:
    served = Served(run_dir)

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/live/") as said:
            await until(said, "at")
            served.problem = problem
            assert str(problem) in await until(said, "problem")
            served.problem = None
            await until(said, "at")

    served.run(use)


def test_storage_that_hangs_at_first_is_a_page_that_tries_again(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LOOK_S", 0.05)
    served = Served(run_dir)
    served.hold_s = 0.4

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/") as said:
            assert said.status == 503
            assert 'http-equiv="refresh"' in await said.text()

    served.run(use)


def test_a_page_waits_little_for_a_slow_look_and_says_of_which_time_it_is(run_dir: RunDir) -> None:
    served = Served(run_dir)

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/") as said:
            assert said.status == 200
        served.hold_s = 5.0
        served.clock.at += 3600
        await asyncio.sleep(0.1)
        began = time.monotonic()
        async with session.get(f"{base}/") as said:
            text = await said.text()
        assert "as of 2023-11-14 22:15:00" in text
        assert time.monotonic() - began < served.hold_s

    served.run(use)


def test_a_job_that_ended_long_ago_is_read_once_its_page_is_opened(run_dir: RunDir) -> None:
    served = Served(run_dir, idle=True)

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/") as said:
            assert "quickstart" not in await said.text()  # its row is that of `ndctl list`
        assert served.fleet.readers == {}
        served.fleet.want(run_dir.path)
        async with session.get(f"{base}/job/quickstart") as said:
            assert said.status in (200, 404)
        await asyncio.sleep(0.1)
        async with session.get(f"{base}/job/quickstart") as said:
            assert said.status == 200
            assert "RUNNING" in await said.text()

    served.run(use)


def test_a_clock_that_is_set_back_leaves_pages_readable(run_dir: RunDir) -> None:
    served = Served(run_dir)

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/live/job/quickstart") as said:
            await until(said, "at")
            served.clock.at = START - 1e6
            while "2023-11-03" not in await until(said, "at"):
                pass
            async with session.get(f"{base}/job/quickstart") as page:
                assert page.status == 200

    served.run(use)


def test_what_the_page_loads_is_kept_by_browsers_until_it_changes(run_dir: RunDir) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/") as said:
            page = await said.text()
        version = static_files().version
        for name, kind in (("page.js", "text/javascript"), ("uplot.css", "text/css")):
            assert f"/static/{name}?v={version}" in page
            async with session.get(f"{base}/static/{name}?v={version}") as said:
                assert said.headers["Content-Type"].startswith(kind)
                assert said.headers["X-Content-Type-Options"] == "nosniff"
                assert "max-age" in said.headers["Cache-Control"]
        for bad in ("/static/LICENSE", "/static/..%2faccess.py", "/job/-", "/job/a/incident/x"):
            async with session.get(f"{base}{bad}") as said:
                assert said.status == 404, bad

    Served(run_dir).run(use)


def test_pages_change_nothing(run_dir: RunDir) -> None:
    before: dict[str, Any] = {one.name: one.read_bytes() for one in run_dir.path.iterdir()}

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        for path in ("/", "/job/quickstart", "/live/"):
            for method in ("POST", "PUT", "DELETE"):
                async with session.request(method, f"{base}{path}") as said:
                    assert said.status == web.HTTPMethodNotAllowed.status_code
            async with session.get(f"{base}{path}") as said:
                assert said.status == 200

    Served(run_dir).run(use)
    assert {one.name: one.read_bytes() for one in run_dir.path.iterdir()} == before
