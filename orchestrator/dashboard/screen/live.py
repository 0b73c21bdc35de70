"""The loop of `ndctl dashboard`: read new data, draw a frame, wait for a key."""

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Protocol

from msgspec.structs import replace
from rich.console import Console
from rich.live import Live

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.reading.job_reader import JobReader, ReadJob
from orchestrator.dashboard.scheduler_status import Ask, SchedulerPoll
from orchestrator.dashboard.screen.screen import draw
from orchestrator.errors import JobError
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
        self.holding = holding
        commands = commands or Commands(job=run_dir.path.name, spec=str(run_dir.spec))
        self.reader = JobReader(run_dir, commands)

    def update(self, now: float) -> View | None:
        """Reads new data; None while the journal is empty."""
        read = self.look(now)
        return None if read is None else view_of(read)

    def look(self, now: float) -> ReadJob | None:
        """The same, as all that was read."""
        if (read := self.reader.look(now)) is None:
            return None
        snapshot = read.snapshot
        status = self.holding(snapshot.seen.run, snapshot.leader_alive, snapshot.heard_at)
        return replace(read, snapshot=replace(snapshot, launch_status=status))


def view_of(read: ReadJob) -> View:
    return replace(read.snapshot.view, time=read.time, saved_steps=read.saved_steps)


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
    first = None
    if run_dir.journal.exists():
        screen = Screen(run_dir, SchedulerPoll(ask, clock), commands)
        first = screen.update(clock.now())
    if first is None:
        raise JobError(
            f"{run_dir.path} has no journal of a job", fix="list the jobs with `ndctl list`"
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
