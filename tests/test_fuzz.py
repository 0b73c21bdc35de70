"""Thousands of damaged inputs, drawn from a seed: each is read, or refused with an error of ndctl.
No other exception occurs."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.contract.messages.events import CheckpointSaved, RankExited
from orchestrator.contract.messages.rank_messages import from_bytes, to_bytes
from orchestrator.errors import NdctlError, SpecError
from orchestrator.host_strikes import lines_in
from orchestrator.inventory.file import load_inventory
from orchestrator.journal import journal
from orchestrator.load import load_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
SPECS = [path.read_text() for path in sorted((ROOT / "examples").glob("*.yaml"))]
INVENTORIES = [path.read_text() for path in sorted((ROOT / "examples/inventories").glob("*.yaml"))]
SAVED = to_bytes(CheckpointSaved(attempt=1, step=3))
ENDED = to_bytes(RankExited(attempt=1, rank=0, exit_code=None, signal=9))
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**40,
    1e300,
    float("nan"),
    float("-inf"),
    "",
    "\x00",
    "\x1b]0;owned\x07",
    "\u202e\u2066",
    "\ud800",
    "x" * 100_000,
    "../../etc/passwd",
    "{stdlib",
    "[" * 10_000,
    [],
    {},
    [[[[]]]],
    {"": None},
    {None: 1},
    {1: {2: {3: 4}}},
    {"a": float("inf")},
)
"""Values that no author of a spec writes."""
BYTES = (b"\x00", b"\xff\xfe", b"\x1b[2J", b"\t", b"[" * 2_000, b"&a *a", b"!!python/none x", b"\r")


def damaged_value(data: Any, draw: random.Random) -> Any:
    """`data` with one value, key or element replaced, removed, repeated or wrapped."""
    if isinstance(data, dict) and data and draw.random() < 0.8:
        key = draw.choice(list(data))
        match draw.randrange(5):
            case 0:
                return {k: v for k, v in data.items() if k != key}
            case 1:
                return {**data, draw.choice(("", "x", "\x1b[2J", "\ud800", 7)): data[key]}
            case _:
                return {**data, key: damaged_value(data[key], draw)}
    if isinstance(data, list) and data and draw.random() < 0.8:
        at = draw.randrange(len(data))
        return [*data[:at], damaged_value(data[at], draw), *data[at:]]
    return draw.choice((*HOSTILE, [data], {"a": data}, str(data)))


def damaged_document(text: str, draw: random.Random) -> str:
    """A document with damaged values or damaged bytes."""
    if draw.random() < 0.7:
        data = yaml.safe_load(text)
        for _ in range(draw.randint(1, 3)):
            data = damaged_value(data, draw)
        return yaml.dump(data, allow_unicode=draw.random() < 0.5)
    return damaged_bytes(text.encode(), draw).decode(errors="surrogateescape")


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """`data` with some bytes removed, replaced or added."""
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(data) + 1), draw.randrange(20)
        inserted = draw.choice((*BYTES, draw.randbytes(draw.randrange(8)), b""))
        data = data[:at] + inserted + data[at + length :]
    return data


@pytest.mark.parametrize(
    ("load", "texts", "count"),
    [(load_spec, SPECS, 2_000), (load_inventory, INVENTORIES, 1_000)],
    ids=["specs", "inventories"],
)
def test_a_damaged_document_is_read_or_refused_with_an_error(
    load: Callable[[str, str], object], texts: list[str], count: int
) -> None:
    refused = 0
    for seed in range(count):
        draw = random.Random(seed)
        text = damaged_document(draw.choice(texts), draw)
        try:
            load(text, "fuzzed.yaml")
        except SpecError as exc:
            refused += bool(exc.message)
        except Exception as exc:  # any other exception is a defect; the message has the seed
            raise AssertionError(f"seed {seed}: {text[:2_000]!r}") from exc
    assert count / 3 < refused < count


@pytest.mark.parametrize("valid", [SAVED, ENDED], ids=["saved", "ended"])
def test_a_damaged_datagram_is_a_value_error(valid: bytes) -> None:
    refused = 0
    for seed in range(1_500):
        data = damaged_bytes(valid, random.Random(seed))
        try:
            from_bytes(data)
        except (ValueError, TypeError):
            refused += 1
        except BaseException as exc:
            raise AssertionError(f"seed {seed}: {data!r}") from exc
    assert refused > 1_000


def test_a_damaged_line_of_the_strikes_file_is_skipped(tmp_path: Path) -> None:
    line = b'{"host":"node1","at":1700000000.0,"job":"j","cause":"gpu-lost","evidence":[]}\n'
    for seed in range(1_500):
        lines_in(damaged_bytes(line, random.Random(seed)) + line)


def test_a_damaged_journal_ends_a_replay_with_an_error() -> None:
    tick = b'{"at":1.0,"event":{"kind":"Tick","at":1.0},"actions":[]}\n'
    for seed in range(375):
        draw = random.Random(seed)
        with contextlib.suppress(NdctlError):
            list(journal.parse(damaged_bytes(tick * draw.randint(1, 5), draw)))
