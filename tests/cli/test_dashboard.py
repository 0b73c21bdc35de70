"""`ndctl dashboard` in a real terminal, and without one."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.journal.journal import to_line
from orchestrator.system import SystemClock
from tests.dashboard.dashboard_story import finished, journal

NDCTL = "import sys; from orchestrator.cli import main; main()"
WITHOUT_TEXTUAL = f"import sys; sys.modules['textual'] = None; {NDCTL}"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    run_dir = RunDir(tmp_path / "runs" / "quickstart")
    run_dir.path.mkdir(parents=True)
    lines = b"".join(map(to_line, journal(finished())))
    # The story is of 2023, and jobs that ended long ago are not shown.
    lately = int(SystemClock().now()) // 1000 - 1
    run_dir.journal.write_bytes(lines.replace(b"1700000", b"%d" % lately))
    return {
        **os.environ,
        "NDCTL_RUN_ROOT": str(tmp_path / "runs"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "TERM": "xterm-256color",
        "COLUMNS": "100",
        "LINES": "30",
    }


def in_a_terminal(
    program: str,
    words: Sequence[str],
    environ: dict[str, str],
    shown: Sequence[str],
    stderr: int | None = None,
) -> str:
    """What the command writes to the terminal. `q` is pressed each time that one of `shown` has
    appeared."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs if stderr is None else stderr,
        env=environ,
    ) as process:
        os.close(theirs)
        written = b""
        for words_shown in shown:
            while words_shown.encode() not in written:
                written += os.read(ours, 65536)
            os.write(ours, b"q")
        try:
            while more := os.read(ours, 65536):
                written += more
        except OSError:  # the terminal is closed
            pass
        os.close(ours)
        assert process.wait(20) == 0, written.decode()
    return written.decode()


@pytest.mark.timeout(60)
def test_a_terminal_gets_the_fleet_with_keys_and_is_restored(environ: dict[str, str]) -> None:
    text = in_a_terminal(NDCTL, ["dashboard"], environ, ["1 SUCCEEDED"])
    assert "\x1b[?1049h" in text
    assert "\x1b[?1049l" in text
    assert "quickstart" in text


@pytest.mark.timeout(60)
def test_with_stderr_in_a_file_the_terminal_gets_the_plain_screen(environ: dict[str, str]) -> None:
    """textual would draw its screen into the file."""
    words = ["dashboard", "quickstart"]
    text = in_a_terminal(NDCTL, words, environ, ["more: ndctl describe"], subprocess.DEVNULL)
    assert "SUCCEEDED" in text


@pytest.mark.timeout(60)
def test_without_textual_the_plain_screen_says_how_to_get_keys(environ: dict[str, str]) -> None:
    words = ["dashboard", "quickstart"]
    text = in_a_terminal(WITHOUT_TEXTUAL, words, environ, ["more: ndctl describe"])
    assert "pip install 'ndctl[dashboard]'" in text
    assert "SUCCEEDED" in text


def test_a_pipe_gets_the_table_of_all_jobs_or_one_picture(environ: dict[str, str]) -> None:
    runner = CliRunner(env=environ)
    table = runner.invoke(cli, ["dashboard"])
    assert table.exit_code == 0, table.output
    assert "quickstart" in table.stdout
    assert "SUCCEEDED" in table.stdout
    picture = runner.invoke(cli, ["dashboard", "quickstart", "--plain"])
    assert "✓ 4 done" in picture.stdout
    assert "\x1b" not in picture.stdout
