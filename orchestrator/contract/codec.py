"""Frozen dataclasses to JSON values and back, with every problem found at once.

One codec reads the job spec, the trainer's configuration, journal lines, datagrams and the agents'
protocol. It knows dataclasses, unions told apart by a tag or by type, `Literal`, tuples, mappings
and `Annotated` limits. Standard library alone: the trainer and the fast commands import it.
"""

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, cast

T = TypeVar("T")
MISSING = dataclasses.MISSING
TAG = "kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with one value."""

    path: str
    value: Any = MISSING
    """The offending value; `MISSING` where there is none."""
    limit: str
    """What the value must be, as the end of "must be …"."""
    fix: str

    def __str__(self) -> str:
        got = "" if self.value is MISSING else f", got {_show(self.value)}"
        return f"{self.path or '(top)'}: must be {self.limit}{got}\n    fix: {self.fix}"


class Invalid(ValueError):
    """The value cannot be; `problems` says why, all of them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True, slots=True)
class AtLeast:
    low: float

    def __str__(self) -> str:
        return f"at least {self.low}"

    def admits(self, value: Any) -> bool:
        return bool(value >= self.low)


@dataclass(frozen=True, slots=True)
class AtMost:
    high: float

    def __str__(self) -> str:
        return f"at most {self.high}"

    def admits(self, value: Any) -> bool:
        return bool(value <= self.high)


@dataclass(frozen=True, slots=True)
class Above:
    low: float

    def __str__(self) -> str:
        return f"above {self.low}"

    def admits(self, value: Any) -> bool:
        return bool(value > self.low)


@dataclass(frozen=True, slots=True)
class Matches:
    pattern: str
    words: str
    """The pattern in words, as the end of "must be …"."""

    def __str__(self) -> str:
        return self.words

    def admits(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value) is not None


Limit = AtLeast | AtMost | Above | Matches


def key_of(name: str) -> str:
    """The key under which field `name` is written: `async_` is `async`, a word Python keeps."""
    return name.removesuffix("_")


@functools.cache
def fields_of(cls: type) -> dict[str, tuple[str, Any, bool]]:
    """Key -> (field name, resolved type, is required) of a dataclass."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        key_of(f.name): (
            f.name,
            hints[f.name],
            f.default is MISSING and f.default_factory is MISSING,
        )
        for f in dataclasses.fields(cls)
        if f.init
    }


