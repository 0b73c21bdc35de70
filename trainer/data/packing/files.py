"""Finds the files of a data spec; a glob that matches nothing is an error of the trainer."""

from typing import Literal

from orchestrator.contract.files.data_files import Format, Found, UnusableFiles
from orchestrator.contract.files.data_files import find as find_by_the_rules
from orchestrator.errors import TrainingError


def find(pattern: str, format_: Format | Literal["auto"], key: str) -> Found:
    """The files that `pattern` matches.

    Raises:
        TrainingError: all files are empty or none exists, or their formats differ. The message
            names `key`, the key of the spec.
    """
    try:
        return find_by_the_rules(pattern, format_)
    except UnusableFiles as exc:
        raise TrainingError(f"{key} {pattern!r} {exc.said}", fix=exc.fix) from exc
