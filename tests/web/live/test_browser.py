"""The pages in a real browser."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import CheckpointSaved, StepReached
from orchestrator.journal.journal import Entry, read, to_line
from orchestrator.web.access import Access
from orchestrator.web.live import hub as hub_module
from tests.dashboard.dashboard_story import START, finished, hung, recovered, started
from tests.web.browser import CHROMIUM, WHY_NOT, Tab, chromium, tab
from tests.web.live.live_server import Served
from tests.web.pages.test_pages import SCRIPTS, hang_with_evidence, marked_lines
from tests.web.served_jobs import line, renamed, written

pytestmark = [pytest.mark.process, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]

Use = Callable[[Tab, str], Awaitable[None]]
TOKEN = "s3cret"
PHONE, DESK = (390, 844), (1400, 900)


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "LIVE_S", 0.1)


def browsed(devtools: str, served: Served, use: Use) -> None:
    """Use a tab; nothing may go wrong in it, and it may load nothing from elsewhere."""

    async def run() -> None:
        async with served.serving() as (_, base), tab(devtools) as one:
            await one.look(*DESK)
            await asyncio.wait_for(use(one, base), 120)
            assert one.errors == []
            assert [url for url in one.requests if not url.startswith((base, "data:,"))] == []

    asyncio.run(run())


def append(run_dir: RunDir, *events: StepReached | CheckpointSaved) -> None:
    seq = read(run_dir.journal)[-1].seq
    with run_dir.journal.open("ab") as file:
        for number, event in enumerate(events, 1):
            file.write(to_line(Entry(seq=seq + number, event=event, actions=())))


def test_a_running_job_changes_on_the_open_page(devtools: str, tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", recovered(), range(1, 25))
    with run_dir.metrics.open("a") as file:
        for step in range(21, 25):
            file.write(json.dumps(line(step, attempt=2)) + "\n")

    async def use(page: Tab, base: str) -> None:
        await page.look(1280, 900)
        await page.open(f"{base}/job/quickstart")
        assert await page.value("document.title") == "quickstart: RUNNING"
        await page.live()
        assert "step 24 of 60, loss 2.7144" in await page.text("#facts")
        assert "rank 1 was killed by SIGKILL" in await page.text("#incidents")
        await page.until("document.querySelectorAll('.chart canvas').length === 2")
        assert "red line: restart" in await page.text("#chart-loss")
        ticks = await page.value("charts['chart-loss'].plot.axes[0]._splits")
        assert len(ticks) > 3
        assert all(float(step).is_integer() for step in ticks)
        mark = "document.querySelector('#facts').dataset.mine = 'kept'"
        await page.value(mark)
        append(run_dir, CheckpointSaved(at=START + 41, attempt=2, step=40))
        with run_dir.metrics.open("a") as file:
            file.write(json.dumps(line(43, attempt=2, loss=1.25)) + "\n")
        await page.until("document.querySelector('#facts').innerText.includes('loss 1.2500')")
        await page.until(
            "document.querySelector('#events').innerText.includes('checkpoint step-40')"
        )
        assert await page.value("document.querySelector('#facts').dataset.mine") == "kept"
        # A person who selects text to copy it does not lose the selection.
        select = "getSelection().selectAllChildren(document.querySelector('#facts > div'))"
        await page.value(select)
        selected = await page.value("getSelection().toString()")
        served.clock.at += 100
        await page.until("document.getElementById('live').innerText.includes('22:16')")
        assert await page.value("getSelection().toString()") == selected
        await page.value("getSelection().removeAllRanges()")
        await page.until(f"!document.querySelector('#facts').innerText.includes({selected!r})")

    served = Served(run_dir)
    browsed(devtools, served, use)


def test_a_hang_leads_to_its_evidence(devtools: str, tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", hang_with_evidence(), range(1, 13))

    async def use(page: Tab, base: str) -> None:
        await page.open(f"{base}/")
        assert "1 needs attention" in await page.text("#counts")
        await page.value("document.querySelector('#jobs a').click()")
        await page.until("document.querySelector('#trouble')?.innerText.includes('98% sure')")
        await page.value("document.querySelector('#trouble a').click()")
        await page.until("location.pathname === '/job/quickstart/incident/1'")
        await page.until("document.querySelector('#evidence') !== null")
        text = await page.text("#evidence")
        for words in ("rank 3 did not call", "confidence 98%", "mesh_tp, operation 7", "mask.py"):
            assert words in text
        assert "verdict never-entered" in await page.text("#timeline")
        await page.live()

    browsed(devtools, Served(run_dir), use)


def fleet_of_200(root: Path) -> list[RunDir]:
    stories = [started(), started(), started(), recovered(), finished(), hung()]
    return [
        written(
            root / f"sweep-{n:03}", renamed(stories[n % 6], f"sweep-{n:03}"), range(1, 5 + n % 50)
        )
        for n in range(200)
    ]


def test_a_fleet_of_200_jobs(devtools: str, tmp_path: Path) -> None:
    jobs = fleet_of_200(tmp_path)

    async def use(page: Tab, base: str) -> None:
        await page.open(f"{base}/")
        await page.live()
        rows = "[...document.querySelectorAll('#jobs > tr')]"
        assert await page.value(f"{rows}.length") == 200
        states = await page.value(f"{rows}.map(row => row.children[2].innerText)")
        assert set(states) == {"RECOVERING", "RUNNING", "SUCCEEDED"}
        assert states == sorted(states, key=("RECOVERING", "RUNNING", "SUCCEEDED").index)
        await page.value(
            "filter.value = '-07'; filter.dispatchEvent(new Event('input')); filter.value"
        )
        shown = f"{rows}.filter(row => !row.hidden).map(row => row.children[0].innerText)"
        assert sorted(await page.value(shown)) == [f"sweep-07{n}" for n in range(10)]
        append(
            jobs[70],
            StepReached(at=START + 50, attempt=1, step=59, loss=1.0, tokens_per_second=1.0),
        )
        with jobs[70].metrics.open("a") as file:
            file.write(json.dumps(line(59)) + "\n")
        cell = f"{rows}.find(row => row.innerText.startsWith('sweep-070')).children[5].innerText"
        await page.until(f"{cell} === '59/60'")
        assert len(await page.value(shown)) == 10  # the filter stays

    browsed(devtools, Served(*jobs), use)


def test_hostile_text_is_text(devtools: str, tmp_path: Path) -> None:
    lines = marked_lines()
    names = [f"{number}{text}" for number, text in enumerate(SCRIPTS) if "/" not in text]
    jobs = []
    for name in names:
        in_json = json.dumps(name)[1:-1].encode()
        path = tmp_path / name
        path.mkdir()
        data = b"".join(one.replace(b"MARKED", in_json) for one in lines["hung"])
        (path / "journal.jsonl").write_bytes(data)
        jobs.append(RunDir(path))

    async def use(page: Tab, base: str) -> None:
        await page.open(f"{base}/")
        await page.live()
        assert await page.value("document.querySelectorAll('#jobs > tr').length") == len(names)
        for name in names:
            shown = name.partition("\n")[0]
            assert shown in await page.text("#jobs")
            link = f".find(link => link.innerText.startsWith('{name[0]}')).href"
            address = await page.value(f"[...document.querySelectorAll('#jobs a')]{link}")
            assert address.startswith(f"{base}/job/-?in=")
            async with tab(devtools) as other:
                await other.open(address)
                await other.live()
                assert shown in await other.text("main")
                assert other.errors == []
        for tag in (
            "img",
            "svg",
            "iframe",
            "main script",
            "[onerror]",
            "[onmouseover]",
            "[onload]",
        ):
            assert await page.value(f"document.querySelectorAll({tag!r}).length") == 0, tag

    browsed(devtools, Served(*jobs, most=64), use)


def test_a_text_of_10_kb_moves_nothing_out_of_sight(devtools: str, tmp_path: Path) -> None:
    """It scrolls by itself, and the link to the evidence stays beside it."""
    in_json = b'"' + b"x" * 10_000 + b'"'
    run_dir = written(tmp_path / "quickstart", hang_with_evidence(), range(1, 13))
    run_dir.journal.write_bytes(run_dir.journal.read_bytes().replace(b'"host-1"', in_json))

    async def use(page: Tab, base: str) -> None:
        for size in (PHONE, DESK):
            for path in ("/job/quickstart", "/job/quickstart/incident/1"):
                await page.look(*size)
                await page.open(f"{base}{path}")
                await page.live()
                assert await page.value("document.documentElement.scrollWidth") <= size[0], path
                height = await page.value("document.documentElement.scrollHeight")
                assert height < 6000, (path, size)
        await page.open(f"{base}/job/quickstart")
        top = "document.querySelector('#trouble a').getBoundingClientRect().bottom"
        assert await page.value(top) < 500

    browsed(devtools, Served(run_dir), use)


@pytest.mark.parametrize("dark", [False, True])
def test_both_colour_schemes_and_a_phone(devtools: str, tmp_path: Path, dark: bool) -> None:
    jobs = [
        written(tmp_path / "a-job-with-a-rather-long-name-1234567890", hang_with_evidence()),
        written(tmp_path / "quickstart", started(40, 8), range(1, 60)),
    ]

    async def use(page: Tab, base: str) -> None:
        paths = ["/", "/job/quickstart"]
        paths += [f"/job/{jobs[0].path.name}", f"/job/{jobs[0].path.name}/incident/1"]
        for path in paths:
            await page.look(*PHONE, dark=dark)
            await page.open(f"{base}{path}")
            await page.live()
            assert await page.value("document.documentElement.scrollWidth") <= PHONE[0], path
            ground = await page.value("getComputedStyle(document.body).backgroundColor")
            ink = await page.value("getComputedStyle(document.body).color")
            assert (brightness(ground) < 0.2) is dark
            assert abs(brightness(ground) - brightness(ink)) > 0.6

    browsed(devtools, Served(*jobs), use)


def brightness(colour: str) -> float:
    """Of `rgb(27, 31, 35)`, from 0 to 1."""
    return sum(int(part) for part in colour.strip("rgb()").split(",")) / 3 / 255


@asynccontextmanager
async def page_with_a_link(url: str) -> AsyncIterator[str]:
    """A page of another site, such as a message in a browser."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f'<a id="a" href="{url}">incident</a>', content_type="text/html")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://localhost:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


