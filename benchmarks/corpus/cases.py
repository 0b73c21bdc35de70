"""Reads the cases of `corpus/`."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

CORPUS = Path(__file__).parents[2] / "corpus"
ROUNDS = "rounds"
"""Labelled before any rule met them: which of them were right on that day is in
benchmarks/results/measurements.md."""
HELD_OUT_OF = 5
HALF_KEPT = ("rounds/15.yaml", "rounds/16.yaml", "rounds/17.yaml")
"""Rounds of which one half is scored but never listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An end of a rank, and what is right to say of it."""

    name: str
    source: str
    about: str
    accepts: tuple[str, ...]
    """Names of classes, or patterns of names as xid-48-*; the first is the best."""
    generic: tuple[str, ...]
    scopes: tuple[str, ...]
    excludes_host: bool | Literal["either"]
    """`either`: careful operators would differ, so it counts for neither column of hosts."""
    log: str
    kernel: str
    exit_code: int | None
    signal: str | None
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpCase:
    """A folder of dumps, and which ranks are to be named."""

    name: str
    source: str
    about: str
    culprits: frozenset[int]
    kinds: tuple[str, ...]
    or_none: bool
    """Evidence is thin, so that to name nobody is right as well."""
    folder: Path


def is_held_out(name: str) -> bool:
    """By the name alone, so that nobody chooses."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_OF == 0


def is_kept(name: str, file: str) -> bool:
    """Whether the case is of a round's half whose misses nobody reads."""
    return file in HALF_KEPT and int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 == 1


def part_of(name: str) -> str:
    return "heldout" if is_held_out(name) else "development"


def read_cases(part: str, root: Path = CORPUS) -> Iterator[Case]:
    for path in sorted((root / part).glob("*.yaml"), key=_in_order):
        for fields in _read(path)["cases"]:
            yield _case(fields, f"{part}/{path.name}")


def _read(path: Path) -> Any:
    """By libyaml, which reads the corpus in a tenth of the time."""
    return yaml.load(path.read_text(), yaml.CSafeLoader)


def _in_order(path: Path) -> tuple[int, str]:
    """Rounds have numbers for names."""
    return len(path.stem) if path.stem.isdecimal() else 0, path.stem


def read_dump_cases(part: str, root: Path = CORPUS) -> Iterator[DumpCase]:
    for fields in _read(root / "dumps" / "cases.yaml")["cases"]:
        if part_of(fields["name"]) == part:
            yield DumpCase(
                name=fields["name"],
                source=fields["source"],
                about=fields["about"],
                culprits=frozenset(fields["culprits"]),
                kinds=tuple(fields["kinds"]),
                or_none=fields.get("or_none", False),
                folder=root / "dumps" / fields["name"],
            )


def _case(fields: dict[str, Any], file: str) -> Case:
    scope = fields["scope"]
    return Case(
        name=fields["name"],
        source=fields["source"],
        about=fields["about"],
        accepts=tuple(fields["accepts"]),
        generic=tuple(fields.get("generic", ())),
        scopes=(scope,) if isinstance(scope, str) else tuple(scope),
        excludes_host=fields["excludes_host"],
        log=fields.get("log", ""),
        kernel=fields.get("kernel", ""),
        exit_code=fields.get("exit_code"),
        signal=fields.get("signal"),
        file=file,
    )
