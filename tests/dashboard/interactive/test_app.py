"""The screen as textual shows it. `python -m tests.dashboard.interactive.test_app` writes the
styles of each page and a picture: look at the difference."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC
from pathlib import Path

from textual.pilot import Pilot
from textual.strip import Strip

from orchestrator.dashboard.follow.newest_lines import NewestLines
from orchestrator.dashboard.interactive.app import DashboardApp
from orchestrator.dashboard.interactive.content import FleetContent, JobContent, Source
from orchestrator.dashboard.interactive.places import Place
from orchestrator.errors import JobError
from tests.dashboard.dashboard_story import StoryClock
from tests.dashboard.interactive.scenes import JOB, NOW, content_of, fleet, killed_job, log_lines

STYLES = Path(__file__).with_name("styles.txt")
PICTURE = Path(__file__).with_name("fleet.svg")
PAGES: dict[str, Place] = {
    "fleet": Place(kind="fleet"),
    "job": Place(kind="job", job=JOB),
    "hosts": Place(kind="hosts", job=JOB, needle="1", typing=True),
    "host": Place(kind="host", job=JOB, host="host-0"),
    "rank": Place(kind="rank", job=JOB, host="host-0", rank=1),
    "logs": Place(kind="logs", job=JOB, host="host-0", rank=1),
    "events": Place(kind="events", job=JOB),
    "incident": Place(kind="incident", job=JOB),
    "metrics": Place(kind="metrics", job=JOB),
    "stacks": Place(kind="stacks", job=JOB),
    "cancel": Place(kind="cancel", job=JOB),
    "help": Place(kind="help"),
}


class Story:
    """Services that answer at once, or never."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def fleet(self) -> FleetContent:
        return fleet()

    def open_job(self, job: str) -> Callable[[], JobContent]:
        self.gate.wait()
        return killed_job

    def open_logs(self, job: str, host: str, rank: int | None) -> Callable[[], NewestLines]:
        return lambda: log_lines(60)

    def open_events(self, job: str) -> Callable[[], NewestLines]:
        found = content_of(Source("events"))
        assert isinstance(found, NewestLines)
        return lambda: found

    def stacks(self, job: str) -> NewestLines:
        raise JobError("job runs is not running: SUCCEEDED", fix="`ndctl logs` has its output")

    def cancel(self, job: str) -> str:
        self.cancelled.append(job)
        return "cancelling runs: its ranks write a checkpoint and exit"


def shown(
    work: Callable[[DashboardApp, Pilot[None]], Awaitable[None]],
    services: Story | None = None,
    size: tuple[int, int] = (80, 24),
    first: Place | None = None,
) -> None:
    async def run() -> None:
        app = DashboardApp(services or Story(), first or Place(kind="fleet"), StoryClock(NOW), UTC)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: bool(app.frame.lines))
            await work(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], known: Callable[[], bool]) -> None:
    for _ in range(400):
        await pilot.pause()
        if known():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the screen does not show it")


def text_of(app: DashboardApp) -> str:
    return "\n".join(line.text for line in app.canvas.lines)


async def press_all(app: DashboardApp, pilot: Pilot[None], keys: tuple[str, ...]) -> None:
    for key in keys:
        await until(pilot, lambda: "reading …" not in text_of(app))
        await pilot.press(key)
    await until(pilot, lambda: "reading …" not in text_of(app))


def screens() -> tuple[str, str]:
    """The styles of each page, and a picture of the first. All are taken in one session, which
    costs less than twelve."""
    styles: list[str] = []
    pictures: list[str] = []

    async def take(app: DashboardApp, pilot: Pilot[None]) -> None:
        for name, place in PAGES.items():
            app._go((Place(kind="fleet"), place))
            await until(pilot, lambda: "reading …" not in text_of(app))
            styles.append(f"=== {name}")
            styles.extend(styled(line) for line in app.canvas.lines if line.text.strip())
            if not pictures:
                svg = app.export_screenshot(title="ndctl dashboard", simplify=True)
                pictures.append(without_fonts(svg))

    shown(take)
    return "\n".join(styles) + "\n", pictures[0]


def styled(line: Strip) -> str:
    """The line with the style of each part before it, as `[bold red]`."""
    return "".join(f"[{part.style or 'plain'}]{part.text}" for part in line.simplify()).rstrip()


def without_fonts(svg: str) -> str:
    """Without fonts of the web: the picture is shown with those of the reader."""
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def test_every_page_has_its_styles_and_the_first_looks_as_its_picture() -> None:
    styles, picture = screens()
    assert styles == STYLES.read_text()
    assert picture == PICTURE.read_text()


def test_a_job_is_cancelled_only_after_a_question() -> None:
    services = Story()

    async def cancel(app: DashboardApp, pilot: Pilot[None]) -> None:
        await press_all(app, pilot, ("slash", "1", "escape", "escape", "c", "n"))
        assert services.cancelled == []
        await press_all(app, pilot, ("c", "y"))
        await until(pilot, lambda: "its ranks write a checkpoint" in text_of(app))

    shown(cancel, services, first=Place(kind="job", job=JOB))
    assert services.cancelled == [JOB]


def test_an_error_of_an_action_is_shown() -> None:
    async def ask(app: DashboardApp, pilot: Pilot[None]) -> None:
        await press_all(app, pilot, ("s",))
        await until(pilot, lambda: "is not running: SUCCEEDED" in text_of(app))

    shown(ask)


def test_keys_work_while_a_file_system_hangs() -> None:
    services = Story()
    services.gate.clear()

    async def leave(app: DashboardApp, pilot: Pilot[None]) -> None:
        await press_all(app, pilot, ())
        await pilot.press("enter")
        await until(pilot, lambda: "reading …" in text_of(app))
        await pilot.press("question_mark")
        await until(pilot, lambda: "straggler: all ranks wait" in text_of(app))
        await pilot.press("q", "q")
        await until(pilot, lambda: "6 jobs" in text_of(app))
        await pilot.press("q")

    shown(leave, services, size=(100, 50))
    services.gate.set()


def test_a_new_size_is_a_new_layout() -> None:
    async def resize(app: DashboardApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "MFU" in text_of(app))
        await pilot.resize_terminal(200, 60)
        await until(pilot, lambda: app.canvas.size == (200, 60) and len(app.frame.lines) == 60)
        assert "GPU temperature" in text_of(app)

    shown(resize, first=Place(kind="job", job=JOB))


def test_the_mouse_selects_and_opens() -> None:
    async def click(app: DashboardApp, pilot: Pilot[None]) -> None:
        await press_all(app, pilot, ())
        await pilot.click(offset=(5, 5))
        assert app.places[-1].selected.endswith("/runs/runs")
        await pilot.click(offset=(5, 5))
        await until(pilot, lambda: app.places[-1].kind == "job")

    shown(click)


def test_no_control_character_reaches_the_terminal() -> None:
    async def look(app: DashboardApp, pilot: Pilot[None]) -> None:
        await press_all(app, pilot, ("l", "G"))
        assert "资源不足 \\x1b[2J" in text_of(app)
        segments = [piece.text for line in app.canvas.lines for piece in line]
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e]", "".join(segments))

    shown(look)


if __name__ == "__main__":
    for path, content in zip((STYLES, PICTURE), screens(), strict=True):
        path.write_text(content)
