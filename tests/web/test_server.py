"""The server over real connections."""

import asyncio
import contextlib
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from orchestrator.app.serve import Serve, check
from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.reporting.web_spec import WebSpec
from orchestrator.errors import JobError
from orchestrator.job_secret import client_context, draw, secret_from
from orchestrator.web import server
from orchestrator.web.access import Access, is_loopback
from orchestrator.web.fleet import Fleet, FleetState, Place
from orchestrator.web.metrics.exposition import Exposition, quantiles
from orchestrator.web.of_leader import MOST_STREAMS, LeaderWeb, serving_job
from orchestrator.web.server import Listening, Looker, application, keep_textfile, serving
from tests.dashboard.dashboard_story import StoryClock, started
from tests.web.served_jobs import patient, written

TOKEN = "s3cret-t0ken"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return written(tmp_path / "runs" / "quickstart", started())


def fleet(run_dir: RunDir) -> Fleet:
    return patient(Fleet(lambda: [Place(run_dir=run_dir)], StoryClock()))


def asked(
    run_dir: RunDir, access: Access, ask: Callable[[aiohttp.ClientSession, str], Awaitable[None]]
) -> None:
    async def run() -> None:
        app = application(Looker(fleet(run_dir).look), access, Exposition())
        async with serving(app, Listening()) as port, aiohttp.ClientSession() as session:
            await ask(session, f"http://127.0.0.1:{port}")

    asyncio.run(run())


def test_only_the_token_opens(run_dir: RunDir) -> None:
    async def ask(session: aiohttp.ClientSession, base: str) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            async with session.get(f"{base}/metrics", headers=headers) as said:
                assert said.status == 401
                assert "quickstart" not in await said.text()
                assert said.headers["Content-Security-Policy"].startswith("default-src 'none'")
        right = {"Authorization": f"Bearer {TOKEN}"}
        async with session.get(f"{base}/metrics", headers=right) as said:
            assert said.status == 200
            assert "quickstart" in await said.text()
            assert said.headers["Cache-Control"] == "no-store"

    asked(run_dir, Access(token=TOKEN), ask)


def test_a_browser_keeps_the_token_in_a_cookie_and_not_in_the_address(run_dir: RunDir) -> None:
    async def ask(session: aiohttp.ClientSession, base: str) -> None:
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address without a name
        async with aiohttp.ClientSession(cookie_jar=jar) as browser:
            first = browser.get(f"{base}/metrics?a=1&token={TOKEN}", allow_redirects=False)
            async with first as said:
                assert said.status == 303
                assert said.headers["Location"] == "/metrics?a=1"
                cookie = said.headers["Set-Cookie"]
                assert "HttpOnly" in cookie
                assert "SameSite=Strict" in cookie
            async with browser.get(f"{base}/metrics") as said:
                assert said.status == 200
            async with browser.get(f"{base}/metrics?token=wrong") as said:
                assert said.status == 200  # the cookie counts

    asked(run_dir, Access(token=TOKEN), ask)


def test_without_a_token_a_page_of_another_name_reads_nothing(run_dir: RunDir) -> None:
    async def ask(session: aiohttp.ClientSession, base: str) -> None:
        for name, status in (("evil.example", 421), ("localhost:1", 200), ("127.0.0.1", 200)):
            async with session.get(f"{base}/metrics", headers={"Host": name}) as said:
                assert said.status == status, name

    asked(run_dir, Access(names=frozenset({"localhost", "127.0.0.1"})), ask)


def test_nothing_but_reading_is_possible(run_dir: RunDir) -> None:
    async def ask(session: aiohttp.ClientSession, base: str) -> None:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with session.request(method, f"{base}/metrics") as said:
                assert said.status == 405
        async with session.get(f"{base}/../../etc/passwd") as said:
            assert said.status == 404

    before = run_dir.journal.read_bytes()
    asked(run_dir, Access(), ask)
    assert run_dir.journal.read_bytes() == before
    assert {one.name for one in run_dir.path.iterdir()} == {"journal.jsonl", "metrics.jsonl"}


