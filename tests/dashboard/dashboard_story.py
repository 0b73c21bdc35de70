"""Stories of jobs as events. `journal` adds the actions that the real supervisor decides."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.drills import Drill, parse_drill
from orchestrator.contract.launch import Allocation, LaunchPlan
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CheckpointSaved,
    DrillHappened,
    Event,
    HangDetected,
    HangJudged,
    HostStopped,
    JobSubmitted,
    LeaderStarted,
    RankError,
    RankExited,
    StepReached,
    StragglerFound,
    Tick,
    TrainingResumed,
)
from orchestrator.contract.plan import Memory, Plan
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.dashboard.job_view.replayed_job import ReplayedJob, fold_seen
from orchestrator.dashboard.job_view.view import View, view
from orchestrator.dashboard.metrics import Metric, Progress, fold_metrics
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Entry

START = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC."""
DRILL = parse_drill("kill:rank=1@step=25", 1)


PODS = LeaderStarted(
    at=START,
    host="host-0",
    pid=99,
    allocation=Allocation(id="7", restarts=0, hosts=("host-0",), successor_s=600.0),
)
"""A leader whose scheduler creates lost hosts again."""


HOSTS = ("host-0", "host-1")


def names(hosts: int) -> tuple[str, ...]:
    width = len(str(hosts - 1))
    return tuple(f"host-{number:0{width}}" for number in range(hosts))


SLOW = StragglerFound(
    at=START + 20,
    attempt=1,
    rank=3,
    host="host-1",
    own_s=0.35,
    peers_s=0.1,
    step_s=1.0,
    steps=15,
    lost_tokens_per_second=300.0,
)
"""Rank 3 of 4 slows the others down."""


def submitted(
    hosts: int = 2,
    each: int = 2,
    at: float = START,
    drills: tuple[Drill, ...] = (),
    spares: int = 0,
    **more: Any,
) -> JobSubmitted:
    plan = Plan(
        mesh=Mesh(dp_shard=hosts, tp=each),
        micro_batch_size=4,
        gradient_accumulation=2,
        hosts=names(hosts + spares)[:hosts],
        ranks_per_host=each,
        memory=Memory(peak_bytes=3 << 20, items={}),
        notes=("tp=2 fills the host",),
    )
    launch = LaunchPlan(
        job="quickstart",
        run_dir="/runs/quickstart",
        launch=1,
        hosts=names(hosts + spares),
        devices_per_host=each,
        agent_timeout=10.0,
    )
    values: dict[str, Any] = {
        "at": at,
        "backend": "local",
        "steps": 60,
        "plan": plan,
        "plan_number": 1,
        "launch": launch,
        "max_restarts": 5,
        "hang_timeout": None,
        "init_timeout": 600.0,
        "stop_grace": 30.0,
        "drills": drills,
    }
    return JobSubmitted(**values | more)


def arrivals(hosts: Iterable[str], at: float, each: int = 2) -> Iterator[Event]:
    for number, host in enumerate(hosts):
        yield AgentRegistered(
            at=at,
            host=host,
            address="127.0.0.1",
            devices=each,
            pid=100 + number,
            incarnation=str(number),
        )


def started(hosts: int = 2, each: int = 2, **more: Any) -> list[Event]:
    """A job up to the first step of attempt 1."""
    job = submitted(hosts, each, **more)
    return [
        job,
        LeaderStarted(at=START + 1, host="host-0", pid=99),
        *arrivals(job.launch.hosts, START + 2, each),
        TrainingResumed(at=START + 6, attempt=1, step=0),
        StepReached(at=START + 8, attempt=1, step=1, loss=5.5, tokens_per_second=9000.0),
    ]


def killed(at: float, rank: int = 1, host: str = "host-0", attempt: int = 1) -> RankExited:
    return RankExited(
        at=at,
        attempt=attempt,
        rank=rank,
        host=host,
        exit_code=None,
        signal=9,
        step=24,
        stopped=False,
        detected_after_s=0.21,
        error=None,
        log_tail=("step 23 loss 3.2", "step 24 loss \x1b[31m3.1\x1b[0m"),
    )


def broken() -> list[Event]:
    """A drill kills rank 1, and the other ranks are being stopped."""
    return [
        *started(drills=(DRILL,)),
        CheckpointSaved(at=START + 25, attempt=1, step=20),
        DrillHappened(at=START + 30, attempt=1, drill=1, rank=1, step=25),
        killed(START + 30),
    ]


