"""Strict field validation of custom resources by their CRDs, as in a current API server.

A field that the schema does not have is an error. Older servers drop it silently.
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

CRDS = Path(__file__).parents[3] / "manifests" / "crds"
OBJECT: Mapping[str, Any] = {
    "apiVersion": {"type": "string"},
    "kind": {"type": "string"},
    "metadata": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
}
INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


def problems(item: Mapping[str, Any], file: str) -> list[str]:
    """Violations of the CRD in `file`, each with its path."""
    whole = schema(file, item["apiVersion"].partition("/")[2])
    validator = _validator(file, item["apiVersion"].partition("/")[2])
    wrong = (
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(item)
    )
    return [*wrong, *twice(item, whole)]


@functools.cache
def schema(file: str, version: str) -> dict[str, Any]:
    definition = yaml.load((CRDS / file).read_text(), yaml.CSafeLoader)
    (found,) = (one for one in definition["spec"]["versions"] if one["name"] == version)
    whole: dict[str, Any] = found["schema"]["openAPIV3Schema"]
    return {**whole, "properties": {**whole["properties"], **OBJECT}}


@functools.cache
def _validator(file: str, version: str) -> Draft202012Validator:
    return Draft202012Validator(strict(schema(file, version)))


def strict(node: Mapping[str, Any]) -> dict[str, Any]:
    """A structural schema as a JSON schema without additional fields."""
    made = {
        key: value
        for key, value in node.items()
        if key in ("type", "enum", "pattern", "minimum", "maximum", "required", "maxLength")
    }
    if node.get("x-kubernetes-int-or-string"):
        made |= INT_OR_STRING
    if node.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    if "items" in node:
        made["items"] = strict(node["items"])
    properties = node.get("properties", {})
    if properties:
        made["properties"] = {name: strict(one) for name, one in properties.items()}
    if node.get("type") == "object" and not node.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = _others(node)
    return made


def _others(node: Mapping[str, Any]) -> Any:
    more = node.get("additionalProperties", False)
    return strict(more) if isinstance(more, Mapping) else more


def twice(item: Any, node: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """List entries with the same keys, which the server refuses."""
    if isinstance(item, Mapping):
        for key, value in item.items():
            below = node.get("properties", {}).get(key) or node.get("additionalProperties")
            if isinstance(below, Mapping):
                yield from twice(value, below, f"{path}.{key}")
    elif isinstance(item, list):
        keys = node.get("x-kubernetes-list-map-keys", ())
        seen = [tuple(one.get(key) for key in keys) for one in item] if keys else []
        yield from (f"{path}: {one} twice" for one in set(seen) if seen.count(one) > 1)
        for at, one in enumerate(item):
            yield from twice(one, node.get("items", {}), f"{path}[{at}]")
