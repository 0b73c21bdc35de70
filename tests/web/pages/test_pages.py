import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import (
    Event,
    EvidenceGathered,
    HealthChanged,
    HostStopped,
    RankEvidence,
    RankExited,
    StepReached,
)
from orchestrator.dashboard.describe import describe_text
from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.status import status_rows
from orchestrator.journal.journal import Entry, to_line
from orchestrator.plan.page.markup import element
from orchestrator.web.fleet import Fleet, FleetState, Others, Place
from orchestrator.web.live.static import FILES, static_files
from orchestrator.web.pages import entries
from orchestrator.web.pages.address import Address, job_path
from orchestrator.web.pages.entries import around, newest
from orchestrator.web.pages.job_page import prose
from orchestrator.web.pages.page import Page, Rows, change, whole
from orchestrator.web.pages.render import Renderer, job_at
from tests.cli.test_hostile_text import MARK, SEQUENCES, marked, obeyed
from tests.dashboard.dashboard_story import (
    START,
    StoryClock,
    broken,
    finished,
    hang_judged,
    hung,
    journal,
    recovered,
    restarting,
    silent_program,
    started,
)
from tests.dashboard.test_status import failed
from tests.web.pages.html_page import Found, parsed, parsed_page
from tests.web.served_jobs import HOSTILE, patient, renamed, state_of, written

SCRIPTS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'onmouseover='alert(1)",
    "javascript:alert(1)",
    "</script><svg onload=alert(1)>",
    "</title></textarea><iframe>",
    "]]>&lt;b&amp;#x3c;",
    "\n\ndata: <b>\nevent: change\n\n",
)
MOST_BYTES = 150_000


def led(run_dirs: Sequence[RunDir], at: float = START + 100) -> FleetState:
    """The jobs while they have a leader."""
    places = [Place(run_dir=one) for one in run_dirs]
    return patient(Fleet(lambda: places, StoryClock(at), led=True)).look()


def page_of(state: FleetState, address: Address, renderer: Renderer | None = None) -> Page:
    """The page, as the hub makes it."""
    renderer = renderer or Renderer()
    found = job_at(state, address)
    lines = None if found is None else renderer.lines(found, address.incident)
    return renderer.page(state, address, lines)


def job(name: str, incident: int | None = None) -> Address:
    return Address(name=name, incident=incident)


def hang_with_evidence() -> list[Event]:
    """A hang, its evidence and verdict, and the end of all ranks."""
    torch = '  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce'
    ours = '  File "/job/trainer/step.py", line 71 in agree'
    head = "Current thread 0x1 (most recent call first):"
    spins = (head, '  File "/job/trainer/data/mask.py", line 12 in spin')
    stacks = {"0": (head, torch, ours), "1": (head, torch, ours), "2": (head, torch, ours)}
    ranks = [
        RankEvidence(
            rank=rank,
            pid=1000 + rank,
            process_state="S",
            step=12,
            phase="train",
            age_s=10.0,
            stack=stacks.get(str(rank), spins),
        )
        for rank in range(4)
    ]
    return [
        *hung(),
        HealthChanged(at=START + 61, attempt=1, ranks=((3, 3),), health="silent", age_s=9.0),
        EvidenceGathered(at=START + 61, attempt=1, host="host-0", ranks=tuple(ranks[:2])),
        EvidenceGathered(at=START + 61, attempt=1, host="host-1", ranks=tuple(ranks[2:])),
        hang_judged(at=START + 62, stacks={**stacks, "3": spins}),
        *(
            HostStopped(at=START + 64, attempt=1, host=host, finished=False)
            for host in ("host-0", "host-1")
        ),
    ]


def squeezed(text: str) -> str:
    return " ".join(text.split())


def snapshot_of(state: FleetState) -> Snapshot:
    (one,) = state.jobs
    return one.snapshot


