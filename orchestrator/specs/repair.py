"""A document with schema errors, repaired so that its plan can be judged too.

A user who corrects all reported errors must not meet the next ones only then. A repair takes a
wrong value out where the planner does not read it, or leaves it to the planner (`auto`). Whatever
the planner then refuses, it would also refuse with a correct value there. With any other error the
plan cannot be judged.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from msgspec import UNSET, UnsetType

from orchestrator.contract.codec import UNKNOWN_KEY, Problem
from orchestrator.errors import SpecError
from orchestrator.specs.keys import key_at
from orchestrator.yaml_document import Document

NOT_PLANNED = (
    *("name", "notify"),
    *(f"checkpoint.{key}" for key in ("every_steps", "every", "keep", "keep_every", "verify")),
    *(f"data.{key}" for key in ("files", "format", "column", "validation")),
    *(f"resilience.{key}" for key in ("failure_classes", "policy", "web", "max_restarts")),
    *(f"resilience.{key}_timeout" for key in ("hang", "checkpoint", "init", "agent")),
    *(f"train.{key}" for key in ("steps", "seed", "schedule", "grad_clip", "spike", "profile")),
    *(f"train.{key}" for key in ("max_bad_steps", "eval_every", "eval_sequences", "wandb")),
    *(f"train.optimizer.{key}" for key in ("lr", "weight_decay", "beta1", "beta2", "eps")),
)
"""Keys that change no plan, with all keys inside."""
REQUIRED = {"name": "job", "data.files": "{stdlib}/*.py", "train.steps": 1_000_000}
"""Values for those of them that must be given; so many steps are enough for every warm-up."""
MEANT = re.compile(r"did you mean ([a-z_0-9.]+)\?")


def repaired(document: Document, problems: Sequence[Problem]) -> Document | None:
    """A copy of `document` without `problems`; None if its plan cannot be judged."""
    copy = Document(
        document.source,
        deepcopy(document.data),
        {**document.places},
        {**document.overridden},
        from_user={**document.from_user},
    )
    # A missing key may be the one that a misspelled key means, so those are moved first.
    for problem in sorted(problems, key=lambda one: one.words != UNKNOWN_KEY):
        # A list is not read in part, so an unknown key in one of its items is as a wrong value.
        renames = problem.words == UNKNOWN_KEY and "[" not in problem.path
        done = _rename if renames else _replace
        if not done(copy, problem):
            return None
    return copy


def _rename(document: Document, problem: Problem) -> bool:
    """Move the value of an unknown key to the key that it stands for; drop it if that is open."""
    taken = _take(document.data, problem.path)
    if isinstance(taken, UnsetType):
        return False
    meant = MEANT.fullmatch(problem.fix)
    if meant is not None and isinstance(taken, dict) and not _takes_keys(meant[1]):
        return True  # A guess by the name alone, which the value shows to be wrong.
    if meant is not None and "run" in document.data and meant[1].split(".")[0] not in document.data:
        return True  # It may be a section of the bundled trainer, which is refused beside run.
    if meant is not None and isinstance(_at(document.data, meant[1]), UnsetType):
        document.places[meant[1]] = document.place_of(problem.path)
        return _put(document.data, meant[1], taken)
    return True


def _takes_keys(path: str) -> bool:
    try:
        key = key_at(path)
    except SpecError:
        return True
    return key.inside is not None or "pairs" in key.kind


def _replace(document: Document, problem: Problem) -> bool:
    path = problem.path
    for key in NOT_PLANNED:
        if path == key or path.startswith((f"{key}.", f"{key}[")):
            _take(document.data, key)
            return key not in REQUIRED or _put(document.data, key, REQUIRED[key])
    try:
        is_free = "auto" in key_at(path).kind.split(" | ")
    except SpecError:
        return False
    return is_free and _put(document.data, path, "auto")


def _at(data: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(data, dict) or key not in data:
            return UNSET
        data = data[key]
    return data


def _take(data: Any, path: str) -> Any:
    """Remove the value at `path` and return it; UNSET if there is none."""
    above, _, key = path.rpartition(".")
    inside = _at(data, above) if above else data
    return inside.pop(key, UNSET) if isinstance(inside, dict) else UNSET


def _put(data: Any, path: str, value: Any) -> bool:
    """Whether there is a place for `value` at `path`."""
    *above, key = path.split(".")
    for word in above:
        data = data.setdefault(word, {})
        if not isinstance(data, dict):
            return False
    data[key] = value
    return True