def test_the_token_is_typed_once_and_links_from_elsewhere_work(
    devtools: str, tmp_path: Path
) -> None:
    run_dir = written(tmp_path / "quickstart", recovered())

    async def run() -> None:
        served = Served(run_dir, access=Access(token=TOKEN))
        async with served.serving() as (_, base), tab(devtools) as page:
            await page.open(f"{base}/job/quickstart")
            assert "open the address that `ndctl serve` printed" in await page.text()
            await page.open(f"{base}/job/quickstart?token={TOKEN}")
            await page.live()
            assert TOKEN not in await page.value("location.href")
            assert TOKEN not in await page.value("document.cookie")
            async with page_with_a_link(f"{base}/job/quickstart/incident/1") as elsewhere:
                await page.open(elsewhere)
                await page.value("document.getElementById('a').click()")
                await page.until("document.querySelector('#evidence') !== null")
                await page.live()

    asyncio.run(run())


def test_an_open_page_becomes_another_one_when_the_job_is_removed(
    devtools: str, tmp_path: Path
) -> None:
    """Else it would show the last state of the job as a new one."""
    run_dir = written(tmp_path / "quickstart", started(), range(1, 13))

    async def use(page: Tab, base: str) -> None:
        await page.open(f"{base}/job/quickstart")
        await page.live()
        run_dir.path.rename(tmp_path / "moved")
        await page.until("document.getElementById('notice') !== null")
        assert "No such file" in await page.text("main")
        (tmp_path / "moved").rename(run_dir.path)
        await page.until("document.getElementById('facts') !== null")
        await page.live()

    browsed(devtools, Served(run_dir), use)