@pytest.mark.parametrize("events", [hang_with_evidence(), restarting(), recovered(), finished()])
def test_an_incident_has_every_fact_of_describe(tmp_path: Path, events: list[Event]) -> None:
    state = led([written(tmp_path / "quickstart", events, range(1, 13))])
    described = describe_text(snapshot_of(state), None).split("\nIncidents\n")[1]
    found = parsed_page(page_of(state, job("quickstart", 1)))
    shown = squeezed(found.text)
    lines = described.partition("\n\n")[0].splitlines()
    assert len(lines) > 6
    for line in lines:
        words = line.strip().removeprefix("| ").removesuffix(":")
        label, _, text = words.partition("  ")
        assert squeezed(text or label) in shown, line


def test_the_row_of_an_incident_has_the_cause_once_and_no_steps_that_none_reported(
    tmp_path: Path,
) -> None:
    twice = page_of(led([written(tmp_path / "a", failed(), range(1, 13))]), job("a"))
    rows = [row.split("</td>") for row in str(twice.blocks["incidents"]["i2"]).split("<tr")]
    cause, decided = rows[-1][3], rows[-1][5]
    assert "ValueError: boom" in cause
    assert "the same error twice" in decided
    assert "boom" not in decided
    silent = page_of(led([written(tmp_path / "b", silent_program(), ())]), job("b"))
    assert "of work lost" not in str(silent.blocks["incidents"])


def test_an_incident_has_the_time_around_it(tmp_path: Path) -> None:
    state = led([written(tmp_path / "quickstart", hang_with_evidence(), range(1, 13))])
    text = parsed_page(page_of(state, job("quickstart", 1))).text
    for words in ("hang in phase train", "verdict never-entered", "collected evidence on host-1"):
        assert words in text
    assert "Timeline" in text


@pytest.mark.parametrize("events", [started(), hang_with_evidence(), broken(), finished()])
def test_a_job_has_every_row_of_status(tmp_path: Path, events: list[Event]) -> None:
    state = led([written(tmp_path / "quickstart", events, range(1, 13))])
    (one,) = state.jobs
    shown = squeezed(parsed_page(page_of(state, job("quickstart"))).text)
    standing = one.snapshot.standing
    assert standing.state in shown
    rows = status_rows(one.snapshot, None, one.time)
    is_over = one.snapshot.seen.run.history.incidents[-1:]
    recovers = not is_over or is_over[0].recovered_after_s is not None
    for said in rows:
        if said.label in ("incident", "ndctl did") and (recovers or standing.state == "SUCCEEDED"):
            continue  # the table of incidents has it
        assert squeezed(said.text) in shown.replace(" : ", ": ") or said.label == "next", said
    assert "ndctl " in shown


def test_trouble_comes_first(tmp_path: Path) -> None:
    state = led([written(tmp_path / "quickstart", hang_with_evidence(), range(1, 13))])
    page = page_of(state, job("quickstart"))
    assert page.title == "quickstart: RECOVERING"
    assert "98% sure" in "".join(page.blocks["trouble"].values())
    assert 'href="/job/quickstart/incident/1"' in "".join(page.blocks["trouble"].values())
    judged = led([written(tmp_path / "judged", renamed(hang_with_evidence()[:-2], "judged"))])
    page = page_of(judged, job("judged"))
    assert "rank 3 did not call" in page.blocks["trouble"]["verdict"]
    first, second = page.blocks["unhealthy"].values()
    assert "host-1" in first
    assert 'class="rank culprit" title="culprit">3<' in first
    assert "host-0" in second
    healthy = page_of(led([written(tmp_path / "fine", started())]), job("fine"))
    assert healthy.blocks["trouble"] == {}


def test_jobs_are_in_the_order_of_list_with_trouble_first(tmp_path: Path) -> None:
    stories = {"runs": started(), "hangs": hang_with_evidence(), "done": finished()}
    dirs = [written(tmp_path / name, renamed(told, name)) for name, told in stories.items()]
    page = page_of(led(dirs), Address())
    found = parsed("".join(page.blocks["jobs"].values()))
    assert [text for text in found.texts if text in stories] == ["hangs", "runs", "done"]
    assert page.title == "3 jobs, 1 in trouble"