def encode(value: Any) -> Any:
    """`value` as what `json.dumps` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            key: encode(getattr(value, name)) for key, (name, _, _) in fields_of(type(value)).items()
        }
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset)):
        items = sorted(value) if isinstance(value, frozenset) else value
        return [encode(item) for item in items]
    return value


def encode_tagged(value: Any) -> dict[str, Any]:
    """One member of a union of dataclasses, told apart by its class name under `kind`."""
    return {TAG: type(value).__name__} | cast(dict[str, Any], encode(value))


def decode(cls: type[T] | Any, data: Any, path: str = "") -> T:
    """`data` as a `cls`.

    Raises:
        Invalid: with one `Problem` for everything that is wrong, not only the first.
    """
    problems: list[Problem] = []
    value = _read(cls, data, path, problems)
    if problems:
        raise Invalid(problems)
    return cast(T, value)


def _read(kind: Any, data: Any, path: str, problems: list[Problem]) -> Any:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        base, *limits = typing.get_args(kind)
        return _read_limited(base, limits, data, path, problems)
    if origin in (Union, types.UnionType):
        return _read_union(typing.get_args(kind), data, path, problems)
    if origin is Literal:
        return _read_literal(typing.get_args(kind), data, path, problems)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind)[0], data, path, problems)
    if origin is not None and issubclass(origin, Mapping):
        return _read_mapping(typing.get_args(kind)[1], data, path, problems)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(cast(type, kind), data, path, problems)
    return _read_scalar(kind, data, path, problems)


def _read_limited(
    base: Any, limits: list[Limit], data: Any, path: str, problems: list[Problem]
) -> Any:
    before = len(problems)
    value = _read(base, data, path, problems)
    if len(problems) > before:
        bounds = " and ".join(str(limit) for limit in limits if not isinstance(limit, Matches))
        if bounds and len(problems) == before + 1:
            found = problems[-1]
            problems[-1] = dataclasses.replace(found, limit=f"{found.limit} {bounds}")
        return None
    for limit in limits:
        if not limit.admits(value):
            fix = f"set {path} to a value that is {limit}"
            problems.append(Problem(path=path, value=data, limit=str(limit), fix=fix))
    return value


def _read_union(kinds: tuple[Any, ...], data: Any, path: str, problems: list[Problem]) -> Any:
    if data is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    if len(kinds) > 1 and all(dataclasses.is_dataclass(kind) for kind in kinds):
        return _read_tagged({kind.__name__: kind for kind in kinds}, data, path, problems)
    found: list[Problem] = []
    for kind in kinds:
        tried: list[Problem] = []
        value = _read(kind, data, path, tried)
        if not tried:
            return value
        found += tried
    if len(kinds) == 1:
        problems += found
        return None
    limit = " or ".join(dict.fromkeys(problem.limit for problem in found if problem.path == path))
    problems.append(Problem(path=path, value=data, limit=limit, fix=f"set {path} to {limit}"))
    return None


def _read_tagged(kinds: dict[str, Any], data: Any, path: str, problems: list[Problem]) -> Any:
    tag = data.get(TAG) if isinstance(data, Mapping) else None
    if tag not in kinds:
        limit = f"an object whose {TAG!r} is one of {', '.join(kinds)}"
        fix = "read it with the ndctl that wrote it"
        problems.append(Problem(path=path, value=data, limit=limit, fix=fix))
        return None
    rest = {key: item for key, item in data.items() if key != TAG}
    return _read(kinds[tag], rest, path, problems)


def _read_literal(choices: tuple[Any, ...], data: Any, path: str, problems: list[Problem]) -> Any:
    for choice in choices:
        if data == choice and type(data) is type(choice):
            return choice
    limit = " or ".join(_show(choice) for choice in choices)
    near = _nearest(data, [str(choice) for choice in choices])
    fix = f"did you mean {near}?" if near else f"set {path} to {limit}"
    problems.append(Problem(path=path, value=data, limit=limit, fix=fix))
    return None


def _read_tuple(item: Any, data: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(data, (list, tuple)):
        fix = f"write {path} as [...]"
        problems.append(Problem(path=path, value=data, limit="a list", fix=fix))
        return None
    return tuple(_read(item, value, f"{path}[{i}]", problems) for i, value in enumerate(data))


def _read_mapping(item: Any, data: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(data, Mapping):
        fix = f"write {path} as key: value pairs"
        problems.append(Problem(path=path, value=data, limit="a mapping", fix=fix))
        return None
    return {str(key): _read(item, value, _join(path, key), problems) for key, value in data.items()}


def _read_dataclass(cls: type, data: Any, path: str, problems: list[Problem]) -> Any:
    fields = fields_of(cls)
    if not isinstance(data, Mapping):
        fix = f"write {path or 'it'} as key: value pairs with keys {', '.join(fields)}"
        problems.append(Problem(path=path, value=data, limit="a mapping", fix=fix))
        return None
    before = len(problems)
    for key in data:
        if key not in fields:
            near = _nearest(key, list(fields))
            known = f"one of the keys {', '.join(fields)}"
            fix = f"did you mean {near!r}?" if near else f"remove it, or use {known}"
            problems.append(
                Problem(path=_join(path, key), value=data[key], limit=f"absent ({known})", fix=fix)
            )
    values: dict[str, Any] = {}
    for key, (name, kind, required) in fields.items():
        if key in data:
            values[name] = _read(kind, data[key], _join(path, key), problems)
        elif required:
            place = _join(path, key)
            problems.append(Problem(path=place, limit="given", fix=f"add {place}"))
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except Invalid as exc:
        problems += [dataclasses.replace(p, path=_join(path, p.path)) for p in exc.problems]
        return None


SCALARS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
}


def _read_scalar(kind: Any, data: Any, path: str, problems: list[Problem]) -> Any:
    if kind in (Any, object):
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    fits = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
    if fits and not (kind is float and not math.isfinite(data)):
        return data
    limit = SCALARS[kind]
    problems.append(Problem(path=path, value=data, limit=limit, fix=f"set {path} to {limit}"))
    return None


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path and key else f"{path or key}"


def _nearest(word: object, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(str(word), known, n=1)), None)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