def test_without_scripts_the_page_is_complete(devtools: str, tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", hang_with_evidence(), range(1, 13))

    async def use(page: Tab, base: str) -> None:
        await page.ask("Emulation.setScriptExecutionDisabled", value=True)
        await page.ask("Page.navigate", url=f"{base}/job/quickstart")
        await asyncio.sleep(0.3)
        await page.ask("Emulation.setScriptExecutionDisabled", value=False)
        for words in ("98% sure", "host-1", "hang in phase train", "ndctl dashboard"):
            await page.until(f"document.body.innerText.includes({words!r})")

    browsed(devtools, Served(run_dir), use)


@pytest.mark.slow
def test_the_first_paint_of_2000_hosts_takes_less_than_300_ms(
    devtools: str, tmp_path: Path
) -> None:
    run_dir = written(tmp_path / "large", renamed(started(2000, 8), "large"), range(1, 500))

    async def use(page: Tab, base: str) -> None:
        await page.open(f"{base}/")  # a person comes from somewhere: the server has looked once
        paints = []
        for _ in range(5):
            await page.open("about:blank#x")
            await page.open(f"{base}/job/large")
            await page.until("performance.getEntriesByType('paint').length > 0")
            script = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(await page.value(script))
            assert await page.value("document.querySelectorAll('#hosts > i').length") == 2000
        assert min(paints) < 300, paints  # the others are those of a busy machine

    browsed(devtools, Served(run_dir), use)


@pytest.mark.slow
def test_a_page_says_when_it_is_not_live_and_recovers(devtools: str, tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", started())
    served = Served(run_dir)

    async def use(page: Tab, base: str) -> None:
        await page.open(f"{base}/job/quickstart")
        await page.live()
        served.problem = OSError("stale file handle")
        await page.until("document.getElementById('live').innerText.includes('stale file')")
        served.problem = None
        await page.live()
        served.hold_s = 20.0
        await page.until("document.getElementById('live').className === 'off'")
        assert "the storage does not respond" in await page.text("#live")
        served.hold_s = 0.0
        await page.live()

    browsed(devtools, served, use)


@pytest.mark.slow
def test_a_page_whose_server_is_gone_says_so(devtools: str, tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", started())

    async def run() -> None:
        async with tab(devtools) as page:
            async with Served(run_dir).serving() as (_, base):
                await page.open(f"{base}/job/quickstart")
                await page.live()
            await page.until("document.getElementById('live').className === 'off'")
            assert "not live: nothing heard for" in await page.text("#live")

    asyncio.run(run())
