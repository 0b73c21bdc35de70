"""No command prints terminal sequences, whatever text is in specs, journals, logs, metrics, strikes
and dumps.

A job with every kind of event is written to disk once. Each text that a program or a person could
have written contains a mark. Each example replaces the mark by other characters.
"""

import ast
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from orchestrator import cli as command_line
from orchestrator import host_strikes
from orchestrator.contract.codec import Invalid
from orchestrator.contract.visible import visible
from orchestrator.dashboard.console import VisibleConsole
from orchestrator.journal.journal import Entry, from_line, to_line
from tests.dashboard.dashboard_story import broken, finished, hung, journal
from tests.jobs_on_disk import SPEC

MARK = "MARKED"
FAULT = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: controls, formats, surrogates, line and paragraph separators."""
SEQUENCES = (
    "\x1b[2J\x1b[1;1H",
    "\x1b]0;owned\x07",
    "\x1b]52;c;ZXZpbA==\x1b\\",
    "\x1bP+q544e\x1b\\",
    "\x9b31m\x9d0;owned\x9c",
    "\x1b[31mred\x1b[0m",
    "\u202egnp.exe\u2066\u2069",
    "a\u2028b\u2029c\u0085d",
    "\u200b\u200d\ufeff\u061c",
    "\ud800\udfff",
    "\x00\x08\x0b\x7f\r",
    "\U000e0041\U000e007f",
)


def hostile() -> st.SearchStrategy[str]:
    hidden = st.characters(categories=HIDDEN)  # type: ignore[arg-type]
    either = st.one_of(st.sampled_from(SEQUENCES), hidden, st.characters())
    return st.lists(either, min_size=1, max_size=8).map("".join)


def obeyed(text: str) -> set[str]:
    """The characters of `text` that control a terminal or are invisible."""
    return {char for char in text if unicodedata.category(char) in HIDDEN and char not in "\n\t"}


@given(hostile())
def test_visible_text_has_no_terminal_sequences(text: str) -> None:
    shown = visible(text)
    assert not obeyed(shown)
    assert "\t" not in shown
    assert visible(shown) == shown
    assert "\n" not in visible(text, keep="")
    shown.encode()


SHOWN = st.characters(exclude_categories=HIDDEN)  # type: ignore[arg-type]


@given(st.text(SHOWN))
def test_text_without_hidden_characters_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_every_hidden_character_of_unicode_is_written_out() -> None:
    left = {
        char
        for char in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(char) in HIDDEN and char != "\n" and char in visible(char)
    }
    assert left == set()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\x1b[31mred\x1b[0m, \x9b1mbold\x9bm", "red, bold"),
        ("10%\r20%\r\n", "10%\\r20%\n"),
        ("a\tb", "a    b"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_how_hidden_characters_are_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(hostile())
def test_text_drawn_by_rich_has_no_terminal_sequences(text: str) -> None:
    console = VisibleConsole(width=80, file=open(os.devnull, "w"), record=True)  # noqa: SIM115, PTH123
    with console.file:
        console.print(text, markup=False)
        console.print(Text(text))
    assert not obeyed(console.export_text())


# Commands


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("words", nargs=-1)
def as_the_user_runs_it(words: Sequence[str]) -> None:
    was, sys.argv = sys.argv, ["ndctl", *words]
    try:
        command_line.main()
    finally:
        sys.argv = was


def leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each text in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        if isinstance(item, str):
            yield value, key
        elif isinstance(item, (dict, list)):
            yield from leaves(item)


MEANT = ("backend", "incarnation", "run_dir")
"""Fields whose text the program uses, so it must stay valid."""


def marked(entry: Entry) -> bytes:
    """The journal line with the mark in every text that may be any text."""
    line = json.loads(re.sub(rb"\bhost-\d\b", rb"\g<0>%s" % MARK.encode(), to_line(entry)))
    for holder, key in leaves(line):
        before = holder[key]
        if not before or MARK in before or key in MEANT:
            continue
        holder[key] = before + MARK
        try:
            from_line(json.dumps(line).encode())
        except (ValueError, Invalid):
            holder[key] = before
    return json.dumps(line).encode() + b"\n"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run root, a spec, an inventory and a folder of dumps, all with the mark."""
    root = tmp_path_factory.mktemp("template")
    for name, events in {"broken": broken(), "finished": finished(), "hung": hung()}.items():
        run_dir = root / name
        (run_dir / "logs" / "attempt-1" / "host-0").mkdir(parents=True)
        entries = journal(events)
        (run_dir / "journal.jsonl").write_bytes(b"".join(map(marked, entries)))
        for log in ("attempt-1/host-0/rank-0.log", "attempt-1/host-0/torchrun.log"):
            (run_dir / "logs" / log).write_text(f"a line {MARK}\n{FAULT} {MARK}\n")
        (run_dir / "logs" / "agent-host-0.log").write_text(f"2026-01-01 00:00:00 {MARK}\n")
        metric = {"attempt": 1, "step": 3, "loss": 3.5, "time": 1_700_000_010.0, "note": MARK}
        (run_dir / "metrics.jsonl").write_text(json.dumps(metric) + "\n" + MARK + "\n")
        (run_dir / "leader.json").write_text(json.dumps({"launch": MARK, "address": MARK}))
        (run_dir / "fence.json").write_text(json.dumps({"leader": MARK, "attempt": MARK}))
        (run_dir / "state.json").write_text(json.dumps({"v": MARK}) + "\n")
    write_strikes(root)
    write_dumps(root / "dumps")
    spec = SPEC.read_text()
    (root / "key.yaml").write_text(f'{spec}\n"x{MARK}": 1\n')
    (root / "escaped-key.yaml").write_text(f'{spec}\n"x{MARK}": {{"{MARK}": 1}}\n')
    # The dash: many a text is a name, and the job would run.
    (root / "escaped-value.yaml").write_text(spec.replace("name: e2e", f'name: "-{MARK}"'))
    (root / "value.yaml").write_text(spec.replace("name: e2e", f'name: "-{MARK}"'))
    (root / "broken.yaml").write_text(f"name: [{MARK}")
    (root / "escaped-inventory.yaml").write_text(f'hosts: [{{"{MARK}": 1, name: "{MARK}"}}]\n')
    (root / "inventory.yaml").write_text(f'hosts: [{{"{MARK}": 1, name: "{MARK}"}}]\n')
    return root


