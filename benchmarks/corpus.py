"""How well logs, kernel lines and dumps are classified that no rule was written from.

    python -m benchmarks.corpus [--heldout] [--misses | --heldout-misses]

Reads the cases of `corpus/`: the development set and the later rounds, or with `--heldout` the
fifth of the first round that is kept apart. The exit code is 0 if each of these is within its
limits, otherwise 1. A log is `right` if the case accepts its class and scope, and `generic` if the
class is not wrong but says too little. A broken host is `missed` if it would be used again. A
healthy host is `excluded` if it would not.

`--misses` lists each case that is not right, but never a held-out case: a score is worthless once
rules were fixed with these cases in view. `--heldout-misses` is for the end.
"""

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from orchestrator.app.classification import Classification, classify_log
from orchestrator.app.diagnose_job import diagnose_folder
from orchestrator.diagnosis.hang.verdicts import Diagnosis
from orchestrator.errors import NdctlError

CORPUS = Path(__file__).parent.parent / "corpus"
ROUNDS = "rounds"
"""Labelled before any rule met them: which of them were right on that day is in
benchmarks/results/measurements.md."""
HELD_OUT_OF = 5
LEAST_RIGHT = 0.95
MOST_MISSED = 0.02
"""Of the hosts that are broken."""
UNKNOWN = "unknown"
"""What a case calls the class where nothing is known."""


class Grade(StrEnum):
    RIGHT = "right"
    GENERIC = "generic"
    WRONG = "wrong"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    name: str
    file: str
    grade: Grade
    expected: str
    got: str
    line: str | None = None
    """Which line of the log decided."""
    broken: bool = False
    healthy: bool = False
    missed: bool = False
    excluded: bool = False
    """Of dumps: a rank was named that is not to blame."""


