"""The lists of tested versions: requirements.lock for ndctl, requirements-dev.lock for tests."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
CUDA_ONLY = re.compile(r"nvidia-|cuda-|triton$")
"""Packages that only a CUDA build of torch needs; the lists serve both builds."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned(name: str) -> dict[str, str]:
    """Package name -> its line."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line[:1] not in ("", "#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", line) for line in lines)
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def needed_by(*wanted: str) -> set[str]:
    """Every package that `wanted` needs on this platform, by the metadata of the packages."""
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(package) for package in wanted]
    while left:
        package = left.pop()
        key = (canonicalize_name(package.name), frozenset(package.extras))
        if key in seen:
            continue
        seen.add(key)
        extras = {*package.extras, ""}
        for text in distribution(package.name).requires or ():
            more = Requirement(text)
            if more.marker is None or any(more.marker.evaluate({"extra": x}) for x in extras):
                left.append(more)
    return {name for name, _ in seen}


def test_the_runtime_list_has_exactly_the_packages_that_ndctl_needs() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra, more in project["optional-dependencies"].items():
        wanted += [] if extra in ("dev", "docs") else more
    needed = needed_by(*wanted)
    assert needed - {name for name in needed if CUDA_ONLY.match(name)} == (
        pinned("requirements.lock").keys()
    )


def test_both_lists_have_the_same_versions() -> None:
    everything, runtime = pinned("requirements-dev.lock"), pinned("requirements.lock")
    assert runtime.items() <= everything.items()


def test_the_image_contains_no_test_tools() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    tools = [Requirement(package) for package in (*extras["dev"], *extras["docs"])]
    names = {canonicalize_name(package.name) for package in tools} - {"ndctl"}
    assert {"pytest", "mypy", "ruff", "hypothesis", "mkdocs"} <= names
    assert not names & pinned("requirements.lock").keys()


def test_the_tested_versions_are_within_the_declared_ranges() -> None:
    project, tested = PROJECT["project"], pinned("requirements-dev.lock")
    declared = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        declared += extra
    for package in map(Requirement, declared):
        if package.name != "ndctl":
            version = tested[canonicalize_name(package.name)].partition("==")[2]
            assert Version(version) in package.specifier, package


def test_the_image_installs_the_runtime_list_on_a_base_pinned_by_digest() -> None:
    steps = (ROOT / "manifests/image/Containerfile").read_text()
    (base,) = re.findall(r"^FROM (\S+)", steps, re.MULTILINE)
    assert re.fullmatch(
        r"docker\.io/library/python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base
    )
    copied = {
        name
        for line in re.findall(r"^COPY (.+)", steps, re.MULTILINE)
        for name in line.split()[:-1]
    }
    assert "requirements.lock" in copied
    assert "requirements-dev.lock" not in copied
    admitted = re.findall(r"^!(.+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(admitted) == copied
    assert all((ROOT / name).exists() for name in copied)
