"""The two lists of tested versions: for running ndctl, and for its tests."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
OF_CUDA = re.compile(r"nvidia-|cuda-|triton$")
"""Packages that only a CUDA build of torch needs; the lists serve both builds."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(name: str) -> dict[str, str]:
    """Each package with its line."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line[:1] not in ("", "#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def needed_by(*wanted: str) -> set[str]:
    """Every package that `wanted` needs on this platform, by the metadata of the packages."""
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(one) for one in wanted]
    while left:
        one = left.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key in seen:
            continue
        seen.add(key)
        extras = {*one.extras, ""}
        for text in distribution(one.name).requires or ():
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
    assert needed - {name for name in needed if OF_CUDA.match(name)} == (
        pins("requirements.lock").keys()
    )


def test_both_lists_have_the_same_versions() -> None:
    everything, runtime = pins("requirements-dev.lock"), pins("requirements.lock")
    assert runtime.items() <= everything.items()


def test_no_tool_of_the_tests_is_in_an_image() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    tools = [Requirement(one) for one in (*extras["dev"], *extras["docs"])]
    names = {canonicalize_name(one.name) for one in tools} - {"ndctl"}
    assert {"pytest", "mypy", "ruff", "hypothesis", "mkdocs"} <= names
    assert not names & pins("requirements.lock").keys()


def test_declared_versions_admit_the_tested_ones() -> None:
    project, tested = PROJECT["project"], pins("requirements-dev.lock")
    declared = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        declared += extra
    for one in map(Requirement, declared):
        if one.name != "ndctl":
            version = tested[canonicalize_name(one.name)].partition("==")[2]
            assert Version(version) in one.specifier, one


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
    let_in = re.findall(r"^!(.+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(let_in) == copied
    assert all((ROOT / name).exists() for name in copied)