def write_strikes(root: Path) -> None:
    strike = host_strikes.Strike(
        at=1_700_000_000.0,
        host=f"node{MARK}",
        job=MARK,
        attempt=1,
        kind=MARK,
        cause=MARK,
        evidence=(MARK,),
    )
    pin = host_strikes.Pinned(at=strike.at, host=f"pin{MARK}", use="never", by=MARK, reason=MARK)
    for cluster in ("gpu", host_strikes.LOCAL):
        path = host_strikes.path_of(root, cluster)
        path.parent.mkdir(exist_ok=True)
        for line in (strike, replace(strike, at=strike.at + 60, kind="hang"), pin):
            host_strikes.record(path, line)


def write_dumps(folder: Path) -> None:
    """Write flight recorder dumps of NCCL as JSON, of two ranks that called different
    operations."""
    folder.mkdir()
    for rank in range(2):
        entry = {
            "frames": [{"name": MARK, "filename": MARK, "line": 1}],
            "record_id": 0,
            "pg_id": 0,
            "process_group": ["0", MARK],
            "collective_seq_id": 1,
            "p2p_seq_id": 0,
            "op_id": 1,
            "profiling_name": f"nccl:{MARK}{rank}",
            "time_created_ns": 1,
            "input_sizes": [[2 + rank]],
            "input_dtypes": [MARK],
            "output_sizes": [[2]],
            "output_dtypes": [MARK],
            "state": "scheduled",
            "is_p2p": False,
            "retired": False,
            "timeout_ms": 600000,
        }
        config = {"0": {"name": MARK, "desc": MARK, "ranks": "[0, 1]"}}
        body = {"version": MARK, "entries": [entry], "pg_config": config, "pg_status": {}}
        (folder / f"flight-{rank}.json").write_text(json.dumps(body))
    (folder / "rank-1.stacks").write_text(f'Thread 1 {MARK}\n  File "{MARK}", line 3 in {MARK}\n')
    (folder / f"flight-7-{MARK}").write_text(MARK)