def test_old_and_lost_jobs_are_counted_and_shown_on_request(tmp_path: Path) -> None:
    lost = JobRow(
        name="lost",
        user="ada",
        run_dir="/gone/lost",
        backend="slurm",
        hosts=1,
        gpus=8,
        submitted_at=START,
        job=None,
        problem="/gone/lost does not exist",
        gone=True,
    )
    state = led([written(tmp_path / "runs", renamed(started(), "runs"))])
    state = replace(state, others=Others(rows=(lost,), problem="the index is <away>"))
    page = page_of(state, Address())
    text = parsed_page(page).text
    assert "lost" not in text
    assert "1 that ended long ago or are gone" in text
    assert "the index is <away>" in text
    everything = parsed_page(page_of(state, Address(everything=True))).text
    assert "/gone/lost does not exist" in everything
    missing = page_of(state, job("lost"))
    assert "does not exist" in parsed_page(missing).text


def test_a_job_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "bad", started())
    run_dir.journal.write_text('{"v":1,"seq":1,"event":{"kind":"<b>"},"actions":[]}\n')
    page = page_of(state_of([run_dir]), job("bad"))
    assert page.status == 200
    assert "journal line 1" in parsed_page(page).text
    fleet = parsed_page(page_of(state_of([run_dir]), Address())).text
    assert "UNKNOWN" in fleet


def test_a_job_or_an_incident_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    state = led([written(tmp_path / "quickstart", started())])
    for address in (job("<b>other"), job("quickstart", 7), Address(name="-", digest="0" * 12)):
        page = page_of(state, address)
        assert page.status == 404
        parsed_page(page)


def test_jobs_of_one_name_are_a_choice(tmp_path: Path) -> None:
    dirs = [written(tmp_path / folder / "quickstart", started()) for folder in ("a", "b")]
    state = led(dirs)
    page = page_of(state, job("quickstart"))
    assert page.status == 300
    for run_dir in dirs:
        path = job_path(run_dir.path, alone=False)
        assert path in parsed_page(page).values("href")
        digest = path.partition("?in=")[2]
        one = page_of(state, Address(name="quickstart", digest=digest))
        assert str(run_dir.path) in parsed_page(one).text


def test_addresses_name_the_job_and_survive_any_name() -> None:
    assert job_path("/runs/llama-70b", alone=True) == "/job/llama-70b"
    assert job_path("/runs/llama-70b", alone=True, incident=3) == "/job/llama-70b/incident/3"
    for name in ("a b", "..", "ä", "x\ud800", "%2f", "<b>", "-"):
        path = job_path(f"/runs/{name}", alone=True)
        assert path.startswith(("/job/-?in=", "/job/-")), path
        path.encode("ascii")


# Hostile text


def marked_lines() -> Mapping[str, Sequence[bytes]]:
    """Journals with a mark in each text."""
    stories = {"hung": hang_with_evidence(), "done": finished(), "died": [*started(), died()]}
    return {name: [marked(entry) for entry in journal(told)] for name, told in stories.items()}


@pytest.fixture(scope="module")
def template() -> Mapping[str, Sequence[bytes]]:
    return marked_lines()


def died() -> RankExited:
    return RankExited(
        at=START + 30,
        attempt=1,
        rank=1,
        host="host-0",
        exit_code=1,
        signal=None,
        step=24,
        stopped=False,
        detected_after_s=0.2,
        error=None,
        log_tail=("step 24 loss 3.1", "RuntimeError: no"),
    )