def restarting() -> list[Event]:
    """All ranks have ended, and attempt 2 is starting."""
    return [
        *broken(),
        HostStopped(at=START + 31, attempt=1, host="host-0", finished=False),
        HostStopped(at=START + 32, attempt=1, host="host-1", finished=False),
    ]


def recovered() -> list[Event]:
    return [
        *restarting(),
        TrainingResumed(at=START + 36, attempt=2, step=20),
        StepReached(at=START + 37, attempt=2, step=21, loss=3.4, tokens_per_second=9100.0),
    ]


def finished() -> list[Event]:
    return [
        *recovered(),
        CheckpointSaved(at=START + 60, attempt=2, step=40),
        CheckpointSaved(at=START + 80, attempt=2, step=60),
        HostStopped(at=START + 81, attempt=2, host="host-0", finished=True),
        HostStopped(at=START + 82, attempt=2, host="host-1", finished=True),
    ]


def hung() -> list[Event]:
    return [
        *started(),
        HangDetected(
            at=START + 60,
            attempt=1,
            phase="train",
            step=12,
            stalled_s=10.5,
            limit_s=10.0,
            behind=(3,),
        ),
    ]


def hang_judged(**more: Any) -> HangJudged:
    """The verdict on that hang."""
    judged = HangJudged(
        at=START + 63,
        attempt=1,
        verdict="never-entered",
        cause="rank 3 did not call the operation in which the others wait",
        scope="rank",
        ranks=(3,),
        hosts=("host-1",),
        confidence=0.98,
        waiting=("mesh_tp, operation 7: all_reduce",),
    )
    return replace(judged, **more)


def waiting_for_a_host(times: int, **more: Any) -> list[Event]:
    """One of two hosts is available. All hosts were released `times` times before."""
    events: list[Event] = [submitted(**more)]
    at = START
    for number in range(times + 1):
        at += 10
        events += [replace(PODS, at=at), *arrivals(["host-0"], at)]
        if number < times:
            at += 600 * 2**number
            events.append(Tick(at=at))
    return events


def short_of_a_host() -> list[Event]:
    """A job that trained, lost host-1 and waits for its successor."""
    return [
        submitted(),
        replace(PODS, at=START + 1),
        *arrivals(["host-0", "host-1"], START + 2),
        TrainingResumed(at=START + 6, attempt=1, step=0),
        StepReached(at=START + 8, attempt=1, step=1, loss=5.5, tokens_per_second=9000.0),
        AgentLost(at=START + 30, host="host-1", why="its connection closed", silent_s=2.0),
        HostStopped(at=START + 32, attempt=1, host="host-0", finished=False),
    ]


def journal(events: Iterable[Event], run: Run | None = None) -> list[Entry]:
    entries = []
    run = run or Run()
    for number, event in enumerate(events, 1):
        run, actions = step(run, event)
        entries.append(Entry(seq=number, event=event, actions=actions))
    return entries


def seen_of(events: Iterable[Event]) -> ReplayedJob:
    return fold_seen(ReplayedJob(), journal(events))


def metric(number: int, attempt: int = 1, at: float | None = None) -> Metric:
    return Metric(
        attempt=attempt,
        step=number,
        loss=2.0 + 3.5 / number**0.5,
        grad_norm=1.0,
        lr=3e-4,
        tokens_per_second=9000.0 + number,
        step_s=0.8,
        time=START + 8 + 0.8 * number if at is None else at,
    )


def metrics(first: int, last: int, attempt: int = 1) -> list[Metric]:
    return [metric(number, attempt) for number in range(first, last + 1)]


def view_of(
    events: Iterable[Event],
    lines: Iterable[Metric] = (),
    *,
    now: float = START + 40,
    leader_alive: bool = True,
) -> View:
    progress = fold_metrics(Progress(), lines)
    return view(seen_of(events), progress, leader_alive=leader_alive, now=now)


@dataclass
class StoryClock:
    """A clock that advances only in `sleep`, which then calls `during`."""

    at: float = START
    during: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        self.during()


def silent_program(*more: Event) -> list[Event]:
    """A program that reports no steps raised an error in attempt 1."""
    job = submitted(steps=0, run=RunSpec(script="train.py"))
    raised = RankError(error="ValueError", message="boom", step=0, traceback="Trace")
    return [
        replace(job, plan=replace(job.plan, memory=None)),
        LeaderStarted(at=START + 1, host="host-0", pid=99),
        *arrivals(job.launch.hosts, START + 2),
        replace(killed(START + 30), step=0, exit_code=1, signal=None, error=raised),
        *(HostStopped(at=START + 31, attempt=1, host=host, finished=False) for host in HOSTS),
        *more,
    ]
