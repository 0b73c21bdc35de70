"""JSON schema of a job spec, derived from its structs; editors use it for completion.

It describes the possible values of each key. Conditions across keys (the warm-up must not exceed
the steps, the micro batch must divide the global batch) are left to the loader, whose messages are
better.
"""

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from msgspec import NODEFAULT, Struct, structs

from orchestrator.contract.codec import SWITCH, encode, fields_of, is_struct, is_switch
from orchestrator.contract.spec.data_spec import ValidationSpec
from orchestrator.contract.spec.job_spec import JobSpec, ScriptSpec
from orchestrator.contract.spec.kubernetes_spec import EnvFrom, ValueFrom
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost, Limit, Matches, OneOf
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.specs.docstrings import docstrings

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
    Any: {},
    object: {},
}

ONE_OF: Mapping[type, tuple[str, ...]] = {
    ModelSpec: ("preset", "config", "path"),
    ValidationSpec: ("files", "fraction"),
    RunSpec: ("script", "module", "program"),
    ValueFrom: ("secret", "config_map"),
    EnvFrom: ("secret", "config_map"),
}
"""Keys of which exactly one must be given."""


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a spec: a `JobSpec` or a `ScriptSpec`."""
    definitions: dict[str, Any] = {}
    root, own = _object(JobSpec, definitions), _object(ScriptSpec, definitions)
    trained = [key for key in root["properties"] if key not in own["properties"]]
    needed = [key for key in root["required"] if key not in own["properties"]]
    root["description"] = f"{root['description']} Or {own['description'][0].lower()}"
    root["description"] += own["description"][1:]
    root["properties"] |= own["properties"]
    root["required"] = ["name"]
    # A property with the schema `false` must not be given.
    root["oneOf"] = [
        {"required": needed, "properties": {"run": False}},
        {"required": ["run"], "properties": dict.fromkeys(trained, False)},
    ]
    return {"$schema": DIALECT, "title": "ndctl job spec"} | root | {"$defs": definitions}


def _object(cls: type[Struct], definitions: dict[str, Any]) -> dict[str, Any]:
    about, notes = docstrings(cls)
    properties: dict[str, Any] = {}
    required: list[str] = []
    defaults = {f.name: _default(f) for f in structs.fields(cls)}
    for key, (name, kind, needed) in fields_of(cls).items():
        properties[key] = _type(kind, definitions)
        if name in notes:
            properties[key]["description"] = notes[name]
        if needed:
            required.append(key)
        elif defaults[name] is not None:
            properties[key]["default"] = defaults[name]
    schema: dict[str, Any] = {"type": "object"} | ({"description": about} if about else {})
    schema |= {"properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = required
    return schema | _together(cls)


def _together(cls: type) -> dict[str, Any]:
    """Conditions across the keys of `cls`, as far as a schema can express them."""
    given = [
        {"required": [key], "properties": {key: {"not": {"type": "null"}}}}
        for key in ONE_OF.get(cls, ())
    ]
    return {"oneOf": given} if given else {}


def _default(field: structs.FieldInfo) -> Any:
    """The field's default as JSON; None if there is no default or it is null."""
    if field.default_factory is not NODEFAULT:
        return encode(field.default_factory())
    return None if field.default is NODEFAULT else encode(field.default)


def _type(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        schema = _type(args[0], definitions)
        for limit in args[1:]:
            schema |= _limit(limit)
        return schema
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(one, definitions) for one in args]}
    if origin is Literal:
        return {"enum": [*args, *(SWITCH if is_switch(args) else ())]}
    if origin is tuple:
        return {"type": "array", "items": _type(args[0], definitions)}
    if origin is not None:
        keys = _type(args[0], definitions) if typing.get_origin(args[0]) is typing.Annotated else {}
        named = {"propertyNames": keys} if keys else {}
        return {"type": "object", **named, "additionalProperties": _type(args[1], definitions)}
    if is_struct(kind):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}
            definitions[kind.__name__] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return dict(TYPES[kind])


def _limit(limit: Limit) -> dict[str, Any]:
    match limit:
        case AtLeast(low):
            return {"minimum": low}
        case AtMost(high):
            return {"maximum": high}
        case Above(low):
            return {"exclusiveMinimum": low}
        case Matches(pattern, _):
            return {"pattern": f"^(?:{pattern})$"}
        case OneOf(names):
            return {"enum": list(names)}
        case _:
            typing.assert_never(limit)
