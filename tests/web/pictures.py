"""Writes the picture of all jobs in docs: `python -m tests.web.pictures`. Open it and look."""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import Event, HostStopped
from orchestrator.web.fleet import FleetState
from tests.dashboard.dashboard_story import (
    START,
    finished,
    killed,
    recovered,
    started,
    submitted,
)
from tests.web.browser import Tab, chromium, tab
from tests.web.live.live_server import Served
from tests.web.pages.test_pages import hang_with_evidence
from tests.web.served_jobs import renamed, written

FLEET = Path(__file__).parents[2] / "docs" / "images" / "web_fleet.webp"
SIZE = (1200, 360)
OWNERS = ("alice", "bob", "carol")
Story = tuple[Sequence[Event], int]
"""Events, and the last step."""


def stories() -> Mapping[str, Story]:
    stopped = HostStopped(at=START + 33, attempt=1, host="host-0", finished=False)
    failed = [
        *started(1, 8, max_restarts=0, steps=5_000, backend="slurm"),
        killed(START + 30, rank=5),
        stopped,
    ]
    return {
        "llama3-70b-pretrain": (started(64, 8, steps=20_000, backend="slurm"), 110),
        "qwen3-32b-sft": (hang_with_evidence(), 12),
        "vision-encoder": (failed, 24),
        "ablation-rope": (recovered(), 24),
        "sweep-lr-0.0001": (started(4, 8, steps=2_000, backend="kubernetes"), 96),
        "sweep-lr-0.0003": (finished(), 60),
        "gpt2-eval": ([submitted(1, 8)], 0),
    }


def jobs(root: Path) -> list[RunDir]:
    return [
        written(root / name, renamed(list(events), name), range(1, last + 1))
        for name, (events, last) in stories().items()
    ]


class Owned(Served):
    """Jobs of several people, although one of them has written all files."""

    def look(self) -> FleetState:
        state = super().look()
        owned = (
            replace(job, owner=OWNERS[number % len(OWNERS)])
            for number, job in enumerate(state.jobs)
        )
        return replace(state, jobs=tuple(owned))


async def take(page: Tab, base: str) -> None:
    await page.look(*SIZE)
    await page.open(f"{base}/")
    await page.live()
    await page.picture(FLEET)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, chromium(Path(name)) as devtools:
        served = Owned(*jobs(Path(name) / "runs"))

        async def run() -> None:
            async with served.serving() as (_, base), tab(devtools) as page:
                await take(page, base)

        asyncio.run(run())


if __name__ == "__main__":
    main()
