"""The button that cancels a job."""

import asyncio
import contextlib
import getpass
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from orchestrator.app.serve import ServedJobs, pages_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import CancelRequested
from orchestrator.journal.journal import read
from orchestrator.journal.snapshot import replay
from orchestrator.system import SystemClock
from orchestrator.web.access import Access, sender
from orchestrator.web.fleet import Fleet
from orchestrator.web.metrics.exposition import Exposition
from orchestrator.web.server import Listening, Looker, application, serving
from tests.cli.test_verbs import ndctl
from tests.jobs_on_disk import JOB, SPEC, NoCluster, cluster
from tests.web.browser import CHROMIUM, WHY_NOT, chromium, tab
from tests.web.pages.html_page import parsed
from tests.web.served_jobs import patient

__all__ = ["cluster"]

Use = Callable[[aiohttp.ClientSession, str], Awaitable[None]]


@pytest.fixture
def run_dir(cluster: NoCluster, tmp_path: Path) -> RunDir:
    """A job that was submitted, and has no leader."""
    root = tmp_path / "runs"
    assert ndctl("submit", str(SPEC), "--run-root", str(root)).exit_code == 0
    return RunDir(root / JOB)


@asynccontextmanager
async def served(run_dir: RunDir, *, allow_cancel: bool) -> AsyncIterator[str]:
    """As `ndctl serve --no-token`."""
    clock = SystemClock()
    jobs = ServedJobs((run_dir.path.parent,), os.environ, clock)
    fleet = patient(Fleet(jobs.places, clock, jobs.statuses, jobs.strikes, jobs.others))
    looker = Looker(fleet.look)
    names = frozenset({"127.0.0.1"})
    more = pages_of(jobs, fleet, looker, allow_cancel=allow_cancel)
    app = application(looker, Access(names=names), Exposition(), more=more)
    async with serving(app, Listening()) as port:
        yield f"http://127.0.0.1:{port}"


def run(run_dir: RunDir, use: Use, *, allow_cancel: bool = True) -> None:
    async def whole() -> None:
        async with (
            served(run_dir, allow_cancel=allow_cancel) as base,
            aiohttp.ClientSession() as session,
        ):
            await use(session, base)

    asyncio.run(asyncio.wait_for(whole(), 60))


async def form(session: aiohttp.ClientSession, base: str) -> tuple[str, dict[str, str]]:
    """Where the form of the job's page leads, and its fields."""
    async with session.get(f"{base}/job/{JOB}") as said:
        found = parsed(await said.text())
    (action,) = found.values("action")
    (token,) = [value for tag, name, value in found.attributes if (tag, name) == ("input", "value")]
    return f"{base}{action}", {"token": token}


def test_the_button_cancels_as_the_command_does(run_dir: RunDir) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        action, fields = await form(session, base)
        async with session.post(action, data=fields, headers={"Origin": base}) as said:
            assert said.status == 200
            assert f"{JOB} was cancelled" in parsed(await said.text()).text
        async with session.post(action, data=fields, headers={"Origin": base}) as said:
            assert said.status == 409
            assert "has already ended: CANCELLED" in await said.text()
        text = ""
        while "CANCELLED" not in text:  # the page is made again at most once a second
            await asyncio.sleep(0.05)
            async with session.get(f"{base}/job/{JOB}") as said:
                text = await said.text()
        assert "<form" not in text

    run(run_dir, use)
    assert replay(run_dir).ending == "CANCELLED"


@pytest.mark.parametrize(
    ("headers", "sender"),
    [
        ({}, "someone on this machine"),
        ({"X-Forwarded-User": "ada"}, "ada, as the proxy says,"),
        (
            {"X-Forwarded-For": "10.1.2.3", "X-Forwarded-User": "ada" + 200 * "!"},
            f"ada{97 * '!'} at 10.1.2.3, as the proxy says,",
        ),
    ],
)
def test_the_journal_says_who_pressed_the_button(
    run_dir: RunDir, headers: Mapping[str, str], sender: str
) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        action, fields = await form(session, base)
        sent = {"Origin": base, **headers}
        async with session.post(action, data=fields, headers=sent) as said:
            assert said.status == 200

    run(run_dir, use)
    (asked,) = [
        one.event for one in read(run_dir.journal) if isinstance(one.event, CancelRequested)
    ]
    assert asked.by == f"{sender} on the web page of {getpass.getuser()}"


