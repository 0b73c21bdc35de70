"""Where `render/pod_fields.yaml` comes from: the models of the Python client, which are generated
from Kubernetes' own OpenAPI document. `python -m tests.backends.kubernetes.pod_fields` rewrites
the file."""

import importlib
import inspect
import json
import re
from importlib.metadata import version
from typing import Any

from kubernetes.client import models

from orchestrator.backends.kubernetes.render.pod_schema import FILE, LIST, MAP

HEAD = ("source", "kubernetes", "root")
ROOT = "V1PodTemplateSpec"
QUANTITIES = ("limits", "requests", "overhead", "sizeLimit", "divisor", "capacity")
"""Fields that are text or a number, which the models call text."""
WORDS = {"datetime": "str", "object": "any"}
"""`object` is a number of a port, or its name."""


def pod_fields() -> dict[str, Any]:
    types: dict[str, dict[str, str]] = {}
    _collect(ROOT, types)
    source = f"models of kubernetes {version('kubernetes')}, the Python client"
    made = {"source": source, "kubernetes": _kubernetes(), "root": _short(ROOT)}
    return {**made, "types": dict(sorted(types.items()))}


def _kubernetes() -> str:
    """The version that the models are of, as each of them says."""
    text = inspect.getsource(importlib.import_module(models.V1PodTemplateSpec.__module__))
    found = re.search(r"OpenAPI document: release-(\S+)", text)
    assert found is not None
    return found[1]


def _collect(name: str, types: dict[str, dict[str, str]]) -> None:
    if _short(name) in types:
        return
    model: Any = getattr(models, name)
    fields = {model.attribute_map[key]: kind for key, kind in model.openapi_types.items()}
    types[_short(name)] = {key: _kind(key, kind) for key, kind in sorted(fields.items())}
    for kind in fields.values():
        for below in re.findall(r"\b(?:Core)?V1\w+", kind):
            _collect(below, types)


def _short(name: str) -> str:
    return re.sub("^(Core)?V1", "", name)


def _kind(key: str, kind: str) -> str:
    if kind.startswith("List["):
        return LIST + _kind(key, kind[5:-1])
    if kind.startswith("Dict["):
        return MAP + _kind(key, kind[5:-1].partition(", ")[2])
    if kind == "str" and key in QUANTITIES:
        return "quantity"
    return WORDS.get(kind, _short(kind))


def written() -> str:
    """A type a line, so that a difference can be read."""
    made = pod_fields()
    head = "".join(f"{key}: {json.dumps(made[key])}\n" for key in HEAD)
    lines = (f"  {name}: {{{_fields(one)}}}\n" for name, one in made["types"].items())
    return f"# Written by tests/backends/kubernetes/pod_fields.py.\n{head}types:\n{''.join(lines)}"


def _fields(kinds: dict[str, str]) -> str:
    return ", ".join(f"{key}: {kind}" for key, kind in kinds.items())


if __name__ == "__main__":
    FILE.write_text(written())
