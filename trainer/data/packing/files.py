"""Finds the files of a data spec for the trainer, which refuses a glob that matches nothing."""

from typing import Literal

from orchestrator.contract.files.data_files import Format, Found, UnusableFiles
from orchestrator.contract.files.data_files import find as find_by_the_rules
from orchestrator.errors import TrainingError


def find(pattern: str, format_: Format | Literal["auto"], key: str) -> Found:
    """The files that `pattern` matches.

    Raises:
        TrainingError: when there are none with anything in them, or some of several formats;
            it names the key of the spec.
    """
    try:
        return find_by_the_rules(pattern, format_)
    except UnusableFiles as exc:
        raise TrainingError(f"{key} {pattern!r} {exc.said}", fix=exc.fix) from exc