def hostile_state(
    template: Mapping[str, Sequence[bytes]], root: Path, text: str
) -> tuple[FleetState, list[str]]:
    in_json = json.dumps(text)[1:-1].encode()
    dirs = []
    name = "".join(char for char in text if char not in "/\0")[:40]
    for story, lines in template.items():
        try:
            path = root / f"{story}{name}"
            path.mkdir(parents=True)
        except (UnicodeEncodeError, OSError):  # no file can have this name
            path = root / story
            path.mkdir(parents=True)
        whole_file = b"".join(line.replace(MARK.encode(), in_json) for line in lines)
        (path / "journal.jsonl").write_bytes(whole_file)
        dirs.append(RunDir(path))
    return led(dirs), [one.path.name for one in dirs]


@pytest.mark.parametrize("text", [*SCRIPTS, *SEQUENCES, HOSTILE])
def test_text_of_jobs_is_never_markup(
    template: Mapping[str, Sequence[bytes]], tmp_path: Path, text: str
) -> None:
    state, names = hostile_state(template, tmp_path, text)
    plain = bool(set("<>\"'") & set(text))
    addresses = [Address(), Address(everything=True), job(f"no {text}")]
    for name in names:
        addresses += [job(name), job(name, 1)]
    shown = 0
    for address in addresses:
        page = page_of(state, address)
        found = parsed_page(page)
        shown += text.partition("\n")[0] in found.text
        _check_rows(page, found)
    if plain and "\n" not in text:
        assert shown > len(names)  # it is there, as text


def _check_rows(page: Page, found: Found) -> None:
    message = whole(page).decode("ascii")
    assert "\n" not in message
    body = json.loads(message)
    for rows in body["blocks"].values():
        assert list(rows["set"]) == rows["order"]
        for key, html in rows["set"].items():
            keys = parsed(html).values("data-key")
            assert keys[0] == key
            assert not obeyed(html)
    assert not obeyed(found.text)
    for link in found.values("href"):
        assert link.startswith(("/", "data:,")), link


# Changes


def applied(before: Mapping[str, Any], message: bytes) -> dict[str, dict[str, str]]:
    """What page.js does with a message."""
    after = {name: dict(rows) for name, rows in before.items()}
    for name, rows in json.loads(message)["blocks"].items():
        known = after.setdefault(name, {})
        known.update(rows.get("set", {}))
        if "order" in rows:
            after[name] = {key: known[key] for key in rows["order"]}
    return after


some_rows = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from(["x", "<y>", "z\n"])),
    unique_by=lambda pair: pair[0],
).map(lambda pairs: {key: element("p", text, data_key=key) for key, text in pairs})
some_blocks = st.tuples(some_rows, some_rows).map(
    lambda both: dict(zip(("one", "two"), both, strict=True))
)


def page_with(blocks: Mapping[str, Rows]) -> Page:
    return Page(title="t", blocks=blocks, layout=lambda blocks: element("main"))


@given(some_blocks, some_blocks)
@settings(max_examples=100)
def test_a_change_makes_the_new_page_of_the_old_one(
    old: Mapping[str, Rows], new: Mapping[str, Rows]
) -> None:
    message = change(page_with(old), page_with(new))
    after = applied(old, message) if message else old
    assert {name: list(rows.items()) for name, rows in after.items()} == {
        name: list(rows.items()) for name, rows in new.items()
    }
    assert (message == b"") == (
        [list(rows.items()) for rows in old.values()]
        == [list(rows.items()) for rows in new.values()]
    )
    assert applied({}, whole(page_with(new))) == new


def test_a_step_changes_a_few_rows_of_a_large_job(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "large", renamed(started(2000, 8), "large"), range(1, 5))
    fleet = Fleet(lambda: [Place(run_dir=run_dir)], StoryClock(START + 100), led=True)
    patient(fleet)
    renderer = Renderer()
    before = page_of(fleet.look(), job("large"), renderer)
    assert len(before.blocks["hosts"]) == 2000
    late = HealthChanged(at=START + 90, attempt=1, ranks=((9, 9),), health="silent", age_s=9.0)
    seq = len(started(2000, 8)) + 1
    with run_dir.journal.open("ab") as file:
        file.write(to_line(Entry(seq=seq, event=late, actions=())))
    after = page_of(fleet.look(), job("large"), renderer)
    body = json.loads(change(before, after))
    assert list(body["blocks"]["hosts"]["set"]) == ["h1"]
    assert "order" not in body["blocks"]["hosts"]
    assert len(change(before, after)) < 4000
    assert len(whole(after)) < 400_000


