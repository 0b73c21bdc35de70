"""Colours and wrapping of `status` and `describe`, and colours of errors."""

import os
import pty
import re
import subprocess
import sys
from datetime import UTC
from pathlib import Path

import pytest

from orchestrator.app.policies import listed_text, policy_of
from orchestrator.cli import SECTIONS, cli
from orchestrator.dashboard import format
from orchestrator.dashboard.describe import describe_text
from orchestrator.dashboard.fleet.columns import Piece
from orchestrator.dashboard.status import status_text
from orchestrator.dashboard.terminal.report import COPIED, report_lines
from tests.cli.test_verbs import ndctl
from tests.dashboard.dashboard_story import finished, hung, metrics, recovered, started
from tests.dashboard.test_status import snapshot

STORIES = {"started": started, "recovered": recovered, "finished": finished, "hung": hung}


def texts(width: int) -> list[tuple[str, str]]:
    """(text before, text of the terminal) for `status` and `describe` of each story."""
    found = []
    for story in STORIES.values():
        seen = snapshot(story(), metrics(1, 20))
        for text in (status_text(seen, UTC), describe_text(seen, UTC)):
            shown = ["".join(piece.text for piece in line) for line in report_lines(text, width)]
            found.append((text, "\n".join(shown)))
    return found


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_lines_fit_the_terminal_and_lose_no_word(width: int) -> None:
    for before, after in texts(width):
        assert before.split() == after.split()
        for line in after.splitlines():
            label = line[2:14].strip()
            fits = format.cells(line) <= width or max(map(len, line.split())) + 14 > width
            assert fits or label in COPIED or "ndctl " in line, line


def test_a_long_row_continues_behind_its_label() -> None:
    text = "  incident    " + "word " * 40
    first, *rest = ["".join(piece.text for piece in line) for line in report_lines(text, 60)]
    assert first.startswith("  incident    word")
    assert rest
    assert all(line.startswith(" " * 14 + "word") for line in rest)


@pytest.mark.parametrize("width", range(60, 80))
def test_a_number_stays_with_its_unit(width: int) -> None:
    words = "  lost        found after 0.6 s, 3 min 20 s on 12 hosts with 39.6 GiB on 1,024 ranks"
    shown = ["".join(piece.text for piece in line) for line in report_lines(words, width)]
    assert " ".join(shown).split() == words.split()
    for line in shown:
        assert line[-1] not in "0123456789" or line == shown[-1], line


def test_commands_are_not_broken() -> None:
    command = "  next        ndctl submit " + "--set a=b " * 30
    assert len(list(report_lines(command, 80))) == 1


def test_a_sentence_about_ndctl_is_wrapped_and_a_command_is_not() -> None:
    at = "2026-11-29 02:50:01 UTC  "
    told = f"{at}rank 3 on host-1 was stopped after step 21 while ndctl stopped its attempt"
    shown = ["".join(piece.text for piece in line) for line in report_lines(told, 60)]
    assert all(len(line) <= 60 for line in shown)
    assert all(line.startswith(" " * 25) for line in shown[1:])
    assert (
        len(list(report_lines(f"{at}failed; type `ndctl submit a.yaml --resume --new`", 60))) == 1
    )


def test_the_state_and_the_labels_have_colours() -> None:
    lines = list(report_lines(status_text(snapshot(recovered(), metrics(1, 20)), UTC), 200))
    assert Piece("RUNNING", {"fg": "green"}) in lines[0]
    labels = {line[0].text.strip(): line[0].look for line in lines[1:] if line}
    assert labels["incident"] == {"fg": "yellow"}
    assert labels["progress"] == {"dim": True}


def on_a_terminal(*arguments: str, **environ: str) -> str:
    """The output of ndctl with a terminal as standard output and error."""
    above, below = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **environ}
    command = [sys.executable, "-m", "orchestrator", *arguments]
    with subprocess.Popen(command, stdout=below, stderr=below, stdin=below, env=env) as process:
        os.close(below)
        data = b""
        while True:
            try:
                chunk = os.read(above, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            data += chunk
        process.wait()
    os.close(above)
    return data.decode()


@pytest.mark.process
def test_errors_are_red_on_a_terminal_unless_the_user_wants_no_colour(tmp_path: Path) -> None:
    # The name is hostile: an escape sequence in it must not reach the terminal.
    said = on_a_terminal("status", "x\x1b[32my", "--run-root", str(tmp_path))
    assert "\x1b[31m\x1b[1merror:\x1b[0m no job" in said
    assert "\x1b[32m" not in said
    plain = on_a_terminal("status", "x", "--run-root", str(tmp_path), NO_COLOR="1")
    assert "\x1b[" not in plain
    assert "error: no job" in plain


def test_help_has_every_command_in_a_section_and_cuts_nothing() -> None:
    shown = [command.name for commands in SECTIONS.values() for command in commands]
    assert sorted(map(str, shown)) == sorted(cli.commands)
    text = ndctl("--help").output
    assert "..." not in text.replace("[ARGS]...", "")
    words = re.sub(r"\s+", " ", text)
    for command in cli.commands.values():
        first = re.sub(r"\s+", " ", str(command.help)).split(". ")[0].rstrip(".")
        assert first in words


def test_an_event_is_wrapped_behind_its_time() -> None:
    time = "2026-11-28 12:55:06 UTC"
    text = f"{time}  agent of host-1 registered from 127.0.0.1 with 2 devices -> start attempt 1"
    first, *rest = list(report_lines(text, 60))
    assert first[0] == Piece(time, {"dim": True})
    shown = ["".join(piece.text for piece in line) for line in (first, *rest)]
    assert " ".join(line.strip() for line in shown) == text
    assert all(len(line) <= 60 for line in shown)
    assert all(line.startswith(" " * len(f"{time}  ")) for line in shown[1:])


def test_rules_are_wrapped_on_a_terminal() -> None:
    text = listed_text(policy_of(None, (), {}))
    shown = ["".join(piece.text for piece in line) for line in report_lines(text, 80)]
    assert "\n".join(shown).split() == text.split()
    rules = shown[: shown.index(next(line for line in shown if line.startswith("Budget")))]
    assert all(len(line) <= 80 for line in rules)
