"""Parses records of `KEY=VALUE` by scontrol, on one line each (`-o`) or on several."""

import re
from collections.abc import Iterator

NOTHING = ("(null)", "N/A", "None")
"""Slurm's texts for a missing value."""


def records(text: str, key: str) -> Iterator[str]:
    """Records that begin with `key=`, each joined to one line. Other lines are ignored."""
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith(f"{key}="):
            if found:
                yield " ".join(found)
            found = [line.rstrip()]
        elif found and line[:1].isspace() and line.strip():
            found.append(line.strip())
    if found:
        yield " ".join(found)


def value(record: str, key: str) -> str:
    """The value up to the next space; empty if `key` is missing or has no value.

    The first match counts: a reason, which may contain any text, stands near the end.
    """
    if record.startswith(f"{key}="):
        start = 0
    else:
        start = record.find(f" {key}=") + 1
        if not start:
            return ""
    start += len(key) + 1
    end = record.find(" ", start)
    found = record[start:] if end < 0 else record[start:end]
    return "" if found in NOTHING else found


KEY = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z:/_]*)=")


def fields(record: str) -> dict[str, str]:
    """All fields of a record whose values may contain spaces: a value ends at the next key.

    A comment may contain text that looks like a key, so the first value of a key counts.
    """
    found: dict[str, str] = {}
    keys = list(KEY.finditer(record))
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        end = following.start() if following else len(record)
        said = record[key.end() : end].strip()
        found.setdefault(key[1], "" if said in NOTHING else said)
    return found


SAID_BY = re.compile(r" \[[^\s@\]]+@[^\s\]]+\]")


def reason(record: str) -> str:
    """The text after `Reason=`, without who wrote it and when.

    Slurm 24.11 adds a new reason to that of a node's earlier failure, after " : ". What it says
    twice is kept once.
    """
    return " : ".join(dict.fromkeys(_whole_reason(record).split(" : ")))


def _whole_reason(record: str) -> str:
    _, found, after = record.partition(" Reason=")
    if not found:
        return ""
    said = SAID_BY.search(after)
    if said:
        return after[: said.start()].strip()
    return re.split(r" (?:Comment|Extra|InstanceId|ReservationName|ResvName)=", after)[0].strip()
