"""Structs (frozen values) to JSON values and back; decoding reports every problem at once.

It reads what people write: the job spec, the trainer's configuration, inventories. Messages between
programs are read by msgspec (`messages/wire.py`), and here only if msgspec cannot read them.

The codec knows structs, unions (told apart by a tag or by type), `Literal`, enums (by name),
tuples, mappings and `Annotated` limits. pydantic is not used, because importing it takes most of
the time that `ndctl plan` may take (`python -m benchmarks.cli`).
"""

import functools
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Any, Literal, TypeGuard, TypeVar, Union, cast

from msgspec import Struct, structs
from msgspec.structs import replace

from orchestrator.contract.spec.limits import Limit, OneOf

T = TypeVar("T")
ABSENT: Any = object()
"""Stands for a value that is missing; null is a value."""
TAG = "kind"
FEW_NAMES = 6
"""So many names fit into the first line of a message."""
UNKNOWN_KEY = "unknown key"
"""What is wrong with a key that a struct does not have."""


class Problem(Struct, frozen=True, kw_only=True):
    """One thing wrong with one value."""

    path: str
    value: Any = ABSENT
    """The offending value; `ABSENT` if the key is missing."""
    limit: str
    """What the value must be, as the end of "must be …"."""
    fix: str
    words: str = ""
    """What is wrong, if "must be …" does not say it well."""

    @property
    def said(self) -> str:
        """What is wrong, without the key and the fix."""
        if self.words:
            return self.words
        got = "" if self.value is ABSENT else f", got {_show(self.value)}"
        return f"must be {self.limit}{got}"

    def __str__(self) -> str:
        return f"{self.path or '(top)'}: {self.said}\n    fix: {self.fix}"


class Invalid(ValueError):
    """A value that cannot be accepted; `problems` has every reason."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def key_of(name: str) -> str:
    """The key of field `name`: `async_` is written `async`, which is a keyword in Python."""
    return name.removesuffix("_")


@functools.cache
def fields_of(cls: type[Struct]) -> dict[str, tuple[str, Any, bool]]:
    """Key -> (field name, resolved type, is required) of a struct."""
    return {key_of(f.name): (f.name, f.type, f.required) for f in structs.fields(cls)}


def is_struct(kind: Any) -> TypeGuard[type[Struct]]:
    return isinstance(kind, type) and issubclass(kind, Struct)


def encode(value: Any) -> Any:
    """`value` as a value that `json.dumps` accepts."""
    if type(value) in SCALARS:  # tested first because most values are, such as 2,048 host names
        return value
    if isinstance(value, Struct):
        return {
            key: (encode_tagged if is_tagged(kind) else encode)(getattr(value, name))
            for key, (name, kind, _) in fields_of(type(value)).items()
        }
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset)):
        items = sorted(value) if isinstance(value, frozenset) else value
        return [encode(item) for item in items]
    # An enum that is also a number or a string, such as `signal.SIGKILL`, is written as that.
    return value.name if isinstance(value, Enum) and not isinstance(value, int | str) else value


@functools.cache
def is_tagged(kind: Any) -> bool:
    """Whether `kind` is a union of structs, so that a value must name its class."""
    members = typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else ()
    return bool(_tagged(members))


@functools.cache
def _tagged(kinds: tuple[Any, ...]) -> Mapping[str, Any]:
    """Class name -> class if `kinds` are several structs; else empty."""
    if len(kinds) < 2 or not all(is_struct(kind) for kind in kinds):
        return {}
    return {kind.__name__: kind for kind in kinds}


@functools.cache
def _origin(kind: Any) -> Any:
    return typing.get_origin(kind)


def encode_tagged(value: Any) -> dict[str, Any]:
    """A member of a union of structs, with its class name under `kind`."""
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


def words_of(kind: Any) -> str:
    """A description of `kind` that completes "must be …"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return f"{words_of(args[0])} ({' and '.join(map(str, args[1:]))})"
    if origin in (Union, types.UnionType):
        return " or ".join(words_of(one) for one in args)
    if origin is Literal:
        return " or ".join(_show(choice) for choice in args)
    if is_struct(kind):
        return f"key: value pairs with the keys {', '.join(fields_of(kind))}"
    if origin is tuple:
        return "a list"
    if _is_enum(kind):
        return " or ".join(kind.__members__)
    return "key: value pairs" if origin is not None else SCALARS[kind]


def _read(kind: Any, data: Any, path: str, problems: list[Problem]) -> Any:
    origin = _origin(kind)
    if origin is typing.Annotated:
        return _read_limited(kind, data, path, problems)
    if origin in (Union, types.UnionType):
        return _read_union(typing.get_args(kind), data, path, problems)
    if origin is Literal:
        return _read_literal(typing.get_args(kind), data, path, problems)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind)[0], data, path, problems)
    if origin is not None and issubclass(origin, Mapping):
        return _read_mapping(typing.get_args(kind), data, path, problems)
    if is_struct(kind):
        return _read_struct(kind, data, path, problems)
    if _is_enum(kind):
        name = _read_literal(tuple(kind.__members__), data, path, problems)
        return None if name is None else kind[name]
    return _read_scalar(kind, data, path, problems)


