"""Compares the fields of an object with the schema of its kind in this cluster.

An API server drops fields that are not in the schema; before 1.25 it does so without an error. With
an operator that is too old, a job would lose such a field and behave differently.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from orchestrator.backends.kubernetes.api.api_errors import Missing
from orchestrator.backends.kubernetes.api.client import ApiReader
from orchestrator.backends.kubernetes.resources import Object, Resource, lookup
from orchestrator.errors import BackendError

Schema = Mapping[str, Any]
GROUP_KIND = "x-kubernetes-group-version-kind"
OPEN = "x-kubernetes-preserve-unknown-fields"
PER_GROUP, WHOLE = "/openapi/v3/apis", "/openapi/v2"
"""Servers before 1.24 have only the second document, which has several MB."""


class Lacking(Struct, frozen=True):
    """A field of an object that its kind lacks."""

    path: tuple[str | int, ...]
    known: tuple[str, ...]
    """Sibling fields that the kind has."""

    def __str__(self) -> str:
        text = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in self.path)
        return text.removeprefix(".")


@dataclass
class KindSchemas:
    """The schemas of one cluster. Each document is read once."""

    api: ApiReader
    documents: dict[str, Mapping[str, Schema]] = field(default_factory=dict)
    """Path -> name -> schema; empty if the server does not have the document."""

    def of(self, resource: Resource) -> Schema | None:
        """None if the server does not publish it, or the user may not read it."""
        try:
            for path in (f"{PER_GROUP}/{resource.group}/{resource.version}", WHOLE):
                if (found := _named(self._read(path), resource)) is not None:
                    return found
        except BackendError:
            pass
        return None

    def _read(self, path: str) -> Mapping[str, Schema]:
        if path not in self.documents:
            try:
                document = self.api.read(path)
            except Missing:
                document = {}
            schemas = lookup(document, ("components", "schemas"))
            self.documents[path] = schemas or lookup(document, ("definitions",), {})
        return self.documents[path]


def _named(schemas: Mapping[str, Schema], resource: Resource) -> Schema | None:
    wanted = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    for schema in schemas.values():
        if wanted in schema.get(GROUP_KIND, ()):
            return schema
    return None


def lacking(item: Object, schema: Schema) -> Iterator[Lacking]:
    """The fields of `item` that are not in `schema`, without fields inside such fields."""
    own = {"apiVersion", "kind", "metadata"}  # every kind has these, even if its schema omits them
    yield from _lacking({key: one for key, one in item.items() if key not in own}, schema, ())


def _lacking(value: Any, schema: Schema, path: tuple[str | int, ...]) -> Iterator[Lacking]:
    if isinstance(value, Mapping):
        yield from _of_mapping(value, schema, path)
    elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for at, one in enumerate(value):
            yield from _lacking(one, schema["items"], (*path, at))


def _of_mapping(
    value: Mapping[str, Any], schema: Schema, path: tuple[str | int, ...]
) -> Iterator[Lacking]:
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    for key, one in value.items():
        if isinstance(properties, Mapping) and key in properties:
            yield from _lacking(one, properties[key], (*path, key))
        elif isinstance(others, Mapping):
            yield from _lacking(one, others, (*path, key))
        elif isinstance(properties, Mapping) and not schema.get(OPEN) and not others:
            yield Lacking((*path, key), tuple(properties))


def has(schema: Schema, path: Sequence[str]) -> bool:
    """Whether a kind has a field. True if the schema allows any field at that place."""
    for key in path:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return True
        if key not in properties:
            return bool(schema.get(OPEN))
        schema = properties[key]
    return True
