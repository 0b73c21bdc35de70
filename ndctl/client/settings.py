"""Python values as the `KEY=VALUE` words of `--set`, and specs that are in no file."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.drills import Drill, parse_drill
from orchestrator.contract.read_json import read_json
from orchestrator.errors import SpecError

if TYPE_CHECKING:
    from orchestrator.load import Written

Spec = str | os.PathLike[str] | Mapping[str, Any]
"""A spec file, or the same keys and values as a mapping."""
SOURCE = "spec"
"""Place of the problems of a mapping."""


def written_of(spec: Spec, overrides: Sequence[str]) -> "Written":
    """Raises SpecError with everything that is wrong."""
    from orchestrator.load import read_written, written_from

    if isinstance(spec, Mapping):
        return written_from(_plain(dict(spec), SOURCE), SOURCE, overrides, os.environ)
    if not isinstance(spec, str | os.PathLike):
        raise SpecError(
            f"the spec is {spec!r}", fix="give the path of a file, or a dict with its keys"
        )
    return read_written(Path(spec), overrides, os.environ)


def overrides_of(values: Mapping[str, Any] | None, backend: str | None) -> tuple[str, ...]:
    """The words of `--set`. A string stays a string: "100" is not a number.

    Raises:
        SpecError: with each key and value that cannot be in a spec.
    """
    if not isinstance(values, Mapping | None):
        raise SpecError(f"set is {values!r}", fix='give a dict such as {"train.steps": 100}')
    given = {**(values or {}), **({} if backend is None else {"cluster.backend": backend})}
    wrong = [
        f"set: {key!r}: must be a key such as train.steps"
        for key in given
        if not isinstance(key, str) or "=" in key
    ]
    words = []
    for key, value in given.items():
        try:
            words.append(f"{key}={_json(value)}")
        except (TypeError, ValueError) as exc:
            wrong.append(f"set: {key}: {exc}")
    if wrong:
        raise SpecError("\n".join(wrong), fix="give numbers, strings, booleans, lists and dicts")
    return tuple(words)


def drills_of(texts: Sequence[str]) -> tuple[Drill, ...]:
    """Raises SpecError with each text that is not a drill."""
    if isinstance(texts, str):
        raise SpecError(f"drills is {texts!r}, a text", fix=f"give a list: drills=[{texts!r}]")
    found, wrong = [], list[Problem]()
    for number, text in enumerate(texts, 1):
        try:
            found.append(parse_drill(text, number))
        except Invalid as exc:
            wrong += exc.problems
    if wrong:
        raise SpecError("\n".join(str(one) for one in wrong))
    return tuple(found)


def _plain(value: Any, place: str) -> Any:
    try:
        return read_json(_json(value))
    except (TypeError, ValueError) as exc:
        raise SpecError(
            f"{place}: {exc}", fix="give numbers, strings, booleans, lists and dicts"
        ) from exc


def _json(value: Any) -> str:
    """JSON, which is also YAML. Not ASCII alone, because YAML has no surrogate pairs."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_known)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _known(value: Any) -> Any:
    """Values of NumPy and pathlib, which notebooks often have."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}, which a spec cannot hold")


def warnings_of(texts: Iterator[str] | Sequence[str]) -> None:
    """Issue Python warnings about a job."""
    import warnings

    for text in texts:
        warnings.warn(text, UserWarning, stacklevel=4)
