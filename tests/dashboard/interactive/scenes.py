"""Content of every page, from the stories of jobs."""

from collections.abc import Callable
from datetime import UTC

from msgspec.structs import replace

from orchestrator.contract.messages.events import HealthChanged
from orchestrator.dashboard.fleet.row import JobRow, in_order
from orchestrator.dashboard.follow.newest_lines import NewestLines
from orchestrator.dashboard.interactive.content import (
    Content,
    FleetContent,
    JobContent,
    Reading,
    Source,
    sources_of,
)
from orchestrator.dashboard.interactive.pages import Sight
from orchestrator.dashboard.interactive.places import Kind, Place
from orchestrator.dashboard.metrics import Metric
from orchestrator.dashboard.time_spent.account import TimeSpent
from tests.dashboard.dashboard_story import (
    SLOW,
    START,
    finished,
    hang_judged,
    hung,
    metrics,
    recovered,
    started,
)
from tests.dashboard.fleet.test_table import some_rows
from tests.dashboard.test_status import snapshot

NOW = START + 75
JOB = "/scratch/alice/experiments/runs/runs"


def gpu_metrics(first: int, last: int, attempt: int = 1) -> list[Metric]:
    """As of a job on GPUs."""
    return [
        replace(
            one,
            mfu=0.38 + 0.001 * (one.step % 7),
            gpu_utilization=0.97,
            gpu_temperature_c=61.0 + one.step % 5,
            gpu_power_w=640.0 + one.step,
            peak_memory_bytes=float(66 << 30),
            data_s=0.01 * (one.step % 3),
            checkpoint_s=0.4 if one.step % 20 == 1 else 0.0,
        )
        for one in metrics(first, last, attempt)
    ]


def job(events: list, lines: list[Metric], saved: tuple[int, ...] = ()) -> JobContent:  # type: ignore[type-arg]
    taken = replace(snapshot(events, lines), now=NOW)
    spent = TimeSpent(elapsed_s=75.0, lost_s={"restart": 7.0, "lost_work": 3.2, "checkpoint": 0.8})
    return JobContent(view=replace(taken.view, time=spent, saved_steps=saved), snapshot=taken)


def killed_job() -> JobContent:
    return job(recovered(), [*gpu_metrics(1, 24), *gpu_metrics(21, 40, 2)], (20,))


def slow_job() -> JobContent:
    return job([*started(spares=1), SLOW], gpu_metrics(1, 30), (20,))


def hung_job() -> JobContent:
    silent = HealthChanged(at=START + 55, attempt=1, ranks=((0, 3),), health="silent", age_s=6)
    judged = hang_judged(confidence=0.97, waiting=())
    story = hung()
    return job([*story[:-1], silent, story[-1], judged], gpu_metrics(1, 12))


def many_hosts(hosts: int) -> JobContent:
    bad = HealthChanged(at=START + 20, attempt=1, ranks=((77, 77),), health="silent", age_s=6)
    return job([*started(hosts, 8), bad], gpu_metrics(1, 30))


def fleet() -> FleetContent:
    return FleetContent(rows=in_order(some_rows(), NOW), warnings=())


def log_lines(many: int) -> NewestLines:
    lines = [f"2023-11-14 22:13:{n % 60:02} step {n} loss {5 - n / 100:.2f}" for n in range(many)]
    return NewestLines(lines=[*lines, "a long line " * 30, "资源不足 \x1b[2J"], dropped=7)


def content_of(source: Source) -> Content:
    match source.kind:
        case "fleet":
            return fleet()
        case "logs":
            return log_lines(60)
        case "events":
            return NewestLines(lines=[f"event {n}" for n in range(9)], dropped=0)
        case "stacks":
            return NewestLines(lines=["attempt 1: 4 ranks, step 12 done"], dropped=0)
        case _:
            return killed_job()


def sight(
    kind: Kind, content: Callable[[Source], Content] = content_of, message: str = "", **more: object
) -> Sight:
    place = Place(kind=kind, job=JOB, **more)  # type: ignore[arg-type]
    return Sight(
        place=place,
        is_first=False,
        readings={source: Reading(content=content(source)) for source in sources_of(place)},
        message=message,
        now=NOW,
        zone=UTC,
    )


PAGES: dict[str, Sight] = {
    "fleet": sight("fleet"),
    "job": sight("job"),
    "hosts": sight("hosts"),
    "host": sight("host", host="host-0"),
    "rank": sight("rank", host="host-0", rank=1),
    "logs": sight("logs", host="host-0", rank=1),
    "events": sight("events"),
    "incident": sight("incident"),
    "metrics": sight("metrics"),
    "stacks": sight("stacks"),
    "cancel": sight("cancel"),
    "help": sight("help"),
}
JOBS: dict[str, Sight] = {
    "slow": sight("job", lambda _: slow_job()),
    "hang": sight("job", lambda _: hung_job()),
    "500 hosts": sight("job", lambda _: many_hosts(500)),
    "2000 hosts": sight("job", lambda _: many_hosts(2000)),
    "ended": sight("job", lambda _: job(finished(), gpu_metrics(1, 60, 2))),
}

__all__ = ["JOBS", "PAGES", "JobRow"]
