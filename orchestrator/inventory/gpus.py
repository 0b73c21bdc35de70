"""Finds the hardware profile of a node's GPUs from what its scheduler reports about them.

It uses tables of patterns. A site's own table goes before ndctl's.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.devices import PROFILE_NAMES
from orchestrator.inventory.profile import Profile
from orchestrator.inventory.profiles import load_profile, unknown_profile
from orchestrator.yaml_document import decode_document, parse, read_text

EXAMPLE = "gpus: [{type: h100, profile: h100-sxm-80gb}]"


class GpuEntry(Struct, frozen=True, kw_only=True):
    profile: str | None
    """Name of a profile, or path of its file relative to the table's folder. None: the GPUs are
    known but have no profile, so later entries are not tried."""
    type: str | None = None
    feature: str | None = None

    def __post_init__(self) -> None:
        problems = [
            Problem(path=key, value=pattern, limit="a regular expression", fix="correct it")
            for key, pattern in (("type", self.type), ("feature", self.feature))
            if pattern is not None and not _compiles(pattern)
        ]
        if self.type is None and self.feature is None:
            problems.append(Problem(path="type", limit="given, or feature", fix="add one of them"))
        name = self.profile
        if name and name not in PROFILE_NAMES and not name.endswith((".yaml", ".yml")):
            problems.append(unknown_profile(name))
        if problems:
            raise Invalid(problems)

    def fits(self, gpu_type: str | None, features: Sequence[str]) -> bool:
        kind = (gpu_type or "").lower()
        if self.type is not None and not re.fullmatch(self.type, kind):
            return False
        words = [kind, *(feature.lower() for feature in features)]
        return self.feature is None or any(re.fullmatch(self.feature, word) for word in words)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


class _File(Struct, frozen=True, kw_only=True):
    gpus: tuple[GpuEntry, ...]


@dataclass
class GpuTable:
    """Finds profiles, with a cache: a cluster has thousands of nodes of few kinds."""

    entries: tuple[tuple[GpuEntry, Path], ...]
    """Entries, each with the file that it comes from."""

    def __post_init__(self) -> None:
        self._found: dict[tuple[str | None, tuple[str, ...]], Profile | None] = {}

    def profile_of(self, gpu_type: str | None, features: tuple[str, ...]) -> Profile | None:
        key = (gpu_type, features)
        if key not in self._found:
            self._found[key] = self._look_up(gpu_type, features)
        return self._found[key]

    def _look_up(self, gpu_type: str | None, features: tuple[str, ...]) -> Profile | None:
        for entry, source in self.entries:
            if entry.fits(gpu_type, features):
                name = entry.profile
                if name is None:
                    return None
                own = name.endswith((".yaml", ".yml"))
                return load_profile(str(source.parent / name) if own else name)
        return None


def tables(files: Iterable[Path]) -> GpuTable:
    """The table of all `files`. Earlier files go first.

    Raises:
        SpecError: with all problems of a file, each with its place.
    """
    return GpuTable(entries=tuple((entry, path) for path in files for entry in _read(path)))


def _read(path: Path) -> tuple[GpuEntry, ...]:
    document = parse(read_text(path, f"it can be as short as {EXAMPLE}"), str(path))
    return decode_document(_File, document).gpus
