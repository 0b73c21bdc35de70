"""Finds other installed distributions that have a package `orchestrator`, `trainer` or `ndctl`.

PyPI has distributions of these names. pip installs one over another without a word.
"""

import functools
from importlib import metadata
from pathlib import Path

from orchestrator.contract.check_results import Finding
from orchestrator.run_module import PACKAGES

OWN = "ndctl"
"""Our distribution."""
HOME = Path(__file__).resolve().parents[2]
"""Parent folder of the packages of this process."""


@functools.cache
def other_owners(home: Path = HOME) -> tuple[Finding, ...]:
    """A finding for each. It takes 0.2 s, because the file lists of all distributions are read."""
    owners = metadata.packages_distributions()
    return tuple(
        _finding(package, metadata.distribution(name), home)
        for package in PACKAGES
        for name in sorted({*owners.get(package, ())})
        if name and name.lower() != OWN
    )


def _finding(package: str, other: metadata.Distribution, home: Path) -> Finding:
    name, version = other.metadata["Name"], other.version
    who = f"{name} {version} has a package `{package}`, as ndctl has"
    if Path(str(other.locate_file(package))).resolve() == home / package:
        return Finding(
            what=package,
            verdict="warns",
            found=f"{who}, in {home}: pip has overwritten files of one with files of the other, so"
            " either may fail when it is imported",
            fix="install ndctl in a virtual environment of its own; or, without"
            f" {name}: python -m pip uninstall {name} && python -m pip install --force-reinstall"
            f" --no-deps {OWN}=={metadata.version(OWN)}",
        )
    return Finding(
        what=package,
        verdict="note",
        found=f"{who}. ndctl uses its own, and your scripts get the one of {name}",
    )