def test_a_unix_socket_is_for_its_owner_alone(run_dir: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "web.sock"

    async def run() -> None:
        app = application(Looker(fleet(run_dir).look), Access(), Exposition())
        async with serving(app, Listening(socket=path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            connector = aiohttp.UnixConnector(str(path))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get("http://localhost/metrics") as said,
            ):
                assert said.status == 200
        assert not path.exists()

    asyncio.run(run())


def test_storage_that_hangs_is_a_503_and_one_thread(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.1)
    looks = 0

    def hang() -> FleetState:
        nonlocal looks
        looks += 1
        time.sleep(1.0)
        return FleetState()

    async def run() -> None:
        app = application(Looker(hang), Access(), Exposition())
        async with serving(app, Listening()) as port, aiohttp.ClientSession() as session:
            for _ in range(4):
                async with session.get(f"http://127.0.0.1:{port}/metrics") as said:
                    assert said.status == 503

    asyncio.run(run())
    assert looks == 1


def test_the_file_for_node_exporter_is_written_again_after_a_failure(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TEXTFILE_S", 0.02)
    path = tmp_path / "later" / "ndctl.prom"

    async def run() -> None:
        looker = Looker(fleet(run_dir).look)
        writing = asyncio.create_task(keep_textfile(looker, Exposition(), path))
        await asyncio.sleep(0.1)
        assert not writing.done()
        path.parent.mkdir()
        while not path.exists():
            await asyncio.sleep(0.01)
        writing.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert "ndctl_step{" in path.read_text()


@pytest.mark.parametrize(
    ("host", "private"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "10.0.0.1", "::", "evil", "127.0.0.1.evil")),
    ],
)
def test_loopback(host: str, private: bool) -> None:
    assert is_loopback(host) is private


def test_no_token_is_refused_beyond_this_machine() -> None:
    roots = (Path("runs"),)
    check(Serve(run_roots=roots))
    check(Serve(run_roots=roots, bind="0.0.0.0", token=TOKEN))
    with pytest.raises(JobError, match="whole network"):
        check(Serve(run_roots=roots, bind="0.0.0.0"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"bind": "0.0.0.0"}, "token"),
        ({"bind": "1.2.3"}, "bind"),
        ({"bind": "example.org"}, "bind"),
        ({"port": 0}, "port"),
        ({"token": "s3cret"}, "token"),
    ],
)
def test_settings_of_the_leaders_server_that_are_refused(
    given: dict[str, object], why: str
) -> None:
    with pytest.raises(Invalid) as refused:
        decode(WebSpec, given)
    assert why in {problem.path for problem in refused.value.problems}


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
    return port


def leader_of(run_dir: RunDir, tmp_path: Path) -> LeaderWeb:
    return LeaderWeb(
        run_dir=run_dir,
        secret=secret_from(draw()),
        folder=tmp_path,
        figures=lambda: {"heartbeat_age": [0.5, 0.1, 0.2, 9.0], "own_step": []},
    )


def test_a_leader_serves_its_job_with_quantiles_of_its_ranks(
    run_dir: RunDir, tmp_path: Path
) -> None:
    spec = WebSpec(port=free_port(), token="env:WEB")
    here = f"http://127.0.0.1:{spec.port}/metrics"

    async def run() -> str:
        async with (
            serving_job(spec, leader_of(run_dir, tmp_path), {"WEB": TOKEN}, StoryClock()),
            aiohttp.ClientSession() as session,
            session.get(here, headers={"Authorization": f"Bearer {TOKEN}"}) as said,
        ):
            return await said.text()

    text = asyncio.run(run())
    assert 'ndctl_job_state{job_name="quickstart",run_root=' in text
    assert 'state="RUNNING"} 1.0' in text  # its leader is this process
    ages = [row for row in text.splitlines() if row.startswith("ndctl_rank_heartbeat_age_seconds{")]
    assert len(ages) == 5
    assert any('quantile="1"' in row and row.endswith(" 9.0") for row in ages)
    assert "ndctl_rank_own_step_seconds{" not in text


