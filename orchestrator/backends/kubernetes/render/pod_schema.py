"""Checks that `pod_template` has only fields of a Kubernetes pod template. Pure.

API servers before 1.25 drop unknown fields without an error. `pod_fields.yaml` lists the fields of
each type and the Kubernetes version that they are from. A field of a later version is refused too,
because it looks like a mistake.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.contract.codec import Problem, join, nearest
from orchestrator.yaml_document import parse, read_text

FILE = Path(__file__).with_name("pod_fields.yaml")
LIST, MAP = "list ", "map "
SCALARS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "quantity": (str, int, float),
}
WORDS = {
    "str": "text",
    "int": "a whole number",
    "bool": "true or false",
    "quantity": "a quantity, as in 500Gi",
}


def strangers(template: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Unknown fields and values of wrong types, each with its place. null is allowed in mappings,
    because it removes a value that ndctl sets."""
    made = _document()
    yield from _read(template, str(made["root"]), place)


@cache
def _document() -> Mapping[str, Any]:
    text = read_text(FILE, "it is part of ndctl")
    document: Mapping[str, Any] = parse(text, str(FILE)).data
    return document


def _read(value: Any, kind: str, place: str) -> Iterator[Problem]:
    if value is None or kind == "any":
        return
    if kind.startswith(LIST):
        yield from _list(value, kind.removeprefix(LIST), place)
    elif kind.startswith(MAP):
        yield from _mapping(value, kind.removeprefix(MAP), place)
    elif kind in SCALARS:
        if not isinstance(value, SCALARS[kind]) or isinstance(value, bool) is not (kind == "bool"):
            yield _wrong(place, value, WORDS[kind])
    elif not isinstance(value, Mapping):
        yield _wrong(place, value, "key: value pairs")
    else:
        yield from _fields(value, _document()["types"][kind], place)


def _list(value: Any, kind: str, place: str) -> Iterator[Problem]:
    if not isinstance(value, list):
        yield _wrong(place, value, "a list")
        return
    for at, one in enumerate(value):
        if one is None:
            fix = "remove it; null removes the value of a key, not an item of a list"
            yield Problem(path=f"{place}[{at}]", value=None, limit="a value", fix=fix)
        yield from _read(one, kind, f"{place}[{at}]")


def _mapping(value: Any, kind: str, place: str) -> Iterator[Problem]:
    if not isinstance(value, Mapping):
        yield _wrong(place, value, "key: value pairs")
        return
    for key, one in value.items():
        yield from _read(one, kind, join(place, key))


def _fields(value: Mapping[Any, Any], known: Mapping[str, str], place: str) -> Iterator[Problem]:
    for key, one in value.items():
        if key in known:
            yield from _read(one, known[key], join(place, key))
            continue
        near, version = _nearest(str(key), known), _document()["kubernetes"]
        fix = "remove it; `kubectl explain pod.spec` lists all fields"
        yield Problem(
            path=join(place, key),
            value=key,
            limit=f"a field that Kubernetes {version} has here: {_listed(known)}",
            fix=f"did you mean {near}?" if near else fix,
        )


def _nearest(key: str, known: Mapping[str, str]) -> str | None:
    """Ignores case, so that the suggestion for `nodename` is nodeName and not hostname."""
    by_letters = {name.lower(): name for name in known}
    return by_letters.get(nearest(key.lower(), by_letters) or "")


def _listed(known: Mapping[str, str]) -> str:
    names = list(known)
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:12])}, …"


def _wrong(place: str, value: Any, limit: str) -> Problem:
    shown = value if isinstance(value, (str, int, float)) else type(value).__name__
    fix = "write it as `kubectl explain pod.spec` shows"
    if limit == WORDS["str"] and isinstance(value, (bool, int, float)):
        fix = f'put it in quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    elif limit == WORDS["int"] and isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        fix = f"write {value} without quotes"
    return Problem(path=place, value=shown, limit=limit, fix=fix)
