"""Finds other installed distributions that have a package `orchestrator`, `trainer` or `ndctl`.

PyPI has distributions of these names. pip installs one over another without a word.
"""

import base64
import functools
import hashlib
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
    if Path(str(other.locate_file(package))).resolve() != home / package:
        found = f"{who}. ndctl uses its own, and your scripts get the one of {name}"
        return Finding(what=package, verdict="note", found=found)
    own = metadata.distribution(OWN)
    remedy = (
        f"install ndctl in a virtual environment of its own; or, without {name}: python -m pip"
        f" uninstall {name} && python -m pip install --force-reinstall --no-deps"
        f" {OWN}=={own.version}"
    )
    if lost := _overwritten(package, own):
        more = f" and {len(lost) - 1} more files" if len(lost) > 1 else ""
        found = (
            f"{who}, and has overwritten ndctl's {lost[0]}{more} in {home}: jobs fail to import it"
        )
        return Finding(what=package, verdict="stops", found=found, fix=remedy)
    found = f"{who}, in the same folder {home}: the next upgrade of one overwrites the other"
    return Finding(what=package, verdict="warns", found=found, fix=remedy)


def _overwritten(package: str, own: metadata.Distribution) -> list[str]:
    """Files of ndctl that are not those that pip has installed."""
    recorded = (file for file in own.files or () if file.parts[0] == package and file.hash)
    return sorted(str(file) for file in recorded if not _is_as_recorded(file))


def _is_as_recorded(file: metadata.PackagePath) -> bool:
    assert file.hash is not None
    try:
        digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
    except OSError:  # removed, together with the other distribution
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value
