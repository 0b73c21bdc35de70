"""A program gets its own `trainer`, `orchestrator` and `ndctl`; ndctl's modules keep working."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.run_module import command

pytestmark = pytest.mark.process
RANK = """
import inspect, json, os, sys
import ndctl.rank.link, orchestrator.contract.files.env, trainer.program.run
import trainer.rank.environment
from trainer.program.names import give_back_names
print(json.dumps({name: module.__file__ for name, module in sys.modules.items()
    if name.partition(".")[0] in ("ndctl", "orchestrator", "trainer")}), flush=True)
for home in sys.stdin:
    if pid := os.fork():
        if os.waitpid(pid, 0)[1]:
            print("null", flush=True)
        continue
    ndctl.rank.link.current().step = 41
    inspect.getmodule(sys._getframe())
    give_back_names()
    sys.path.insert(0, home.strip())
    import program
    print(json.dumps(program.FOUND), flush=True)
    os._exit(0)
"""
"""A rank that prints the files of ndctl's modules. Then it forks for each program, because
importing takes seconds, and prints what the program found."""


@dataclass
class Rank:
    process: "subprocess.Popen[str]"
    errors: Path

    def answer(self) -> Any:
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline() or "null")
        assert answer is not None, self.errors.read_text()
        return answer

    def found_by(self, tmp_path: Path, program: str, **files: str) -> Any:
        """`FOUND` of a program with these files beside it. Two underscores in a name mean a
        slash."""
        home = tmp_path / "home"
        for name, text in {"program": program, **files}.items():
            path = home / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert self.process.stdin is not None
        print(home, file=self.process.stdin, flush=True)
        return self.answer()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rank, dict[str, str]]]:
    """A rank that has ndctl's packages as any rank has, and the files of its modules."""
    folder = tmp_path_factory.mktemp("rank")
    (folder / "code_of_test.py").write_text(RANK)
    errors = folder / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen(
            ["env", f"PYTHONPATH={folder}", *command(sys.executable, "code_of_test")],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        ) as process,
    ):
        rank = Rank(process, errors)
        yield rank, rank.answer()


@pytest.fixture
def rank(started: tuple[Rank, dict[str, str]]) -> Rank:
    return started[0]


@pytest.mark.parametrize("name", ["trainer", "orchestrator", "ndctl"])
def test_a_file_of_the_program_wins(rank: Rank, tmp_path: Path, name: str) -> None:
    program = f"import {name}\nFOUND = {name}.MINE, {name}.__file__"
    found = rank.found_by(tmp_path, program, **{name: "MINE = 7"})
    assert found == [7, str(tmp_path / "home" / f"{name}.py")]


def test_a_folder_without_init_wins_even_over_an_installed_ndctl(
    rank: Rank, tmp_path: Path
) -> None:
    program = "import inspect, sys, trainer.engine, orchestrator.loop\n"
    program += "inspect.getmodule(sys._getframe())  # looks at the file of each module\n"
    program += "FOUND = trainer.engine.MINE, orchestrator.loop.MINE"
    files = {"trainer__engine": "MINE = 7", "orchestrator__loop": "import trainer.engine\nMINE = 8"}
    assert rank.found_by(tmp_path, program, **files) == [7, 8]


def test_a_search_path_that_the_program_extends_itself_counts(rank: Rank, tmp_path: Path) -> None:
    program = "import os, sys\n"
    program += "sys.path.append(os.path.join(os.path.dirname(__file__), 'src'))\n"
    program += "import trainer\nFOUND = trainer.MINE"
    assert rank.found_by(tmp_path, program, src__trainer="MINE = 7") == 7


def test_a_package_of_an_editable_install_wins(rank: Rank, tmp_path: Path) -> None:
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
    assert rank.found_by(tmp_path, program, checkout__trainer="MINE = 7") == 7


def test_without_a_module_of_its_own_a_program_gets_ndctls_with_their_state(
    rank: Rank, tmp_path: Path
) -> None:
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
    assert rank.found_by(tmp_path, program) == [41, True, "The bundled trainer", "ndctl", True]


def test_what_a_rank_uses_imports_nothing_by_name_later(
    started: tuple[Rank, dict[str, str]],
) -> None:
    """`import trainer` in a function would give ndctl the program's module."""
    _, files = started
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
