"""The picture of the dashboard in docs. `tests.web.pictures` writes it with the others."""

import os
from datetime import UTC
from pathlib import Path

from orchestrator.app.fleet.dashboard import JobServices
from orchestrator.app.fleet.known_jobs import Scope
from orchestrator.app.remote import Found
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.interactive.app import DashboardApp
from orchestrator.dashboard.interactive.places import Place
from orchestrator.system import SystemClock
from tests.dashboard.interactive.test_app import text_of, until, without_fonts

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "dashboard.svg"
SIZE = (120, 40)


async def take(run_dir: Path) -> str:
    clock, named = SystemClock(), Found(RunDir(run_dir))
    services = JobServices(Scope(run_root=str(run_dir.parent)), os.environ, clock, named)
    app = DashboardApp(services, Place(kind="job", job=str(run_dir)), clock, UTC)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "tokens/s" in text_of(app))
        return without_fonts(app.export_screenshot(title="ndctl dashboard", simplify=True))