def test_headers_of_another_machine_are_not_believed() -> None:
    headers = {"X-Forwarded-User": "ada", "X-Forwarded-For": "10.1.2.3"}
    request = make_mocked_request("POST", "/", headers=headers).clone(remote="192.0.2.7")
    assert sender(request) == "someone at 192.0.2.7"
    assert sender(request.clone(remote="::1")) == "ada at 10.1.2.3, as the proxy says,"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_a_form_of_another_site_cancels_nothing(
    run_dir: RunDir, headers: Mapping[str, str]
) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        action, fields = await form(session, base)
        async with session.post(action, data=fields, headers=headers) as said:
            assert said.status == 403

    run(run_dir, use)
    assert replay(run_dir).ending is None


def test_the_answer_links_to_the_page_of_a_job_with_any_name(
    cluster: NoCluster, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    named = ("--set", "name=cancelled-run")
    assert ndctl("submit", str(SPEC), "--run-root", str(root), *named).exit_code == 0

    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.post(f"{base}/job/cancelled-run/cancel") as said:
            assert said.status == 403
            assert "/job/cancelled-run" in parsed(await said.text()).values("href")

    run(RunDir(root / "cancelled-run"), use)


@pytest.mark.parametrize("token", [None, "", "0" * 64, "\ud800", "é"])
def test_a_form_without_the_token_cancels_nothing(run_dir: RunDir, token: str | None) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        action, _ = await form(session, base)
        body = "" if token is None else f"token={token}"
        data = body.encode(errors="surrogatepass")
        headers = {"Origin": base, "Content-Type": "application/x-www-form-urlencoded"}
        async with session.post(action, data=data, headers=headers) as said:
            assert said.status == 403
        async with session.post(action, data=b"x" * 5000, headers=headers) as said:
            assert said.status == 413
        async with session.get(action) as said:
            assert said.status == 405

    run(run_dir, use)
    assert replay(run_dir).ending is None


def test_a_form_in_an_unknown_encoding_cancels_nothing(run_dir: RunDir) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        action, _ = await form(session, base)
        kind = "application/x-www-form-urlencoded; charset=foo"
        headers = {"Origin": base, "Content-Type": kind}
        async with session.post(action, data=b"token=x", headers=headers) as said:
            assert said.status == 403

    run(run_dir, use)


def test_there_is_no_button_unless_it_is_allowed(run_dir: RunDir) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with session.get(f"{base}/job/{JOB}") as said:
            assert "<form" not in await said.text()
        headers = {"Origin": base}
        async with session.post(f"{base}/job/{JOB}/cancel", headers=headers) as said:
            assert said.status == 404

    run(run_dir, use, allow_cancel=False)


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_a_person_cancels_with_two_clicks(devtools: str, run_dir: RunDir) -> None:
    async def use(session: aiohttp.ClientSession, base: str) -> None:
        async with tab(devtools) as page:
            await page.open(f"{base}/job/{JOB}")
            await page.live()
            await page.value("document.querySelector('summary').click()")
            await asyncio.sleep(2.2)  # what changes meanwhile does not close the question
            assert await page.value("document.querySelector('details').open")
            with contextlib.suppress(AssertionError):  # the page is left
                await page.value("document.querySelector('form button').click()")
            await page.until("document.body.innerText.includes('was cancelled')")
            assert page.errors == []
            await page.value("document.querySelector('#notice a').click()")
            await page.until("document.body.innerText.includes('CANCELLED')")
            await page.live()

    run(run_dir, use)
    assert replay(run_dir).ending == "CANCELLED"
