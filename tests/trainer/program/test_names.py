"""A program gets its own `trainer`, `orchestrator` and `ndctl`; ndctl's modules keep working."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.run_module import command

pytestmark = pytest.mark.process
RANK = """
import inspect, sys
import ndctl.rank.link, orchestrator.contract.files.env, trainer.program.run
ndctl.rank.link.current().step = 41
inspect.getmodule(sys._getframe())
from trainer.program.names import give_back_names
give_back_names()
sys.path.insert(0, sys.argv[1])
import json
import program
print(json.dumps(program.FOUND))
"""
LOADED = """
import json, sys
import trainer.program.run, trainer.rank.environment
print(json.dumps({name: module.__file__ for name, module in sys.modules.items()
    if name.partition(".")[0] in ("ndctl", "orchestrator", "trainer")}))
"""


def python(folder: Path, code: str, *args: str) -> Any:
    """What `code` prints, in a process that has ndctl's packages as a rank has."""
    (folder / "code_of_test.py").write_text(code)
    done = subprocess.run(
        ["env", f"PYTHONPATH={folder}", *command(sys.executable, "code_of_test"), *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def found_by(tmp_path: Path, program: str, **files: str) -> Any:
    """`FOUND` of a program with these files beside it. Two underscores in a name mean a slash."""
    home = tmp_path / "home"
    for name, text in {"program": program, **files}.items():
        path = home / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return python(tmp_path, RANK, str(home))


@pytest.mark.parametrize("name", ["trainer", "orchestrator", "ndctl"])
def test_a_file_of_the_program_wins(tmp_path: Path, name: str) -> None:
    program = f"import {name}\nFOUND = {name}.MINE, {name}.__file__"
    found = found_by(tmp_path, program, **{name: "MINE = 7"})
    assert found == [7, str(tmp_path / "home" / f"{name}.py")]


def test_a_folder_without_init_wins_even_over_an_installed_ndctl(tmp_path: Path) -> None:
    program = "import inspect, sys, trainer.engine, orchestrator.loop\n"
    program += "inspect.getmodule(sys._getframe())  # looks at the file of each module\n"
    program += "FOUND = trainer.engine.MINE, orchestrator.loop.MINE"
    files = {"trainer__engine": "MINE = 7", "orchestrator__loop": "import trainer.engine\nMINE = 8"}
    assert found_by(tmp_path, program, **files) == [7, 8]


def test_a_search_path_that_the_program_extends_itself_counts(tmp_path: Path) -> None:
    program = "import os, sys\n"
    program += "sys.path.append(os.path.join(os.path.dirname(__file__), 'src'))\n"
    program += "import trainer\nFOUND = trainer.MINE"
    assert found_by(tmp_path, program, src__trainer="MINE = 7") == 7


def test_a_package_of_an_editable_install_wins(tmp_path: Path) -> None:
    """Such an install adds a finder, which Python asks after its own."""
    program = """
import sys
from importlib.util import spec_from_file_location
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, FILE) if name == "trainer" else None
FILE = __file__.replace("program.py", "checkout/trainer.py")
sys.meta_path.append(Finder)
import trainer
FOUND = trainer.MINE
"""
    assert found_by(tmp_path, program, checkout__trainer="MINE = 7") == 7


def test_without_a_module_of_its_own_a_program_gets_ndctls_with_their_state(tmp_path: Path) -> None:
    program = """
import sys
assert "ndctl" not in sys.modules
import ndctl, trainer, orchestrator.contract.files.env
from ndctl.rank.link import current
ndctl.latest_checkpoint  # imports a module of ndctl that was not there before
from ndctl.rank import resuming
FOUND = [current().step, resuming.current is current, trainer.__doc__[:19],
    ndctl.__spec__.name, ndctl.__spec__.origin == ndctl.__file__]
"""
    assert found_by(tmp_path, program) == [41, True, "The bundled trainer", "ndctl", True]


def test_what_a_rank_uses_imports_nothing_by_name_later(tmp_path: Path) -> None:
    """`import trainer` in a function would give ndctl the program's module."""
    files: dict[str, str] = python(tmp_path, LOADED)
    assert {"trainer.program.run", "trainer.rank.evidence.flight", "ndctl.rank.link"} < files.keys()
    late = [
        f"{name}: {one}"
        for name, file in files.items()
        if name != "ndctl"  # imports what the program itself asks of it
        for function in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for one in imports(node)
        if one.partition(".")[0] in ("orchestrator", "trainer")
    ]
    assert not late


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