def test_a_leader_serves_the_page_of_its_job(run_dir: RunDir, tmp_path: Path) -> None:
    spec = WebSpec(port=free_port())
    here = f"http://127.0.0.1:{spec.port}"

    async def run() -> None:
        async with (
            serving_job(spec, leader_of(run_dir, tmp_path), {}, StoryClock()),
            aiohttp.ClientSession() as session,
        ):
            async with session.get(f"{here}/") as said:
                assert said.url.path == "/job/quickstart"
                page = await said.text()
            assert "RUNNING" in page
            assert f"--run-root {run_dir.path.parent}" in page
            assert "Cancel" not in page
            async with session.post(f"{here}/job/quickstart/cancel") as said:
                assert said.status == 404
            streams = [session.get(f"{here}/live/job/quickstart") for _ in range(MOST_STREAMS + 1)]
            opened = await asyncio.gather(*streams)
            assert sorted(one.status for one in opened) == [*MOST_STREAMS * [200], 503]
            for one in opened:
                one.close()

    asyncio.run(run())


def test_invalid_requests_are_counted_and_not_logged_one_by_one(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(session: aiohttp.ClientSession, base: str) -> None:
        port = int(base.rpartition(":")[2])
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
            writer.close()
            await writer.wait_closed()
        async with session.get(f"{base}/metrics") as said:
            assert said.status == 200

    asked(run_dir, Access(), ask)
    counted = [one.getMessage() for one in caplog.records if "invalid HTTP" in one.getMessage()]
    where = "refused connections at the port of the pages"
    assert counted == [f"{where}: {count} sent an invalid HTTP request" for count in (1, 4)]
    assert "Traceback" not in caplog.text


def test_a_connection_too_many_is_closed_and_takes_no_other_with_it(run_dir: RunDir) -> None:
    app = application(Looker(fleet(run_dir).look), Access(), Exposition())

    async def run() -> None:
        async with serving(app, Listening(most=3)) as port:
            kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            extra, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await extra.read() == b""
            writer.close()
            reader, first = kept[0]
            first.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            for _, one in kept:
                one.close()
            await asyncio.sleep(0.1)
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{port}/metrics") as said,
            ):
                assert said.status == 200

    asyncio.run(asyncio.wait_for(run(), 60))


def test_beyond_its_host_a_leader_uses_the_certificate_of_the_job(
    run_dir: RunDir, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    spec = WebSpec(port=free_port(), bind="0.0.0.0", token=f"file:{token}")

    async def run() -> int:
        async with (
            serving_job(spec, leader_of(run_dir, tmp_path), {}, StoryClock()),
            aiohttp.ClientSession() as session,
            session.get(
                f"https://127.0.0.1:{spec.port}/metrics",
                headers={"Authorization": f"Bearer {TOKEN}"},
                ssl=client_context(),
            ) as said,
        ):
            return said.status

    assert asyncio.run(run()) == 200


@pytest.mark.parametrize("fault", ["port", "token"])
def test_a_leader_that_cannot_serve_leads(
    run_dir: RunDir, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(
            application(Looker(FleetState), Access(), Exposition()), Listening()
        ) as p:
            port = p if fault == "port" else free_port()
            token = None if fault == "port" else "env:NOT_THERE"
            spec = WebSpec(port=port, token=token)
            async with serving_job(spec, leader_of(run_dir, tmp_path), {}, StoryClock()):
                pass

    asyncio.run(run())
    assert "serving no pages and no metrics" in caplog.text


def test_quantiles_are_values_of_ranks() -> None:
    assert quantiles([]) == {}
    assert quantiles([3.0]) == dict.fromkeys((0.0, 0.5, 0.9, 0.99, 1.0), 3.0)
    assert quantiles(range(1, 101)) == {0.0: 1, 0.5: 50, 0.9: 90, 0.99: 99, 1.0: 100}
