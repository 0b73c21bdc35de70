"""Writes the pictures in docs/images: `python -m tests.web.pictures [RUN_DIR]`. Open and look.

The web pages show jobs that never ran. With the run directory of a real job, such as that of `make
demo`, the picture of the dashboard is written too.
"""

import asyncio
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import (
    CheckpointSaved,
    Event,
    HangDetected,
    HangJudged,
    HostStopped,
    StepReached,
    TrainingResumed,
)
from orchestrator.web.fleet import FleetState
from tests.dashboard.dashboard_story import (
    START,
    finished,
    killed,
    names,
    recovered,
    started,
    submitted,
)
from tests.dashboard.interactive import docs_picture
from tests.web.browser import Tab, chromium, tab
from tests.web.live.live_server import Served
from tests.web.pages.test_pages import hang_with_evidence
from tests.web.served_jobs import line, renamed, written

IMAGES = Path(__file__).parents[2] / "docs" / "images"
FLEET_SIZE, PAGE_SIZE = (1200, 360), (1120, 820)
STEP_S = 0.9
BROKE, SAVED, HUNG = 612, 600, 1204
"""Steps of the large job: a rank is killed, the last checkpoint before that, a hang."""
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


def large() -> list[Event]:
    """256 ranks; one was killed, and now one does not enter a collective."""
    hosts = names(32)
    broke, hung = _time_of(BROKE), _time_of(HUNG, attempt=2)
    return [
        *started(32, 8, steps=2_000, backend="slurm"),
        CheckpointSaved(at=_time_of(SAVED), attempt=1, step=SAVED),
        replace(killed(broke, rank=21, host=hosts[2]), step=BROKE),
        *(HostStopped(at=broke + 2, attempt=1, host=host, finished=False) for host in hosts),
        TrainingResumed(at=broke + 14, attempt=2, step=SAVED),
        StepReached(
            at=_time_of(SAVED + 1, attempt=2),
            attempt=2,
            step=SAVED + 1,
            loss=2.2,
            tokens_per_second=8.1e5,
        ),
        CheckpointSaved(at=_time_of(1_000, attempt=2), attempt=2, step=1_000),
        HangDetected(
            at=hung + 5.4,
            attempt=2,
            phase="train",
            step=HUNG,
            stalled_s=5.4,
            limit_s=5.0,
            behind=(107,),
        ),
        HangJudged(
            at=hung + 9,
            attempt=2,
            verdict="never-entered",
            cause="rank 107 did not call the operation in which the others wait: operation 51233"
            " of mesh_dp_shard (group 4, reduce_scatter)",
            scope="rank",
            ranks=(107,),
            hosts=(hosts[13],),
            confidence=0.97,
        ),
    ]


def _time_of(step: int, attempt: int = 1) -> float:
    first, at = (0, 8.0) if attempt == 1 else (SAVED, 8.0 + BROKE * STEP_S + 16)
    return START + at + (step - first) * STEP_S


def _large_lines() -> Iterable[dict[str, Any]]:
    noise = random.Random(1)
    for attempt, steps in ((1, range(1, BROKE + 1)), (2, range(SAVED + 1, HUNG + 1))):
        for step in steps:
            yield line(
                step,
                attempt=attempt,
                loss=1.9 + 6 / step**0.45 + noise.gauss(0, 0.02),
                tokens_per_second=810_000 + noise.gauss(0, 6_000),
                step_s=STEP_S,
                time=_time_of(step, attempt),
            )


async def take(page: Tab, base: str) -> None:
    """The page of all jobs, and that of an incident."""
    await page.look(*FLEET_SIZE)
    await page.open(f"{base}/")
    await page.live()
    await page.picture(IMAGES / "web_fleet.webp")
    await page.look(*PAGE_SIZE)
    await page.open(f"{base}/job/qwen3-32b-sft/incident/1")
    await page.live()
    await page.picture(IMAGES / "web_incident.webp")


async def take_large(page: Tab, base: str) -> None:
    await page.look(*PAGE_SIZE)
    await page.open(f"{base}/job/llama-70b")
    await page.live()
    await page.until("document.querySelectorAll('.chart canvas').length === 2")
    await page.picture(IMAGES / "web_job.webp")


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder)


def main(run_dirs: Sequence[str]) -> None:
    # A page shows the path of its job, and a picture should not change with each run.
    runs = Path(tempfile.gettempdir(), "runs")
    with tempfile.TemporaryDirectory() as name, chromium(Path(name)) as devtools, _made(runs):
        hangs = written(runs / "llama-70b", renamed(large(), "llama-70b"))
        hangs.metrics.write_text("".join(f"{json.dumps(one)}\n" for one in _large_lines()))
        fleet, alone = Owned(*jobs(runs)), Served(hangs)
        alone.clock.at = _time_of(HUNG, attempt=2) + 9.5

        async def run() -> None:
            for served, pictures in ((fleet, take), (alone, take_large)):
                async with served.serving() as (_, base), tab(devtools) as page:
                    await pictures(page, base)
                    assert page.errors == []

        asyncio.run(run())
    for run_dir in run_dirs:
        docs_picture.PICTURE.write_text(asyncio.run(docs_picture.take(Path(run_dir).absolute())))


if __name__ == "__main__":
    main(sys.argv[1:2])
