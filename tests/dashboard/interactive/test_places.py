"""Where each key leads."""

from pathlib import Path

import pytest
from rich.text import Text

from orchestrator.dashboard.interactive.keys import KEYS, footer
from orchestrator.dashboard.interactive.places import Kind, Place, Stack, click, press
from orchestrator.dashboard.screen.grid import ALL_HOSTS
from orchestrator.dashboard.screen.rows import Frame

FLEET = Place(kind="fleet")
JOB = Place(kind="job", job="/runs/a")
HOST = Place(kind="host", job="/runs/a", host="host-1")


def frame(*keys: str, lines: int = 24) -> Frame:
    return Frame(lines=[Text()] * lines, keys=keys, at={n + 2: key for n, key in enumerate(keys)})


def after(stack: Stack, *keys: str, shown: Frame | None = None) -> Stack:
    for key in keys:
        character = key if len(key) == 1 else {"slash": "/", "space": " "}.get(key)
        stack = press(stack, key, character, shown or frame("a", "b", "c"), 24).stack
    return stack


@pytest.mark.parametrize(
    ("place", "chosen", "kind", "host", "rank"),
    [
        (FLEET, "/runs/a", "job", "", None),
        (JOB, "host-1", "host", "host-1", None),
        (JOB, ALL_HOSTS, "hosts", "", None),
        (Place(kind="hosts", job="/runs/a"), "host-1", "host", "host-1", None),
        (HOST, "rank:3", "rank", "host-1", 3),
    ],
)
def test_enter_opens_what_is_selected(
    place: Place, chosen: str, kind: Kind, host: str, rank: int | None
) -> None:
    opened = after((place,), "enter", shown=frame(chosen))[-1]
    assert (opened.kind, opened.job, opened.host, opened.rank) == (kind, "/runs/a", host, rank)


def test_enter_without_anything_to_open_stays() -> None:
    assert after((FLEET,), "enter", shown=frame()) == (FLEET,)
    logs = Place(kind="logs", job="/runs/a")
    assert after((logs,), "enter", shown=frame()) == (logs,)


NAMES = {"?": "question_mark", "⏎": "enter", "/": "slash"}
"""Signs of keys -> what textual calls them."""


@pytest.mark.parametrize("key", [NAMES.get(key.sign, key.sign) for key in KEYS if key.short])
def test_every_key_of_the_footer_does_something(key: str) -> None:
    here = (FLEET, JOB)
    assert after(here, key) != here


def test_a_letter_is_about_what_is_selected() -> None:
    logs = after((JOB,), "l", shown=frame("host-0", "host-1"))[-1]
    assert (logs.kind, logs.host, logs.rank) == ("logs", "host-0", None)
    logs = after((HOST,), "j", "l", shown=frame("rank:2", "rank:3"))[-1]
    assert (logs.host, logs.rank) == ("host-1", 3)
    assert after((FLEET,), "e", shown=frame("/runs/b"))[-1] == Place(kind="events", job="/runs/b")
    assert after((FLEET,), "e", shown=frame()) == (FLEET,)


@pytest.mark.parametrize(
    ("keys", "selected"),
    [
        (("down",), "b"),
        (("j", "j", "j", "j"), "c"),
        (("G",), "c"),
        (("end", "k"), "b"),
        (("pagedown",), "c"),
        (("G", "g"), "a"),
        (("up",), "a"),
    ],
)
def test_arrows_and_vim_keys_select(keys: tuple[str, ...], selected: str) -> None:
    assert after((FLEET,), *keys)[-1].selected == selected


def test_the_selection_stays_on_its_row_when_rows_move() -> None:
    (here,) = after((FLEET,), "down")
    (moved,) = after((here,), "down", shown=frame("x", "y", "a", "b", "c"))
    assert moved.selected == "c"
    (gone,) = after((here,), "down", shown=frame("x", "y"))
    assert gone.selected == "y"


def test_typed_text_filters_and_is_no_command() -> None:
    (typed,) = after((FLEET,), "slash", "q", "l", "space", "x", "backspace")
    assert (typed.needle, typed.typing) == ("ql ", True)
    (kept,) = after((typed,), "enter")
    assert (kept.needle, kept.typing) == ("ql ", False)
    assert after((kept,), "escape")[-1].needle == ""
    assert after((typed,), "escape")[-1] == FLEET
    hosts = after((JOB,), "slash", "7")[-1]
    assert (hosts.kind, hosts.needle) == ("hosts", "7")


def test_q_and_escape_go_back_and_only_q_leaves() -> None:
    assert after((FLEET, JOB), "q") == (FLEET,)
    assert after((FLEET, JOB), "escape") == (FLEET,)
    assert after((FLEET,), "escape") == (FLEET,)
    assert after((FLEET,), "q") == ()


def test_only_y_cancels() -> None:
    asked = after((FLEET, JOB), "c")
    assert asked[-1] == Place(kind="cancel", job="/runs/a")
    for key in ("n", "c", "enter", "escape", "q", "Y", "space"):
        pressed = press(asked, key, key if len(key) == 1 else None, frame(), 24)
        assert (pressed.stack, pressed.cancels) == ((FLEET, JOB), "")
    pressed = press(asked, "y", "y", frame("y"), 24)
    assert (pressed.stack, pressed.cancels) == ((FLEET, JOB), "/runs/a")


def test_y_cancels_nothing_before_the_question_is_on_the_screen() -> None:
    asked = after((FLEET, JOB), "c")
    assert press(asked, "y", "y", frame(), 24).cancels == ""


def test_a_click_selects_and_a_second_one_opens() -> None:
    (chosen,) = click((FLEET,), 3, frame("a", "b"))
    assert chosen.selected == "b"
    assert click((chosen,), 3, frame("a", "b"))[-1] == Place(kind="job", job="b")
    assert click((chosen,), 20, frame("a", "b")) == (chosen,)


def test_stacks_and_incidents_have_keys_of_their_own() -> None:
    stacks = after((Place(kind="stacks", job="/runs/a"),), "s", shown=frame())
    assert stacks[-1].number == 1
    (older,) = after((Place(kind="incident", job="/runs/a"),), "p", "p", "n", shown=frame())
    assert older.number == 1


def test_the_docs_name_every_key() -> None:
    text = (Path(__file__).parents[3] / "docs" / "status.md").read_text()
    for key in KEYS:
        assert f"| `{key.sign}` | {key.words} |" in text


@pytest.mark.parametrize("kind", ["fleet", "job", "host", "rank", "logs", "metrics", "help"])
def test_the_footer_fits_80_cells(kind: Kind) -> None:
    assert footer(kind, is_first=False, width=80).cell_len <= 80
