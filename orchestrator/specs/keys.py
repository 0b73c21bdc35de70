"""The keys of a job spec as values: type, default, meaning, and the keys inside."""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

from msgspec import NODEFAULT, Struct, structs
from msgspec.structs import replace

from orchestrator.contract.codec import ABSENT, encode, fields_of, is_struct, join, nearest
from orchestrator.contract.spec.job_spec import JobSpec, ScriptSpec
from orchestrator.contract.spec.limits import OneOf
from orchestrator.errors import SpecError
from orchestrator.specs.docstrings import docstrings

NAMES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true | false",
    types.NoneType: "null",
    object: "any value",
    Any: "any value",
}


class Key(Struct, frozen=True, kw_only=True):
    """One key of a spec."""

    path: str
    """Such as `train.optimizer.lr`; empty: the whole spec."""
    kind: str
    """The values that it takes, in words."""
    required: bool
    default: Any = ABSENT
    """As JSON. `ABSENT`: it must be given, or it is a group of keys."""
    about: str
    """What it means."""
    inside: type[Struct] | None = None
    """The struct of the keys inside."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


ROOT = Key(path="", kind="keys", required=True, about="A job spec.", inside=JobSpec)


def keys_inside(key: Key) -> tuple[Key, ...]:
    """The keys one level below `key`."""
    if key.inside is None:
        return ()
    return _keys_at_the_top() if key is ROOT else _keys_of(key.inside, key.path)


def _keys_at_the_top() -> tuple[Key, ...]:
    """A spec is a `JobSpec` or a `ScriptSpec`, so what each of them requires is not required."""
    trained, own = _keys_of(JobSpec, ""), _keys_of(ScriptSpec, "")
    shared = {key.path for key in own}
    found = []
    for key in trained:
        if key.required and key.path not in shared:
            key = replace(key, required=False, about=f"{key.about} Required without `run`.")
        found.append(key)
    return (*found, *(replace(key, required=False) for key in own if key.path == "run"))


def _keys_of(cls: type[Struct], above: str) -> tuple[Key, ...]:
    notes = docstrings(cls)[1]
    defaults = {field.name: _default(field) for field in structs.fields(cls)}
    found = []
    for key, (name, kind, required) in fields_of(cls).items():
        inside, many = _struct_in(kind)
        found.append(
            Key(
                path=join(above, key) + ("[]" if many and inside else ""),
                kind=words_of_kind(kind),
                required=required,
                default=ABSENT if is_struct(kind) else defaults[name],
                about=notes.get(name, ""),
                inside=inside,
            )
        )
    return tuple(found)


def _default(field: structs.FieldInfo) -> Any:
    if field.default_factory is not NODEFAULT:
        return encode(field.default_factory())
    return ABSENT if field.default is NODEFAULT else encode(field.default)


def _struct_in(kind: Any) -> tuple[type[Struct] | None, bool]:
    """The struct whose keys a value of `kind` has, and whether there may be several of it."""
    if is_struct(kind):
        return kind, False
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType, typing.Annotated):
        found = [_struct_in(one) for one in args if one is not types.NoneType]
        return next((one for one in found if one[0] is not None), (None, False))
    if origin is tuple:
        return _struct_in(args[0])[0], True
    if origin is not None and origin is not Literal and len(args) == 2:
        return _struct_in(args[1])[0], True
    return None, False


def words_of_kind(kind: Any) -> str:
    """The values of a type in a few words, such as `whole number, at least 1 | auto`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        if isinstance(args[-1], OneOf):
            return str(args[-1])
        return ", ".join([words_of_kind(args[0]), *map(str, args[1:])])
    if origin in (Union, types.UnionType):
        return " | ".join(words_of_kind(one) for one in args)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin is tuple:
        return f"list of {words_of_kind(args[0])}"
    if origin is not None:
        return f"{words_of_kind(args[0])}: {words_of_kind(args[1])} pairs"
    return "keys" if is_struct(kind) else NAMES[kind]


def all_keys(above: Key = ROOT) -> Iterator[Key]:
    """Every key below `above`, each before the keys inside it."""
    for key in keys_inside(above):
        yield key
        yield from all_keys(key)


def key_at(path: str) -> Key:
    """The key at `path`. A number or brackets after a list may be left out or written.

    Raises:
        SpecError: no such key; the fix has the nearest path.
    """
    key = ROOT
    for word in filter(None, path.split(".")):
        name = word.partition("[")[0]
        below = {one.name.removesuffix("[]"): one for one in keys_inside(key)}
        if name not in below:
            raise _unknown(path, key, below, name)
        key = below[name]
    return key


def _unknown(path: str, key: Key, below: dict[str, Key], name: str) -> SpecError:
    place = f"{key.path} has" if key.path else "a spec has"
    if not below:
        message = f"{path}: {key.path} has no keys inside; it takes {key.kind}"
        return SpecError(message, fix=f"ndctl explain {key.path}")
    from orchestrator.specs.other_names import KEYS

    if near := KEYS.get(name) or _nearest_path(path, below, name):
        return SpecError(f"{path}: {place} no key {name}", fix=f"did you mean {near}?")
    fix = f"the keys there: {', '.join(below)}"
    return SpecError(f"{path}: {place} no key {name}", fix=fix)


def _nearest_path(path: str, below: dict[str, Key], name: str) -> str | None:
    """A path that ends like `path`, such as train.optimizer.lr for `optimizer.lr`; else one that is
    spelled nearly so."""
    every = [one.path.replace("[]", "") for one in all_keys()]
    ends = [one for one in every if one.endswith(f".{path}")]
    if ends:
        return min(ends, key=lambda one: (one.count("."), len(one)))
    if near := nearest(name, below):
        return below[near].path.replace("[]", "")
    last = path.rpartition(".")[2]
    named = [one for one in every if one.rpartition(".")[2] == last]
    return min(named, key=len) if named else nearest(path, every)
