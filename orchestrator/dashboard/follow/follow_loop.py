"""The loops of `ndctl submit --follow` and `ndctl logs`, which run until the job ends."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from msgspec.structs import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard import format
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.console import VisibleConsole, print_report
from orchestrator.dashboard.follow.follow import Follower, summary_text
from orchestrator.dashboard.follow.logs import (
    LogLine,
    agent_files,
    attempts,
    follow_logs,
    log_files,
    read_logs,
)
from orchestrator.dashboard.job_view.replayed_job import ReplayedJob
from orchestrator.dashboard.job_view.standing import effective_state
from orchestrator.dashboard.metrics import MetricTail
from orchestrator.dashboard.scheduler_status import Ask, SchedulerPoll
from orchestrator.dashboard.snapshot import read_snapshot
from orchestrator.errors import JobError
from orchestrator.job.stage import ENDED, State
from orchestrator.job.state import Run
from orchestrator.job.transitions import fold
from orchestrator.journal.journal import Tail, has_writer
from orchestrator.journal.snapshot import recall, replay
from orchestrator.seams import Clock, LaunchStatus

FOLLOW_POLL_S = 0.2
MOST_NAMED = 8
"""Hosts that an error lists."""
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
    """Print events until the job ends, then a summary. Returns the exit code for that end.

    Args:
        known: number of journal lines at submission, which are not printed.
        has_ended: called in a loop; by default the journal and `ask` decide.
    """
    run, entries = recall(run_dir)
    # The snapshot already covers lines that were not printed yet: read the journal from its start.
    if entries.lines > known:
        run, entries = Run(), Tail(run_dir.journal)
    old, metrics = known - entries.lines, MetricTail(run_dir.metrics)
    console = VisibleConsole(highlight=False)
    watch, unknown = EndDetector(run_dir, clock, ask), ""
    is_over = has_ended or watch
    with Follower(console, None, run) as follower:
        first = entries.more()
        follower.skip(first[:old], metrics.more() if known else ())
        follower.feed(first[old:], metrics.more())
        while not is_over():
            if watch.unknown != unknown:
                print_report(console, _outage_text(watch.unknown))
                unknown = watch.unknown
            clock.sleep(FOLLOW_POLL_S)
            follower.feed(entries.more(), metrics.more())
        follower.feed(entries.more(), metrics.more())
    snapshot = read_snapshot(run_dir, clock.now(), commands)
    assert snapshot is not None
    snapshot = replace(snapshot, launch_status=watch.seen)
    print_report(console, summary_text(snapshot, None))
    return EXIT_CODES[snapshot.standing.state]


def _outage_text(unknown: str) -> str:
    """Printed when the state of the job becomes unknown, and when it is known again."""
    if not unknown:
        return "the state of the job is known again"
    return f"{unknown}; the job may still be training, and ndctl asks again every few seconds"


class EndDetector:
    """Returns True once the job has ended or has lost its leader for good."""

    def __init__(self, run_dir: RunDir, clock: Clock, ask: Ask) -> None:
        self.run_dir, self.clock = run_dir, clock
        self.run, self.entries = recall(run_dir)
        self.holding = SchedulerPoll(ask, clock)
        self.seen: LaunchStatus | None = None
        """The scheduler's last answer about a job without a leader."""

    def __call__(self) -> bool:
        return self.state() in ENDED

    def state(self) -> State | None:
        """The state at present; None while an ended job may still write its last lines."""
        alive = has_writer(self.run_dir.journal)  # before the journal is read: see `read_snapshot`
        self.run = fold((entry.event for entry in self.entries.each()), self.run)
        self.seen = self.holding(self.run, alive)
        # The scheduler has ended the job, but its hosts may still write a last checkpoint and a
        # journal line about it.
        if self.seen is not None and self.seen.leaving:
            return None
        now, job = self.clock.now(), ReplayedJob(run=self.run)
        return effective_state(job, alive, now, launch_status=self.seen).state

    @property
    def unknown(self) -> str:
        """Why the state of the job is unknown; empty if it is known."""
        return self.seen.unknown if self.seen is not None else ""


