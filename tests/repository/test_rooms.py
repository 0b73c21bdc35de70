"""Rules about folders and imports that no linter checks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_FILES = 15
"""Largest number of Python files in a folder."""
TRAINER_MAY_IMPORT = ("orchestrator.contract", "orchestrator.errors")
ROOMS = ("ndctl", "orchestrator", "trainer", "benchmarks")


def folders(*tops: str) -> list[Path]:
    return sorted(path.parent for top in tops for path in (ROOT / top).rglob("__init__.py"))


def name(folder: Path) -> str:
    return str(folder.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{one.name}" for one in node.names)


def test_a_folder_has_few_files() -> None:
    many = {name(each): len(list(each.glob("*.py"))) for each in folders(*ROOMS, "tests")}
    assert {each: files for each, files in many.items() if files > MOST_FILES} == {}


@pytest.mark.parametrize("folder", folders(*ROOMS), ids=name)
def test_a_room_has_a_docstring(folder: Path) -> None:
    """Folders of tests have the names of the rooms that they test."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert docstring, "its `__init__` has a docstring that says its subject"


def test_the_trainer_imports_only_the_contract_of_the_orchestrator() -> None:
    found = {
        (name(path), one)
        for path in (ROOT / "trainer").rglob("*.py")
        for one in imported(path)
        if one.split(".")[0] == "orchestrator"
        and not any(f"{one}.".startswith(f"{allowed}.") for allowed in TRAINER_MAY_IMPORT)
    }
    assert not found
