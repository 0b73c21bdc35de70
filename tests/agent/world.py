"""Shared by tests: a manual clock, ways to wait, a small job, a fake backend, a fake torchrun."""

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.agent.evidence.rank_evidence import process_state
from orchestrator.agent.processes.torchrun import HostPlace
from orchestrator.contract.drills import Drill
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.agent_protocol import Start
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.plan import Memory, Plan
from orchestrator.errors import BackendError, MustLeave, PlanError, Unanswered
from orchestrator.job.plans import JobPlan, Refit, Shortage
from orchestrator.job_secret import draw, secret_from
from orchestrator.seams import CurrentRun, HostNotice

SECRET_TEXT = draw()
SECRET = secret_from(SECRET_TEXT)
WAIT_S = 240.0
"""Limit for all waits, so long that only a hang reaches it, even on a loaded machine."""


@dataclass
class TurnedClock:
    """A clock that only `sleep` and assignments advance."""

    time: float = 1_800_000_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class TurnedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time can be put forward, in addition to the passing of real time.

    A test need not wait for a time limit, so limits can be too long for a slow machine to reach.
    """

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


@dataclass(frozen=True)
class LoopClock:
    """A clock with the time of a `TurnedLoop`."""

    loop: TurnedLoop

    def now(self) -> float:
        return time.time() + self.loop.ahead

    def monotonic(self) -> float:
        return self.loop.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def put_forward(self, seconds: float) -> None:
        self.loop.ahead += seconds


T = TypeVar("T")


def run_with_clock(script: Callable[[LoopClock], Coroutine[Any, Any, T]]) -> T:
    """`asyncio.run` for a script that gets the clock of its loop."""
    with asyncio.Runner(loop_factory=TurnedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, TurnedLoop)
        return runner.run(script(LoopClock(loop)))


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {WAIT_S:.0f} s for {what}"
        time.sleep(0.01)
    return found


async def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {WAIT_S:.0f} s for {what}"
        await asyncio.sleep(0.01)
    return found


def signal_ourselves(number: int) -> None:
    """Send a signal as a scheduler does. Without a handler this test fails, not its worker."""
    assert callable(signal.getsignal(number)), f"no handler for {signal.Signals(number).name}"
    os.kill(os.getpid(), number)


def is_gone(pid: int) -> bool:
    """The process has ended; its new parent may not have reaped it yet."""
    return process_state(pid) in ("gone", "Z")


# A job

LAUNCH = 3


def a_plan(hosts: int = 2, ranks_per_host: int = 1) -> Plan:
    return Plan(
        mesh=Mesh(dp_shard=hosts * ranks_per_host),
        micro_batch_size=1,
        gradient_accumulation=1,
        hosts=tuple(f"host-{i}" for i in range(hosts)),
        ranks_per_host=ranks_per_host,
        memory=Memory(peak_bytes=1 << 20, items={"parameters": 1 << 20}),
    )


def a_job(run_dir: Path, hosts: int = 2, agent_timeout: float = 10.0, **more: Any) -> JobSubmitted:
    plan = a_plan(hosts)
    launch = LaunchPlan(
        job="job",
        run_dir=str(run_dir),
        launch=LAUNCH,
        hosts=plan.hosts,
        devices_per_host=1,
        agent_timeout=agent_timeout,
    )
    fields: dict[str, Any] = {
        "at": time.time(),
        "backend": "local",
        "steps": 10,
        "plan": plan,
        "plan_number": 1,
        "launch": launch,
        "max_restarts": 3,
        "hang_timeout": None,
        "init_timeout": 600.0,
        "stop_grace": 5.0,
    }
    return JobSubmitted(**{**fields, **more})


RUNS = CurrentRun(phase="running", words="Slurm job 7 is RUNNING")


@dataclass
class FakeBackend:
    """Records its calls, and answers as a test has set it up."""

    replaced: list[str] = field(default_factory=list)
    revived: list[float | None] = field(default_factory=list)
    """How long the leader had been silent, for each request to start another one."""
    moved: list[str] = field(default_factory=list)
    """Hosts for which replacement by another host was requested."""
    whole: bool | None = None
    """Whether the last requeue released all hosts, or only the leader's."""
    broken: bool = False
    powerless: bool = False
    """It has no permission to end agents."""
    flagged: tuple[HostNotice, ...] = ()
    cause: Cause = "unknown"
    words: str | None = None
    """State of the job in the scheduler's words."""
    evicted: Mapping[str, str] = field(default_factory=dict)
    """Hosts that the scheduler took without notice -> reason."""
    requeued: list[tuple[str, ...]] = field(default_factory=list)
    busy: int = 0
    """Number of requeue requests that get no answer."""
    refuses: BackendError | None = None
    """Raised at each later requeue request."""
    smaller: JobPlan | None = None
    left: tuple[str, ...] = ()
    """Hosts for which a smaller plan was requested."""
    mute: bool = False
    asked: int = 0
    """Number of calls of `notices`."""
    own: CurrentRun = RUNS
    """Answer of `own_run`."""
    asked_own: int = 0
    """Number of calls of `own_run`."""
    cleared: list[str] = field(default_factory=list)
    """Hosts on which left-over processes were ended."""
    ended: BackendError | None = None
    """Raised by `replace`, because the allocation has ended."""
    released: int = 0
    """Number of calls of `release`."""
    uncleared: BackendError | None = None
    """Raised by `clear_host`."""

    @property
    def granted(self) -> "FakeBackend":
        return self

    @property
    def fixed_hosts(self) -> "FakeBackend":
        return self

    @property
    def successors(self) -> "FakeBackend":
        return self

    @property
    def unattended(self) -> "FakeBackend":
        return self

    def standing(self, launch: LaunchPlan) -> str | None:
        return self.words

    def cluster(self) -> str:
        raise AssertionError("only the process that starts the leader asks for it")

    def rival(self, launch: LaunchPlan) -> str | None:
        return None

    def allocation(self, launch: LaunchPlan) -> Allocation:
        raise AssertionError("only the process that starts the leader asks for it")

    def unbegun(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        return {}

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        self.asked += 1
        if self.mute:
            raise Unanswered("the scheduler does not answer")
        return self.flagged

    def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> CurrentRun:
        self.asked_own += 1
        if self.mute:
            raise Unanswered("the scheduler does not answer")
        return self.own

    def clear_host(self, launch: LaunchPlan, host: str) -> str:
        self.cleared.append(host)
        if self.uncleared is not None:
            raise self.uncleared
        return f"its process on {host} had ended, and {host} is well"

    def why_ending(self, launch: LaunchPlan) -> Cause:
        if self.broken:
            raise BackendError("the scheduler does not answer")
        return self.cause

    def taken(self, launch: LaunchPlan, hosts: Mapping[str, float]) -> Mapping[str, str]:
        return {host: why for host, why in self.evicted.items() if host in hosts}

    def revive_leader(self, launch: LaunchPlan, *, silent_s: float | None) -> None:
        self.revived.append(silent_s)

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        self.requeued.append(tuple(exclude))
        self.whole = whole
        if len(self.requeued) <= self.busy:
            raise Unanswered("the scheduler does not answer")
        if self.refuses is not None:
            raise self.refuses

    def replan(
        self, former: Plan, hosts: Sequence[str], switches: Mapping[str, tuple[str, ...]]
    ) -> JobPlan:
        self.left = tuple(hosts)
        if self.smaller is None:
            raise PlanError("no plan")
        return self.smaller

    def refit(
        self,
        former: Plan,
        hosts: Sequence[str],
        switches: Mapping[str, tuple[str, ...]],
        short: Shortage,
    ) -> Refit:
        self.short = short
        found = self.smaller if short.adopt else None
        return Refit(found=found, why="it fits otherwise", ways=("--set train.x=1  (cheap)",))

    def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        (self.moved if elsewhere else self.replaced).append(host)
        if self.ended is not None:
            raise self.ended
        if self.powerless:
            raise MustLeave("pod job-node-0-1-abcde is not deleted", fix="kubectl delete pod")
        if self.broken:
            raise BackendError("no such host")

    def release(self, launch: LaunchPlan) -> None:
        self.released += 1


# A host

PYTHON = """#!/bin/sh
# Replaces python on the command line of torchrun; CONFIG is the program that plays the trainer.
case "$3" in
  trainer.rank.torchrun) shift 3; exec {python} -S -E {torchrun} "$@" ;;
  trainer) exec {python} -S -E "$4" ;;
  *) exec {python} "$@" ;;
esac
"""
TORCHRUN = """
import os, signal, subprocess, sys, time
cut = sys.argv.index("--run-path")
options = dict(word[2:].split("=", 1) for word in sys.argv[1:cut])
command = [sys.executable, "-m", "orchestrator.agent.processes.rank_watcher", *sys.argv[cut + 2:]]
if "FAKE_TORCHRUN_FAILS" in os.environ:
    print("the rendezvous was refused", flush=True)
    sys.exit(3)
count = int(options["nproc-per-node"])
ranks = []
for local in range(count):
    rank = int(options["rdzv-conf"].removeprefix("rank=")) * count + local
    env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": "9"}
    ranks.append(subprocess.Popen(command, env=env))
while None in [rank.poll() for rank in ranks]:
    if any(rank.returncode for rank in ranks):
        for rank in ranks:
            if rank.returncode is None:
                rank.terminate()
        for rank in ranks:
            rank.wait()
    time.sleep(0.01)
sys.exit(1 if any(rank.returncode for rank in ranks) else 0)
"""


def a_place(folder: Path, host: str = "host-0") -> HostPlace:
    """A host whose python is a script that plays torchrun and the trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    torchrun = folder / "torchrun.py"
    torchrun.write_text(TORCHRUN)
    python = folder / "python"
    python.write_text(
        PYTHON.format(python=shlex.quote(sys.executable), torchrun=shlex.quote(str(torchrun)))
    )
    python.chmod(0o755)
    run_dir = RunDir(folder / "job")
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    (folder / "s").mkdir(mode=0o700, exist_ok=True)
    return HostPlace(
        python=str(python),
        run_dir=run_dir,
        host=host,
        address="127.0.0.1",
        socket=folder / "s" / "ranks.sock",
        parent=os.getpid(),
        imports=(),
    )


def a_start(
    place: HostPlace, program: str, ranks: int = 1, attempt: int = 1, drills: tuple[Drill, ...] = ()
) -> Start:
    """An order to run `program` as the trainer."""
    config = place.run_dir.path / f"trainer-{attempt}.py"
    config.write_text(program)
    return Start(
        attempt=attempt,
        node_rank=0,
        nodes=1,
        ranks_per_host=ranks,
        master_address="127.0.0.1",
        master_port=29_500,
        config=str(config),
        drills=drills,
    )


SLEEPS = "import time; time.sleep(600)"
IGNORES_TERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
