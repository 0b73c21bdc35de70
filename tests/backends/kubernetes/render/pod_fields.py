"""Makes `render/pod_fields.yaml` from the models of the Python client.

The models are generated from the OpenAPI document of Kubernetes.
`python -m tests.backends.kubernetes.render.pod_fields` rewrites the file.
"""

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
"""Fields that are text or a number, although the models call them text."""
TYPES = {"datetime": "str", "object": "any"}
"""Type of a model -> our type. `object` is the number or the name of a port."""


def pod_fields() -> dict[str, Any]:
    types: dict[str, dict[str, str]] = {}
    _collect(ROOT, types)
    source = f"models of kubernetes {version('kubernetes')}, the Python client"
    made = {"source": source, "kubernetes": _kubernetes(), "root": _short(ROOT)}
    return {**made, "types": dict(sorted(types.items()))}


def _kubernetes() -> str:
    """The Kubernetes version in the docstrings of the models."""
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
    return TYPES.get(kind, _short(kind))


def written() -> str:
    """One type per line, so that differences are readable."""
    made = pod_fields()
    head = "".join(f"{key}: {json.dumps(made[key])}\n" for key in HEAD)
    lines = (f"  {name}: {{{_fields(one)}}}\n" for name, one in made["types"].items())
    written_by = "# Written by tests/backends/kubernetes/render/pod_fields.py."
    return f"{written_by}\n{head}types:\n{''.join(lines)}"


def _fields(kinds: dict[str, str]) -> str:
    return ", ".join(f"{key}: {kind}" for key, kind in kinds.items())


if __name__ == "__main__":
    FILE.write_text(written())