def _read_limited(kind: Any, data: Any, path: str, problems: list[Problem]) -> Any:
    base, *limits = typing.get_args(kind)
    found: list[Problem] = []
    value = _read(base, data, path, found)
    if found:
        # The type is wrong. The message gives type and limits together, such as "must be a whole
        # number (at least 1)", so that the user corrects the value once.
        limit = words_of(kind)
        problems += [replace(p, limit=limit) if p.path == path else p for p in found]
        return None
    for limit in limits:
        if not limit.admits(value):
            problems.append(_outside(limit, value, data, path))
    return value


def _outside(limit: Limit, value: Any, data: Any, path: str) -> Problem:
    words, near = str(limit), None
    if isinstance(limit, OneOf):
        near = nearest(value, limit.names)
        if len(limit.names) > FEW_NAMES:  # the fix has them, unless it knows a better one
            words = f"one of {len(limit.names)} names"
    fix = f"did you mean {near}?" if near else f"set {path} to {limit.advice}"
    return Problem(path=path, value=data, limit=words, fix=fix)


def _read_union(kinds: tuple[Any, ...], data: Any, path: str, problems: list[Problem]) -> Any:
    if data is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    if tagged := _tagged(kinds):
        return _read_tagged(tagged, data, path, problems)
    objects = [kind for kind in kinds if is_struct(kind)]
    if isinstance(data, Mapping) and len(objects) == 1:
        # Only one member of the union is an object, so report the mistakes inside that object.
        return _read(objects[0], data, path, problems)
    found: list[Problem] = []
    # The first member that accepts the value wins. If none does, one problem lists what all accept.
    for kind in kinds:
        tried: list[Problem] = []
        value = _read(kind, data, path, tried)
        if not tried:
            return value
        found += tried
    if len(kinds) == 1:  # `X | None`: the problems of X say more than "must be X or null"
        problems += found
        return None
    limit = " or ".join(words_of(kind) for kind in kinds)
    guesses = [problem.fix for problem in found if problem.fix.startswith("did you mean")]
    fix = guesses[0] if guesses else f"set {path} to {limit}"
    problems.append(Problem(path=path, value=data, limit=limit, fix=fix))
    return None


def _read_tagged(kinds: Mapping[str, Any], data: Any, path: str, problems: list[Problem]) -> Any:
    tag = data.get(TAG) if isinstance(data, Mapping) else None
    if not isinstance(tag, str) or tag not in kinds:
        limit = f"an object whose {TAG!r} is one of {', '.join(kinds)}"
        fix = "read it with the ndctl that wrote it"
        words = f"unknown {TAG} {_show(tag)}" if isinstance(tag, str) else ""
        problems.append(Problem(path=path, value=data, limit=limit, fix=fix, words=words))
        return None
    rest = {key: item for key, item in data.items() if key != TAG}
    return _read(kinds[tag], rest, path, problems)


def _read_literal(choices: tuple[Any, ...], data: Any, path: str, problems: list[Problem]) -> Any:
    if isinstance(data, bool) and is_switch(choices):
        return SWITCH[data]
    for choice in choices:
        # `True == 1` in Python, so the types are compared too.
        if data == choice and type(data) is type(choice):
            return choice
    limit = " or ".join(_show(choice) for choice in choices)
    near = nearest(data, [str(choice) for choice in choices])
    fix = f"did you mean {near}?" if near else f"set {path} to {limit}"
    problems.append(Problem(path=path, value=data, limit=limit, fix=fix))
    return None


SWITCH = {True: "on", False: "off"}


def is_switch(choices: Collection[Any]) -> bool:
    """Whether `true` and `false` are read as `on` and `off`. In YAML 1.1 both are booleans, and in
    YAML 1.2 `on` and `off` are strings, so a user may write either."""
    return all(word in choices for word in SWITCH.values())