# Lines of the journal


def test_the_newest_lines_and_those_around_an_incident_are_found(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", finished(), range(1, 25))
    all_lines = journal(finished())
    assert newest(run_dir.journal, 1000).entries == tuple(all_lines)
    assert newest(run_dir.journal, 3).entries == tuple(all_lines[-3:])
    assert not newest(run_dir.journal, 3).complete
    assert newest(run_dir.journal, 3, lines=5).entries == tuple(all_lines[2:5])
    (incident,) = snapshot_of(led([run_dir])).seen.run.history.incidents
    found = around(run_dir.journal, incident, 1000)
    assert found.complete
    assert found.entries[0].seq == 1
    assert len(around(run_dir.journal, incident, 2).entries) == 2


def test_an_old_incident_is_found_in_a_long_journal(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", finished())
    (incident,) = snapshot_of(led([run_dir])).seen.run.history.incidents
    (short,) = (around(run_dir.journal, incident, 1000),)
    seq, late = len(finished()), START + 100
    with run_dir.journal.open("ab") as file:
        for number in range(1, 100_000):
            event = StepReached(
                at=late + number, attempt=2, step=60, loss=1.0, tokens_per_second=1.0
            )
            file.write(to_line(Entry(seq=seq + number, event=event, actions=())))
    assert run_dir.journal.stat().st_size > entries.MOST_BYTES
    assert around(run_dir.journal, incident, 1000).entries == short.entries
    much_later = replace(incident, at=late + 90_000)
    found = around(run_dir.journal, much_later, 1000)
    assert [entry.event.at for entry in found.entries][:2] == [late + 89_940, late + 89_941]
    assert found.complete


def test_lines_are_read_back_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = written(tmp_path / "quickstart", finished())
    size = run_dir.journal.stat().st_size
    monkeypatch.setattr(entries, "MOST_BYTES", size // 2)
    found = newest(run_dir.journal, 1000)
    assert 0 < len(found.entries) < len(finished())
    assert not found.complete
    assert "Older events: " in parsed_page(page_of(led([run_dir]), job("quickstart"))).text


def test_a_torn_and_a_damaged_line_are_left_out(tmp_path: Path) -> None:
    run_dir = written(tmp_path / "quickstart", started())
    whole_file = run_dir.journal.read_bytes()
    run_dir.journal.write_bytes(b"\0\0junk\n" + whole_file + b'{"v":1,"seq":99')
    assert newest(run_dir.journal, 1000).entries == tuple(journal(started()))


# Files


def test_commands_in_a_sentence_are_code_and_a_single_backtick_is_text() -> None:
    said = prose("guesses: `ndctl calibrate` measures <them>")
    assert "".join(said) == (
        "<span>guesses: </span><code>ndctl calibrate</code><span> measures &lt;them&gt;</span>"
    )
    assert prose("a ` b") == ["<span>a ` b</span>"]


def test_static_files_are_small_and_load_nothing_from_elsewhere() -> None:
    contents = static_files().contents
    assert sum(map(len, contents.values())) <= MOST_BYTES
    for name, data in contents.items():
        text = data.decode()
        assert "http" not in text.replace("https://github.com/leeoniya/uPlot", ""), name
        assert "eval(" not in text
        assert "@import" not in text
        assert "url(" not in text


def test_everything_vendored_has_its_license() -> None:
    import orchestrator.web

    folder = Path(orchestrator.web.__file__).parent / "static"
    served = {str(Path(path).relative_to("static")) for path in FILES.values()}
    there = {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}
    assert there - served == {"vendor/uplot/LICENSE.txt"}
    assert "MIT License" in (folder / "vendor" / "uplot" / "LICENSE.txt").read_text()