def is_held_out(name: str) -> bool:
    """By the name alone, so that nobody chooses."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_OF == 0


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


def grade(case: Case, found: Classification) -> Grade:
    name = found.class_ or UNKNOWN
    # Where nothing is known there is no scope either, which is not a second mistake.
    placed = found.scope is None or found.scope in case.scopes
    if placed and _is_any(name, case.accepts):
        return Grade.RIGHT
    return Grade.GENERIC if _is_any(name, case.generic) else Grade.WRONG


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def outcome(case: Case, found: Classification) -> Outcome:
    scopes = "|".join(case.scopes)
    broken, healthy = case.excludes_host is True, case.excludes_host is False
    return Outcome(
        name=case.name,
        file=case.file,
        grade=grade(case, found),
        expected=f"{case.accepts[0]} ({scopes}{', excludes' if broken else ''})",
        got=f"{found.class_} ({found.scope}{', excludes' if found.excludes_host else ''})",
        line=found.line,
        broken=broken,
        healthy=healthy,
        missed=broken and not found.excludes_host,
        excluded=healthy and found.excludes_host,
    )


def dump_outcome(case: DumpCase, found: Diagnosis | NdctlError) -> Outcome:
    """An error is wrong, and names nobody."""
    kind = found.kind if isinstance(found, Diagnosis) else "error"
    named = frozenset(found.ranks if isinstance(found, Diagnosis) else ())
    enough = named == case.culprits or (case.or_none and not named)
    if enough and _is_any(kind, case.kinds):
        reached = Grade.RIGHT
    elif named <= case.culprits and isinstance(found, Diagnosis):
        reached = Grade.GENERIC  # not all of them, or another reason: nobody who is healthy
    else:
        reached = Grade.WRONG
    return Outcome(
        name=case.name,
        file="dumps/cases.yaml",
        grade=reached,
        expected=f"{sorted(case.culprits)} {'|'.join(case.kinds)}",
        got=f"{sorted(named)} {kind}",
        line=None if isinstance(found, Diagnosis) else str(found).splitlines()[0],
        excluded=bool(named - case.culprits),
    )


def run_cases(cases: Iterable[Case]) -> list[Outcome]:
    return [
        outcome(
            case,
            classify_log(
                case.log, kernel=case.kernel, exit_code=case.exit_code, signal=case.signal
            ),
        )
        for case in cases
    ]


def run_dump_cases(cases: Iterable[DumpCase]) -> list[Outcome]:
    return [dump_outcome(case, _diagnosed(case.folder)) for case in cases]


def _diagnosed(folder: Path) -> Diagnosis | NdctlError:
    try:
        return diagnose_folder(folder)[1]
    except NdctlError as exc:
        return exc


def passes(outcomes: Sequence[Outcome]) -> bool:
    counts = Counter(one.grade for one in outcomes)
    broken = sum(one.broken for one in outcomes)
    return (
        counts[Grade.RIGHT] >= LEAST_RIGHT * len(outcomes)
        and not any(one.excluded for one in outcomes)
        and sum(one.missed for one in outcomes) <= MOST_MISSED * broken
    )


def report(title: str, outcomes: Sequence[Outcome], *, dumps: bool = False) -> Iterator[str]:
    counts = Counter(one.grade for one in outcomes)
    yield f"{title}: {len(outcomes)} cases"
    yield _row("right", counts[Grade.RIGHT], len(outcomes), f"at least {LEAST_RIGHT:.0%}")
    yield _row("generic", counts[Grade.GENERIC], len(outcomes))
    yield _row("wrong", counts[Grade.WRONG], len(outcomes))
    wrongly = sum(one.excluded for one in outcomes)
    if dumps:
        yield _row("healthy rank named", wrongly, len(outcomes), "0")
    else:
        broken, healthy = [sum(map(of, outcomes)) for of in (_broken, _healthy)]
        missed = sum(one.missed for one in outcomes)
        yield _row("broken host missed", missed, broken, f"at most {MOST_MISSED:.0%}")
        yield _row("healthy host excluded", wrongly, healthy, "0")
    yield f"  {'pass' if passes(outcomes) else 'FAIL'}"


def _broken(one: Outcome) -> bool:
    return one.broken


def _healthy(one: Outcome) -> bool:
    return one.healthy


def _row(what: str, count: int, of: int, limit: str = "") -> str:
    share = f"{count / of:6.1%}" if of else "     -"
    return f"  {what:<22}{count:5} of {of:4} {share}" + (f"   limit: {limit}" if limit else "")


def misses(outcomes: Iterable[Outcome]) -> Iterator[str]:
    for one in outcomes:
        if one.grade is Grade.RIGHT and not (one.missed or one.excluded):
            continue
        hosts = " MISSED" * one.missed + " EXCLUDED" * one.excluded
        yield f"{one.file} {one.name}: {one.grade}{hosts}"
        yield f"    expected {one.expected}"
        yield f"    got      {one.got}"
        yield f"    line     {(one.line or '-')[:200]}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus")
    parser.add_argument("--heldout", action="store_true", help="score the part that is kept apart")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--misses", action="store_true", help="list what is not right")
    shown.add_argument(
        "--heldout-misses", action="store_true", help="list it of the part that is kept apart"
    )
    options = parser.parse_args(arguments)
    if options.misses and options.heldout:
        parser.error("--misses is for development; --heldout-misses shows what is kept apart")
    part = "heldout" if options.heldout or options.heldout_misses else "development"
    logs, dumps = run_cases(read_cases(part)), run_dump_cases(read_dump_cases(part))
    rounds = run_cases(read_cases(ROUNDS)) if part == "development" else []
    if options.misses or options.heldout_misses:
        print("\n".join(misses([*logs, *dumps, *rounds])), end="\n\n")
    reports = [
        *report(f"{part}, logs", logs),
        *report(f"{part}, dumps", dumps, dumps=True),
        *(report("rounds, logs", rounds) if rounds else ()),
    ]
    print("\n".join(reports))
    return 0 if passes(logs) and passes(dumps) and passes(rounds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