def _read_tuple(item: Any, data: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(data, (list, tuple)):
        fix = f"write {path} as [...]"
        problems.append(Problem(path=path, value=data, limit="a list", fix=fix))
        return None
    return tuple(_read(item, value, f"{path}[{i}]", problems) for i, value in enumerate(data))


@functools.cache
def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _read_mapping(kinds: tuple[Any, ...], data: Any, path: str, problems: list[Problem]) -> Any:
    """Keys are strings as in JSON, or whole numbers written as strings."""
    key_kind, item = kinds
    if not isinstance(data, Mapping):
        fix = f"write {path} as {{key: value, …}}"
        problems.append(Problem(path=path, value=data, limit="key: value pairs", fix=fix))
        return None
    if key_kind is int:
        return _read_numbered(item, data, path, problems)
    if typing.get_origin(key_kind) is typing.Annotated:
        _check_keys(typing.get_args(key_kind)[1:], data, path, problems)
    return {str(key): _read(item, value, join(path, key), problems) for key, value in data.items()}


def _check_keys(
    limits: Iterable[Limit], data: Mapping[Any, Any], path: str, problems: list[Problem]
) -> None:
    for key in map(str, data):
        for limit in limits:
            if not limit.admits(key):
                words = f"the key must be {limit}, got {_show(key)}"
                fix = f"rename the key, to {limit.advice}"
                place = join(path, key)
                problems.append(
                    Problem(path=place, value=key, limit=str(limit), fix=fix, words=words)
                )


def _read_numbered(
    item: Any, data: Mapping[Any, Any], path: str, problems: list[Problem]
) -> dict[int, Any]:
    found = {}
    for key, value in data.items():
        place = join(path, key)
        if not re.fullmatch(r"-?\d+", str(key)):
            fix = f"write {place} with a number as its key"
            problems.append(Problem(path=place, value=key, limit="a whole number", fix=fix))
            continue
        found[int(key)] = _read(item, value, place, problems)
    return found


def _read_struct(cls: type[Struct], data: Any, path: str, problems: list[Problem]) -> Any:
    fields = fields_of(cls)
    if not isinstance(data, Mapping):
        fix = f"under {path or 'the top'}, use the keys {', '.join(fields)}"
        problems.append(Problem(path=path, value=data, limit="key: value pairs", fix=fix))
        return None
    before = len(problems)
    for key in data:
        if key not in fields:
            near = nearest(key, fields)
            limit = f"one of the keys {', '.join(fields)}"
            fix = f"did you mean {join(path, near)}?" if near else f"remove it, or use {limit}"
            where = join(path, key)
            problems.append(Problem(path=where, value=key, limit=limit, fix=fix, words=UNKNOWN_KEY))
    values: dict[str, Any] = {}
    for key, (name, kind, required) in fields.items():
        place = join(path, key)
        if key in data:
            values[name] = _read(kind, data[key], place, problems)
        elif required:
            fix = f"add {place}: {_needed(kind)}"
            problems.append(Problem(path=place, limit="given", fix=fix))
    if len(problems) > before:  # the class's own check needs all fields
        return None
    try:
        return cls(**values)
    except Invalid as exc:
        problems += [replace(p, path=join(path, p.path)) for p in exc.problems]
        return None


def _needed(kind: Any) -> str:
    """What to add for a missing `kind`; for a struct, the keys that it requires."""
    if not is_struct(kind):
        return words_of(kind)
    fields = fields_of(kind)
    needed = [key for key, (_, _, required) in fields.items() if required]
    return f"with {', '.join(needed)}" if needed else f"with one of {', '.join(fields)}"


SCALARS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    bool: "true or false",
    types.NoneType: "null",
    object: "any value",
    Any: "any value",
}
WORDS_FOR_BOOL = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def _read_scalar(kind: Any, data: Any, path: str, problems: list[Problem]) -> Any:
    if kind in (Any, object):
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        data = _as_float(data)
    # A bool is an int in Python. `steps: true` must not be read as 1.
    fits = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
    if fits and not (kind is float and not math.isfinite(data)):
        return data
    fix = _scalar_fix(kind, data, path)
    problems.append(Problem(path=path, value=data, limit=SCALARS[kind], fix=fix))
    return None


def _as_float(data: int) -> float:
    try:
        return float(data)
    except OverflowError:  # more than 308 digits
        return math.inf


def _scalar_fix(kind: Any, data: Any, path: str) -> str:
    match data:
        case None:
            return f"give {path} a value"
        case str() if kind is bool and data.lower() in WORDS_FOR_BOOL:
            return f"set {path} to {WORDS_FOR_BOOL[data.lower()]}"
        case str() if kind in (int, float) and re.fullmatch(r"[-+]?\d+(\.\d+)?", data):
            return f"write {data} without quotes"
        case float() if kind is int and data.is_integer():
            return f"set {path} to {int(data)}"
        case bool() | int() | float() if kind is str:
            return f'put it in quotes: "{_show(data)}"'
        case _:
            return f"set {path} to {SCALARS[kind]}"


def join(path: str, key: object) -> str:
    """The path of `key` inside `path`."""
    return f"{path}.{key}" if path and key else f"{path or key}"


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The known name that `word` probably stands for; None if no name is similar."""
    import difflib  # imported only for errors, so that fast commands do not pay for it

    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def _show(value: Any) -> str:
    """`value` as it is written in YAML or JSON, shortened to 80 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
