"""Records of `KEY=VALUE` as scontrol prints them, on one line each (`-o`) or on several."""

import re
from collections.abc import Iterator

NOTHING = ("(null)", "N/A", "None")
"""Slurm's words for a value that is not there."""


def records(text: str, key: str) -> Iterator[str]:
    """The records that begin with `key=`, each on one line; lines that are none are left out."""
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
    """Up to the next space; empty where `key` is not there or has nothing.

    The first that is called so: a reason, which says what it likes, stands near the end.
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
    """All of one record, where values may hold spaces: each goes on until the next key.

    A comment may hold what looks like a key: of one key, the first value counts.
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
    """What follows `Reason=`, up to who said it and when."""
    _, found, after = record.partition(" Reason=")
    if not found:
        return ""
    said = SAID_BY.search(after)
    if said:
        return after[: said.start()].strip()
    return re.split(r" (?:Comment|Extra|InstanceId|ReservationName|ResvName)=", after)[0].strip()
