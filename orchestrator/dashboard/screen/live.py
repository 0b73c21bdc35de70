"""The loop of `ndctl dashboard`: read new data, draw a frame, wait for a key."""

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.live import Live

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.cluster_report import apply_report
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.metrics import NO_PROGRESS, MetricTail, Progress, fold_metrics
from orchestrator.dashboard.replay import read_snapshot_state
from orchestrator.dashboard.scheduler_status import Ask, SchedulerPoll
from orchestrator.dashboard.screen.screen import draw
from orchestrator.dashboard.view import View, fold_seen, heard_at, view
from orchestrator.errors import JobError
from orchestrator.job.reports.job_report import read_report
from orchestrator.journal import journal
from orchestrator.seams import Clock

REFRESH_S = 0.5
QUIT = ("q", "Q", "\x03", "\x04")


class Keys(Protocol):
    def __call__(self, timeout: float, /) -> str:
        """The next key; empty if none was pressed within `timeout` seconds."""


class Screen:
    """The data of one job read so far, in bounded memory."""

    def __init__(
        self, run_dir: RunDir, holding: SchedulerPoll, commands: Commands | None = None
    ) -> None:
        self.run_dir = run_dir
        self.holding = holding
        self.commands = commands or Commands(job=run_dir.path.name, spec=str(run_dir.spec))
        self.metrics = MetricTail(run_dir.metrics)
        self.seen, self.entries = read_snapshot_state(run_dir)
        self.progress: Progress = NO_PROGRESS

    def update(self, now: float) -> View | None:
        """Reads new data; None while the journal is empty."""
        alive = journal.has_writer(self.run_dir.journal)  # before reading: see `read_snapshot`
        if entries := self.entries.more():
            self.seen = fold_seen(self.seen, entries)
        if metrics := self.metrics.more():
            self.progress = fold_metrics(self.progress, metrics)
        if self.seen.run.job is None:
            return None
        last_heard = heard_at(self.seen.run, self.progress)
        launch_status = self.holding(self.seen.run, alive, last_heard)
        seen, progress = apply_report(self.seen, self.progress, read_report(self.run_dir))
        return view(
            seen,
            progress,
            leader_alive=alive,
            now=now,
            launch_status=launch_status,
            commands=self.commands,
        )


def run_dashboard(
    run_dir: RunDir,
    *,
    console: Console,
    clock: Clock,
    keys: Keys,
    ask: Ask,
    commands: Commands | None = None,
) -> None:
    """Draws frames until q or ^C; draws one frame if the console is not a terminal.

    Raises:
        JobError: the job was not submitted.
    """
    screen = Screen(run_dir, SchedulerPoll(ask, clock), commands)
    first = screen.update(clock.now())
    if first is None:
        raise JobError(
            f"{run_dir.path} has no journal of a job",
            fix="list the jobs with `ndctl list`",
        )
    if not console.is_terminal:
        console.print(draw(first, *console.size))
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            shown = screen.update(clock.now()) or first
            live.update(draw(shown, *console.size), refresh=True)
            if keys(REFRESH_S) in QUIT:
                return


@contextlib.contextmanager
def terminal_keys(clock: Clock) -> Iterator[Keys]:
    """Reads single keys of standard input without Enter; restores the terminal at the end."""
    if not sys.stdin.isatty():
        yield _no_keys(clock)
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def wait(timeout: float, /) -> str:
        ready, _, _ = select.select([fd], [], [], timeout)
        if not ready:
            return ""
        return os.read(fd, 1).decode(errors="replace") or "\x04"  # end of file: quit

    try:
        tty.setcbreak(fd)
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _no_keys(clock: Clock) -> Keys:
    def wait(timeout: float, /) -> str:
        clock.sleep(timeout)
        return ""

    return wait
