"""Every page at three sizes. `python -m tests.dashboard.interactive.test_pages` writes the
snapshots: look at the difference."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from orchestrator.dashboard.follow.newest_lines import NewestLines
from orchestrator.dashboard.interactive.content import Reading, sources_of
from orchestrator.dashboard.interactive.pages import Sight, draw_page
from orchestrator.dashboard.interactive.places import Kind, Place, press
from tests.dashboard.interactive.scenes import (
    JOB,
    JOBS,
    PAGES,
    fleet,
    killed_job,
    log_lines,
    many_hosts,
    sight,
    slow_job,
)

SIZES = ((80, 24), (120, 40), (200, 60))
SNAPSHOTS = Path(__file__).with_name("pages.txt")


def text_of(shown: Sight, width: int = 80, height: int = 24) -> str:
    return "\n".join(line.plain for line in draw_page(shown, width, height).lines)


def snapshots() -> str:
    parts = []
    for name, shown in {**PAGES, **JOBS}.items():
        for width, height in SIZES:
            text = "\n".join(line.rstrip() for line in text_of(shown, width, height).split("\n"))
            text = re.sub(r"\n{4,}", lambda gap: f"\n⋮ {len(gap[0]) - 1} empty lines\n", text)
            parts.append(f"=== {name} {width}x{height}\n{text}\n")
    return "".join(parts)


def test_every_page_looks_as_before() -> None:
    assert snapshots() == SNAPSHOTS.read_text()


@pytest.mark.parametrize(("width", "height"), [*SIZES, (40, 10), (12, 3), (1, 1)])
@pytest.mark.parametrize("name", [*PAGES, *JOBS])
def test_a_page_fills_the_screen_exactly(name: str, width: int, height: int) -> None:
    frame = draw_page({**PAGES, **JOBS}[name], width, height)
    assert len(frame.lines) == height
    # Control characters are still there, and take no cell: the edge writes them out.
    assert all(line.cell_len <= width for line in frame.lines)
    assert all("\n" not in line.plain for line in frame.lines)


def test_an_incident_that_is_cut_says_so() -> None:
    long = replace(killed_job().view.incidents[0], cause="it waits for a rank " * 12)
    content = killed_job()
    content = replace(content, view=replace(content.view, incidents=(long,)))
    lines = text_of(sight("job", lambda _: content)).split("\n")
    head = next(at for at, line in enumerate(lines) if "─ incidents" in line)
    end = next(at for at in range(head + 1, len(lines)) if lines[at].startswith("─"))
    assert lines[end - 1].rstrip().endswith("…")
    assert "it waits for a rank" in lines[end - 1]


def test_a_page_says_what_a_straggler_costs_once() -> None:
    page = text_of(sight("rank", lambda _: slow_job(), host="host-1", rank=3), 200)
    assert page.count("which costs 300 tokens/s") == 1


def test_long_lines_are_broken_between_words() -> None:
    words = " ".join(["资源不足 and more words"] * 12)
    content = NewestLines(lines=[words], dropped=0)
    lines = [line.rstrip() for line in text_of(sight("logs", lambda _: content)).split("\n")]
    shown = [line.strip() for line in lines[1:-1] if line.strip()]
    assert " ".join(shown) == words
    assert "the\n         two ends" in "\n".join(
        line.rstrip() for line in text_of(PAGES["help"]).split("\n")
    )


def test_trouble_is_marked_on_every_page_of_a_job() -> None:
    assert "▲ 3" in text_of(JOBS["slow"])
    assert "◆ 3" in text_of(JOBS["hang"])
    shown = replace(JOBS["slow"], place=Place(kind="host", job=JOB, host="host-1"))
    readings = {
        source: JOBS["slow"].readings[sources_of(JOBS["slow"].place)[0]]
        for source in sources_of(shown.place)
    }
    assert "▲ rank 3  straggler" in text_of(replace(shown, readings=readings))


def test_the_numbers_of_gpus_are_on_the_screen() -> None:
    text = text_of(PAGES["job"], 120, 40)
    for words in (
        "MFU 38.5%",
        "peak memory 66.0 GiB",
        "GPU 97% busy",
        "61 °C",
        "680 W",
        "data wait 1.2%",
        "checkpoint pause 0.4 s",
        "effective 85.3%",
    ):
        assert words in " ".join(text.split()), words


def test_a_job_of_2000_hosts_shows_the_one_in_trouble_first() -> None:
    for width, height in SIZES:
        lines = text_of(JOBS["2000 hosts"], width, height).split("\n")
        at = next(n for n, line in enumerate(lines) if "─ ranks" in line)
        named = next(line for line in lines[at + 1 :] if "host-" in line)
        assert "host-0009" in named
        assert "○" in named


def test_the_list_of_hosts_follows_the_selection_and_the_filter() -> None:
    some = many_hosts(500)
    names = [host.name for host in some.view.hosts]
    far = sight("hosts", lambda _: some, selected=names[400])
    assert names[400] in text_of(far)
    assert names[0] not in text_of(far)
    filtered = sight("hosts", lambda _: some, needle="no heartbeat")
    assert draw_page(filtered, 80, 24).keys == [names[9]]
    assert "no host has that text" in text_of(sight("hosts", lambda _: some, needle="zz"))


def test_the_table_of_jobs_says_below_it_what_it_has_no_room_for() -> None:
    shown = sight("fleet", selected="/scratch/alice/experiments/runs/gone")
    assert "/scratch/x does not exist" in text_of(shown)
    needle = sight("fleet", needle="RECOVER")
    assert draw_page(needle, 80, 24).keys == ["/scratch/alice/experiments/runs/recovers"]


def test_a_log_is_followed_until_a_person_scrolls() -> None:
    place = Place(kind="logs", job=JOB)
    shown = sight("logs")
    frame = draw_page(shown, 80, 24)
    assert frame.top == frame.last_top > 0
    (up,) = press((place,), "up", None, frame, 24).stack
    assert up.top == frame.top - 1
    above = draw_page(replace(shown, place=up), 80, 24)
    assert "G: the end" in above.lines[0].plain
    (end,) = press((up,), "G", "G", above, 24).stack
    assert end.top is None


def test_a_log_shows_only_lines_with_the_text() -> None:
    text = text_of(sight("logs", needle="STEP 7 "))
    assert "step 7 loss" in text
    assert "step 8 loss" not in text
    assert "1 line with /STEP 7 of 62" in text


def test_the_incident_page_goes_back_in_time() -> None:
    known = killed_job()
    one = known.view.incidents[0]
    two = replace(known.view, incidents=(one, replace(one, id=2, cause="a second cause")))
    content = replace(known, view=two)
    assert "a second cause" in text_of(sight("incident", lambda _: content))
    older = text_of(sight("incident", lambda _: content, number=1))
    assert "incident 1 of 2" in older
    assert "a second cause" not in older
    assert text_of(sight("incident", lambda _: content, number=99)) == older


def test_what_cannot_be_read_is_said_instead_of_a_page() -> None:
    place = Place(kind="job", job=JOB)
    source = sources_of(place)[0]
    shown = sight("job")
    waiting = replace(shown, readings={source: Reading(busy_s=12.0)})
    assert "reading for 12 s: the file system" in text_of(waiting)
    broken = replace(shown, readings={source: Reading(problem="stale file handle")})
    assert "stale file handle" in text_of(broken)
    late = replace(shown, readings={source: Reading(content=killed_job(), busy_s=12.0)})
    assert "reading for 12 s; what is shown is from before" in text_of(late)


@pytest.mark.parametrize("kind", ["fleet", "job", "hosts", "host", "rank", "incident", "cancel"])
def test_hostile_names_keep_their_place(kind: Kind) -> None:
    evil = "\x1b[2J\u202e[bold]x[/bold]" + "名" * 90
    known = killed_job()
    hosts = tuple(replace(host, name=f"{evil}{n}") for n, host in enumerate(known.view.hosts))
    view = replace(known.view, name=evil, hosts=hosts)
    rows = [replace(row, name=evil, user=evil) for row in fleet().rows]
    content = {"fleet": replace(fleet(), rows=rows)}
    shown = sight(
        kind,
        lambda source: (
            content.get(source.kind)
            or (log_lines(3) if source.kind == "logs" else replace(known, view=view))
        ),
        host=hosts[0].name,
        rank=1,
    )
    for line in draw_page(shown, 80, 24).lines:
        assert cell_len(line.plain) <= 80
        assert "\n" not in line.plain


if __name__ == "__main__":
    SNAPSHOTS.write_text(snapshots())