def agent_lines(run_dir: RunDir, tail: int | None) -> Iterator[LogLine]:
    """Log lines of the agents.

    Raises:
        JobError: no agent has written a log.
    """
    files = agent_files(run_dir)
    if not files:
        _refuse_without_copies(run_dir)
        slurm = run_dir.slurm
        raise JobError(
            f"no agent of {run_dir.path.name} has written a log yet",
            fix=f"see the output of the Slurm job in {slurm}"
            if slurm.is_dir()
            else "try again after the agents have started",
        )
    yield from read_logs(files, tail)


def _refuse_without_copies(run_dir: RunDir) -> None:
    """Raises JobError for a copy of a job whose pods have written logs, and that has none of them:
    Kubernetes deletes the output of a pod together with the pod."""
    run = replay(run_dir)
    job = run.job
    if job is None or job.backend != "kubernetes" or not run.attempt.number:
        return
    logs = RunDir(Path(job.launch.run_dir)).logs
    if logs != run_dir.logs:
        raise JobError(
            f"no log of {run_dir.path.name} is here, and it has no pod whose output can be read",
            fix=f"the logs are in {logs}, on the volume that the pods mount",
        )


def log_lines(  # noqa: PLR0913 - one argument per option of `ndctl logs`
    run_dir: RunDir,
    clock: Clock,
    ended: Callable[[], bool],
    rank: int | None,
    attempt: int | None,
    tail: int | None,
    follow: bool,
    hosts: Collection[str] = (),
) -> Iterator[LogLine]:
    """The lines of `ndctl logs`. For a job without an attempt these are the agents' logs.

    Raises:
        JobError: there is no log of that attempt, rank or host.
    """
    if follow:
        yield from follow_logs(
            run_dir, clock=clock, ended=ended, rank=rank, attempt=attempt, tail=tail, hosts=hosts
        )
        if attempts(run_dir):
            return
        # The job ended before its first attempt: fall through to the agents' logs.
    there = attempts(run_dir)
    lines_needed = attempt if attempt is not None else max(there, default=1)
    files = log_files(run_dir, lines_needed, rank, hosts)
    if not there and attempt is None and rank is None and not hosts:
        yield from agent_lines(run_dir, tail)
        return
    if not files and not there:
        _refuse_without_copies(run_dir)
    if not files and lines_needed in there and rank is None and not hosts:
        name = run_dir.path.name
        raise JobError(
            f"the ranks of attempt {lines_needed} have written nothing yet",
            fix=f"`ndctl logs {name} --follow` waits for them; `ndctl logs {name} --agents` has the"
            " logs of the agents",
        )
    if not files:
        known = ", ".join(map(str, there)) or "none yet"
        of_rank = f", rank {rank}" if rank is not None else ""
        of_hosts = f", host {', '.join(hosts)}" if hosts else ""
        raise JobError(
            f"no log of attempt {lines_needed}{of_rank}{of_hosts}",
            fix=f"attempts with logs: {known}{_log_owners(run_dir, lines_needed)}",
        )
    yield from read_logs(files, tail)


def _log_owners(run_dir: RunDir, attempt: int) -> str:
    """The ranks and hosts with a log of that attempt; empty: there is none."""
    files = log_files(run_dir, attempt)
    ranks = tuple(sorted(file.rank for file in files if file.rank is not None))
    hosts = sorted({file.host for file in files})
    if not ranks:
        return ""
    more = f" and {len(hosts) - MOST_NAMED:,} more" if len(hosts) > MOST_NAMED else ""
    named = f"{', '.join(hosts[:MOST_NAMED])}{more}"
    return f"; attempt {attempt} has those of {format.rank_list(ranks)} on {named}"
