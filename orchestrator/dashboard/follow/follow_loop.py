"""Loops around the views: `submit --follow` and `logs`, until the job ends."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.console import VisibleConsole
from orchestrator.dashboard.follow.follow import Follower, summary_text
from orchestrator.dashboard.follow.logs import (
    LogLine,
    agent_files,
    attempts,
    follow_logs,
    log_files,
    read_logs,
)
from orchestrator.dashboard.metrics import MetricTail
from orchestrator.dashboard.scheduler_status import Ask, Holding
from orchestrator.dashboard.snapshot import read_snapshot
from orchestrator.dashboard.view import effective_state
from orchestrator.errors import JobError
from orchestrator.job.stage import ENDED
from orchestrator.job.state import Run
from orchestrator.job.step import fold
from orchestrator.journal.journal import Tail, has_writer
from orchestrator.journal.snapshot import recall
from orchestrator.seams import Clock, Sighting

FOLLOW_POLL_S = 0.2
EXIT_CODES = {
    "SUCCEEDED": exit_codes.OK,
    "FAILED": exit_codes.FAILED,
    "CANCELLED": exit_codes.CANCELLED,
}


def follow_job(
    run_dir: RunDir,
    known: int,
    clock: Clock,
    ask: Ask,
    commands: Commands | None = None,
    has_ended: Callable[[], bool] | None = None,
) -> int:
    """Print what happens until the job has ended, and its summary; the exit code for it.

    Args:
        known: lines of the journal that were there before, which are not told again.
        has_ended: asked again and again; by default the journal and `ask` say it.
    """
    run, entries = recall(run_dir)
    if entries.lines > known:  # of a leader that wrote what is yet to be told
        run, entries = Run(), Tail(run_dir.journal)
    old, metrics = known - entries.lines, MetricTail(run_dir.metrics)
    console = VisibleConsole(highlight=False)
    watch, unknown = EndWatch(run_dir, clock, ask), ""
    is_over = has_ended or watch
    with Follower(console, None, run) as follower:
        first = entries.more()
        follower.skip(first[:old], metrics.more() if known else ())
        follower.feed(first[old:], metrics.more())
        while not is_over():
            if watch.unknown != unknown:
                console.print(_outage(watch.unknown), markup=False, soft_wrap=True)
                unknown = watch.unknown
            clock.sleep(FOLLOW_POLL_S)
            follower.feed(entries.more(), metrics.more())
        follower.feed(entries.more(), metrics.more())
    snapshot = read_snapshot(run_dir, clock.now(), commands)
    assert snapshot is not None
    snapshot = replace(snapshot, sighting=watch.seen)
    console.print(summary_text(snapshot, None), markup=False, soft_wrap=True)
    return EXIT_CODES[snapshot.standing.state]


def _outage(unknown: str) -> str:
    """When it begins, and when it is over."""
    if not unknown:
        return "how the job stands is known again"
    return f"{unknown}; the job may train on, and is followed again once that is over"


class EndWatch:
    """Asks whether the job has ended, or lost its leader for good; reads each journal line once."""

    def __init__(self, run_dir: RunDir, clock: Clock, ask: Ask) -> None:
        self.run_dir, self.clock = run_dir, clock
        self.run, self.entries = recall(run_dir)
        self.holding = Holding(ask, clock)
        self.seen: Sighting | None = None
        """What a scheduler said last of a job that no process leads."""

    def __call__(self) -> bool:
        alive = has_writer(self.run_dir.journal)  # asked first: see `moment.read_snapshot`
        self.run = fold((entry.event for entry in self.entries.each()), self.run)
        self.seen = self.holding(self.run, alive)
        if self.seen is not None and self.seen.leaving:
            return False  # its hosts write a last checkpoint, of which a line may yet come
        now = self.clock.now()
        return effective_state(self.run, alive, now, sighting=self.seen).state in ENDED

    @property
    def unknown(self) -> str:
        """Why it is not known how the job stands; empty where it is."""
        return self.seen.unknown if self.seen is not None else ""


def agent_lines(run_dir: RunDir, tail: int | None) -> Iterator[LogLine]:
    """What the hosts' agents said. Raises JobError where none has said anything."""
    files = agent_files(run_dir)
    if not files:
        slurm = run_dir.slurm
        raise JobError(
            f"no agent of {run_dir.path.name} has said anything",
            fix=f"what came before their logs is in {slurm}"
            if slurm.is_dir()
            else "look again later",
        )
    yield from read_logs(files, tail)


def log_lines(  # noqa: PLR0913 - what may be asked of logs, and the world
    run_dir: RunDir,
    clock: Clock,
    ended: Callable[[], bool],
    rank: int | None,
    attempt: int | None,
    tail: int | None,
    follow: bool,
) -> Iterator[LogLine]:
    """What `ndctl logs` prints: of a job that never came to an attempt, what its agents said.

    Raises JobError when there is no such attempt or rank.
    """
    if follow:
        yield from follow_logs(
            run_dir,
            clock=clock,
            ended=ended,
            rank=rank,
            attempt=attempt,
            tail=tail,
        )
        if attempts(run_dir):
            return
    there = attempts(run_dir)
    wanted = attempt if attempt is not None else max(there, default=1)
    files = log_files(run_dir, wanted, rank)
    if not there and attempt is None and rank is None:
        yield from agent_lines(run_dir, tail)
        return
    if not files:
        known = ", ".join(map(str, there)) or "none yet"
        raise JobError(
            f"no log of attempt {wanted}" + (f", rank {rank}" if rank is not None else ""),
            fix=f"attempts with logs: {known}; ranks count from 0",
        )
    yield from read_logs(files, tail)
