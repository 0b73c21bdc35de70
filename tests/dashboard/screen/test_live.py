import io
import os
import pty
import sys
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.screen.live import run_dashboard, terminal_keys
from orchestrator.errors import JobError
from orchestrator.job.state import Run
from orchestrator.journal.journal import to_line
from orchestrator.seams import LaunchStatus
from tests.dashboard.dashboard_story import START, StoryClock, finished, journal, metrics, started
from trainer.measure.metrics import StepMetrics
from trainer.measure.metrics import to_line as metric_line


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    made = Console(
        file=out,
        width=100,
        height=30,
        force_terminal=terminal,
        color_system=None,
        legacy_windows=False,
    )
    return made, out


def write(run_dir: RunDir, first: int, last: int | None = None) -> None:
    entries = journal(finished())[first:last]
    with run_dir.journal.open("ab") as file:
        file.writelines(to_line(entry) for entry in entries)


def write_metrics(run_dir: RunDir, last: int, attempt: int = 1) -> None:
    with run_dir.metrics.open("wb") as file:
        for found in metrics(1, last):
            line = StepMetrics(
                attempt=attempt,
                step=found.step,
                loss=found.loss or 0.0,
                grad_norm=1.0,
                lr=1e-4,
                tokens_per_second=9000.0,
                step_s=0.8,
                time=found.time or 0.0,
            )
            file.write(metric_line(line))


def ask_no_scheduler(run: Run) -> LaunchStatus | None:
    """This job is on one machine, and no process of it lives."""
    return LaunchStatus(None, held=False)


def no_keys(timeout: float, /) -> str:
    raise AssertionError("keys are read only from a terminal")


def test_a_console_without_a_terminal_gets_one_frame(run_dir: RunDir) -> None:
    write(run_dir, 0)
    write_metrics(run_dir, 60, attempt=2)
    made, out = console(False)
    run_dashboard(
        run_dir, console=made, clock=StoryClock(START + 100), keys=no_keys, ask=ask_no_scheduler
    )
    assert "✓ SUCCEEDED" in out.getvalue()
    assert "step 60/60" in out.getvalue()
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().count("\n") == 30


def test_a_job_that_was_never_submitted_has_no_dashboard(run_dir: RunDir) -> None:
    made, _ = console(False)
    with pytest.raises(JobError, match="has no journal of a job"):
        run_dashboard(run_dir, console=made, clock=StoryClock(), keys=no_keys, ask=ask_no_scheduler)


def test_the_screen_follows_the_journal_until_q(run_dir: RunDir) -> None:
    write(run_dir, 0, len(started()))
    made, out = console(True)
    turns = []

    def keys(timeout: float, /) -> str:
        turns.append(out.getvalue())
        if len(turns) == 1:
            write(run_dir, len(started()))
            write_metrics(run_dir, 60)
            made.width = 90
        return "" if len(turns) < 3 else "q"

    run_dashboard(
        run_dir, console=made, clock=StoryClock(START + 100), keys=keys, ask=ask_no_scheduler
    )
    assert "SUCCEEDED" not in turns[0]
    assert "SUCCEEDED" in turns[1]
    assert len(turns) == 3
    assert out.getvalue().startswith("\x1b[?1049h")
    assert "\x1b[?1049l" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in out.getvalue()


def test_an_interrupt_ends_without_a_traceback_and_restores_the_screen(run_dir: RunDir) -> None:
    write(run_dir, 0)
    made, out = console(True)

    def keys(timeout: float, /) -> str:
        raise KeyboardInterrupt

    run_dashboard(
        run_dir, console=made, clock=StoryClock(START + 100), keys=keys, ask=ask_no_scheduler
    )
    assert "\x1b[?1049l" in out.getvalue()


def test_without_a_terminal_waiting_for_keys_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    clock = StoryClock()
    with terminal_keys(clock) as keys:
        assert keys(0.5) == ""
    assert clock.at == START + 0.5


def test_keys_are_read_at_once_and_the_terminal_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import termios

    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as stdin, os.fdopen(ours, "wb", buffering=0) as keyboard:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(stdin.fileno())
        with terminal_keys(StoryClock()) as keys:
            assert keys(0.0) == ""
            keyboard.write(b"q")
            assert keys(5.0) == "q"
            assert termios.tcgetattr(stdin.fileno()) != before
        assert termios.tcgetattr(stdin.fileno()) == before
