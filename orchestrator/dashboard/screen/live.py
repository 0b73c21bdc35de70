"""The dashboard's loop: read what is new, draw it, wait for a key. It decides nothing."""

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
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.metrics import NOTHING, MetricTail, Progress, fold_metrics
from orchestrator.dashboard.replay import recall
from orchestrator.dashboard.reported import with_report
from orchestrator.dashboard.scheduler_status import Ask, Holding
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
        """The next key, waited for no longer than `timeout` seconds; empty when none came."""


class Screen:
    """What has been read of one job so far, in bounded memory."""

    def __init__(self, run_dir: RunDir, holding: Holding, commands: Commands | None = None) -> None:
        self.run_dir = run_dir
        self.holding = holding
        self.commands = commands or Commands(job=run_dir.path.name, spec=str(run_dir.spec))
        self.metrics = MetricTail(run_dir.metrics)
        self.seen, self.entries = recall(run_dir)
        self.progress: Progress = NOTHING

    def look(self, now: float) -> View | None:
        """The job as it is now; None while its journal is empty."""
        alive = journal.has_writer(self.run_dir.journal)  # asked first: see `moment.read_snapshot`
        if entries := self.entries.more():
            self.seen = fold_seen(self.seen, entries)
        if metrics := self.metrics.more():
            self.progress = fold_metrics(self.progress, metrics)
        if self.seen.run.job is None:
            return None
        last_heard = heard_at(self.seen.run, self.progress)
        sighting = self.holding(self.seen.run, alive, last_heard)
        seen, progress = with_report(self.seen, self.progress, read_report(self.run_dir))
        return view(
            seen,
            progress,
            leader_alive=alive,
            now=now,
            sighting=sighting,
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
    """Until q or ^C; where the console is no terminal, one frame.

    Raises:
        JobError: nobody has submitted the job.
    """
    screen = Screen(run_dir, Holding(ask, clock), commands)
    first = screen.look(clock.now())
    if first is None:
        raise JobError(
            f"{run_dir.path} holds no journal",
            fix="see the jobs there are with `ndctl list`",
        )
    if not console.is_terminal:
        console.print(draw(first, *console.size))
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            shown = screen.look(clock.now()) or first
            live.update(draw(shown, *console.size), refresh=True)
            if keys(REFRESH_S) in QUIT:
                return


@contextlib.contextmanager
def terminal_keys(clock: Clock) -> Iterator[Keys]:
    """Keys of standard input, each at once; the terminal is put back as it was."""
    if not sys.stdin.isatty():
        yield _no_keys(clock)
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def wait(timeout: float, /) -> str:
        ready, _, _ = select.select([fd], [], [], timeout)
        if not ready:
            return ""
        return os.read(fd, 1).decode(errors="replace") or "\x04"  # end of file: nobody is there

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