def put(template: Path, into: Path, text: str) -> None:
    """A copy of the template in which `text` replaces the mark, escaped in JSON and raw
    elsewhere."""
    in_json = json.dumps(text)[1:-1].encode()
    raw = text.encode(errors="surrogateescape" if _is_escaped(text) else "surrogatepass")
    for path in (one for one in template.rglob("*") if one.is_file()):
        name = path.name.replace(MARK, "".join(c for c in text if c not in "/\0")[:20])
        try:
            copy = into / path.relative_to(template).with_name(name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            is_json = path.suffix in (".json", ".jsonl") or path.name.startswith("escaped")
            by = in_json if is_json else raw
            copy.write_bytes(data.replace(MARK.encode(), by))
        except UnicodeEncodeError:
            continue  # no file can have this name


def _is_escaped(text: str) -> bool:
    return all("\udc80" <= char <= "\udcff" for char in text if "\ud800" <= char <= "\udfff")


def commands(root: Path, text: str) -> Iterator[tuple[str, ...]]:
    argument = text.replace("\0", "")
    for name in ("broken", "finished", "hung"):
        for verb in ("status", "describe", "events", "diagnose"):
            yield (verb, name)
            yield (verb, name, "--json")
        yield ("logs", name)
        yield ("dashboard", name)
        yield ("report", name)
    yield ("logs", "broken", "--agents")
    yield ("list",)
    yield ("list", "--json")
    yield ("hosts", "--all")
    yield ("hosts", "--all", "--json")
    yield ("hosts", "clear", f"node{argument}")
    yield ("hosts", "pin", "node3", "--never", "--reason", argument, "--cluster", "gpu")
    yield ("hosts", "unpin", f"pin{argument}")
    log = str(root / "broken" / "logs" / "attempt-1" / "host-0" / "rank-0.log")
    yield ("classify", log, "--kernel", log)
    yield ("classify", log, "--exit-code", "1", "--json")
    yield ("diagnose", str(root / "dumps"))
    yield ("diagnose", str(root / "dumps"), "--json")
    for spec in ("key.yaml", "value.yaml", "broken.yaml", "escaped-key.yaml", "escaped-value.yaml"):
        for verb in ("validate", "plan", "submit", "render", "doctor", "policy explain oom"):
            yield (*verb.split(), str(root / spec))
    yield ("validate", str(SPEC), "--set", f"x{argument}={argument}")
    yield ("validate", str(SPEC), "--set", f"name={argument}", "--json")
    yield ("inventory", "--inventory", str(root / "inventory.yaml"))
    yield ("inventory", "--inventory", str(root / "escaped-inventory.yaml"))
    yield ("status", argument)
    yield ("cancel", argument)
    yield ("policy", "explain", argument)
    yield ("simulate", "--faults", argument)
    yield ("cancel", "finished")
    yield (argument,)


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(text=hostile())
def test_no_command_shows_terminal_sequences(
    template: Path, tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    every_verb(template, tmp_path_factory.mktemp("run"), text)


@pytest.mark.parametrize("text", SEQUENCES)
def test_no_command_passes_on_terminal_sequences(template: Path, tmp_path: Path, text: str) -> None:
    every_verb(template, tmp_path, text)


def every_verb(template: Path, root: Path, text: str) -> None:
    put(template, root, text)
    try:
        for words in commands(root, text):
            check(run(root, *words), words)
    finally:
        shutil.rmtree(root)


BODIES = {
    "deep": b"[" * 200_000,
    "deep objects": b'{"strike":' * 50_000 + b"1" + b"}" * 50_000,
    "list": b"[]",
    "null": b"null",
    "number": b"1e999",
    "digits": b"1" * 5_000,
    "zeros": b"\0" * 5_000,
    "bytes": bytes(range(256)) * 10,
    "surrogate": b'"\\ud800"',
    "empty": b"",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "leader.json", "fence.json", "state.json", "launch.json", "more"]
)
def test_no_file_of_a_run_directory_causes_a_traceback(
    template: Path, tmp_path: Path, name: str, body: bytes
) -> None:
    put(template, tmp_path, "x")
    run_dir = tmp_path / "hung"
    if name == "more":
        with (run_dir / "journal.jsonl").open("ab") as journal:
            journal.write(body + b"\n")
    else:
        (run_dir / name).write_bytes(body + b"\n")
    for words in (*OF_A_JOB, ("list",)):
        check(run(tmp_path, *words), words)


OF_A_JOB = [
    (verb, "hung") for verb in ("status", "describe", "events", "diagnose", "dashboard", "cancel")
]


def run(root: Path, *words: str) -> Result:
    return CliRunner(env={"NDCTL_RUN_ROOT": str(root)}).invoke(as_the_user_runs_it, ["--", *words])


@pytest.mark.parametrize("at", ["1e300", "1e14", "-1", "1" + "0" * 400])
def test_a_journal_line_with_an_impossible_time_is_reported(
    template: Path, tmp_path: Path, at: str
) -> None:
    put(template, tmp_path, "x")
    path = tmp_path / "hung" / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1700000060.0", at.encode()))
    for words in OF_A_JOB[:4]:
        done = run(tmp_path, *words)
        check(done, words)
    assert "journal line" in run(tmp_path, "status", "hung").stderr


def test_journal_lines_lost_to_zeros_are_reported(template: Path, tmp_path: Path) -> None:
    """A machine that loses power may leave such a file. The view alone would look like a crash."""
    put(template, tmp_path, "x")
    path = tmp_path / "finished" / "journal.jsonl"
    data = path.read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    path.write_bytes(data[:half] + b"\0" * (len(data) - half))
    kept = data[:half].count(b"\n")
    for verb in ("status", "describe", "events"):
        said = run(tmp_path, verb, "finished").stderr
        assert f"after line {kept:,}, of 2023-11-14" in said
        assert f"the last {len(data) - half:,} of its {len(data):,} bytes are zeros" in said
    path.write_bytes(data[: half + 20])  # a torn line, as a crash leaves it
    assert run(tmp_path, "status", "finished").stderr == ""


def check(done: Result, words: Sequence[str]) -> None:
    shown = done.stdout_bytes.decode() + done.stderr_bytes.decode()
    assert not obeyed(shown), f"{words}: {shown!r}"
    assert done.exception is None or isinstance(done.exception, SystemExit), f"{words}: {shown}"
    assert "Traceback" not in shown, words
    if "--json" in words and done.exit_code == 0:
        for line in done.stdout.splitlines() if words[0] == "events" else [done.stdout]:
            json.loads(line, parse_constant=pytest.fail)


def test_the_command_line_prints_only_through_one_function() -> None:
    """Any other way would print text unchanged."""
    ways = {"echo", "secho", "print", "Console"}
    calls = [
        (path.name, call.lineno)
        for folder in ("cli", "app", "dashboard")
        for path in (Path(command_line.__file__).parents[1] / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and name_called(call.func) in ways
        if (path.name, name_called(call.func)) not in ALLOWED
    ]
    assert calls == []
    assert issubclass(VisibleConsole, Console)


ALLOWED = {
    ("console.py", "print"),
    ("options.py", "echo"),
    ("live.py", "print"),
    ("follow_loop.py", "print"),
    ("follow.py", "print"),
}


def name_called(called: ast.expr) -> str:
    match called:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
