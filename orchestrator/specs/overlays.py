"""Files that are laid over a spec: `-f base.yaml -f site.yaml`.

Mappings are merged key by key, lists are replaced, and null removes a key, as in docker compose and
helm. Where null is a value of the key (`train.grad_clip: null`), it is that value.
"""

from pathlib import Path
from typing import Any

from orchestrator.contract.codec import Problem, join
from orchestrator.yaml_document import Document, Place, parse, read_text


def lay_over(document: Document, path: Path) -> None:
    """Merge the file at `path` into `document`. Its values keep their places.

    Raises:
        SpecError: the file cannot be read, or is not YAML.
    """
    over = parse(read_text(path, "an overlay has the keys of a spec that it changes"), str(path))
    document.problems += over.problems
    if over.data is None:  # a file with only comments
        return
    if not isinstance(over.data, dict):
        limit, fix = "a mapping of the keys that it changes", "for example train: {steps: 100}"
        problem = Problem(path="", value=over.data, limit=limit, fix=fix)
        document.problems.append((Place(str(path), 1), problem))
        return
    document.source = f"{document.source} with {path}"
    _merge(document, document.data, over, over.data, "")


def _merge(
    document: Document, into: dict[str, Any], over: Document, values: dict[str, Any], path: str
) -> None:
    for key, value in values.items():
        where = join(path, key)
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                _move(document, over, where, whole=False)
                into[key] = {}
            _merge(document, into[key], over, value, where)
        elif value is None and not _keeps_null(where):
            into.pop(key, None)
            _forget(document, where)
        else:
            _move(document, over, where, whole=True)
            into[key] = value


def _keeps_null(path: str) -> bool:
    """Whether null is a value of the key, or of a mapping of other programs' keys."""
    from orchestrator.specs.keys import ROOT, keys_inside

    key = ROOT
    for word in path.split("."):
        found = next((one for one in keys_inside(key) if one.name == word), None)
        if found is None:
            return key is not ROOT and key.kind.endswith(": any value pairs")
        key = found
    return "null" in key.kind.split(" | ")


def _move(document: Document, over: Document, path: str, *, whole: bool) -> None:
    """Take the place of `path` from the overlay; `whole`: also those of all values inside."""
    _forget(document, path)
    for one, place in over.places.items():
        if one == path or (whole and one.startswith((f"{path}.", f"{path}["))):
            document.places[one] = place


def _forget(document: Document, path: str) -> None:
    for one in [*document.places]:
        if one == path or one.startswith((f"{path}.", f"{path}[")):
            del document.places[one]
