"""How the source is arranged: what no linter checks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST = 15
"""Files of a room."""
TRAINER_MAY_IMPORT = ("orchestrator.contract", "orchestrator.errors")
ROOMS = sorted(
    path.parent for top in ("orchestrator", "trainer") for path in (ROOT / top).rglob("__init__.py")
)


def name(room: Path) -> str:
    return str(room.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{one.name}" for one in node.names)


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_a_room_has_one_subject_and_few_files(room: Path) -> None:
    assert len(list(room.glob("*.py"))) <= MOST
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert docstring, "its `__init__` says what it is about"


def test_the_trainer_imports_only_the_contract_of_the_orchestrator() -> None:
    found = {
        (name(path), one)
        for path in (ROOT / "trainer").rglob("*.py")
        for one in imported(path)
        if one.split(".")[0] == "orchestrator"
        and not any(f"{one}.".startswith(f"{allowed}.") for allowed in TRAINER_MAY_IMPORT)
    }
    assert not found
