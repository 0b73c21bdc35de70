"""The user's program is checked before anything is queued."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from orchestrator.app.submission.own_program import Asked, write
from orchestrator.app.submission.program_check import look_at_program
from orchestrator.contract.codec import decode
from orchestrator.contract.spec.job_spec import ScriptSpec
from orchestrator.errors import SpecError


def problems(folder: Path, run: dict[str, Any], path: str = "/usr/bin:/bin") -> list[str]:
    spec: ScriptSpec = decode(ScriptSpec, {"name": "a", "run": {"workdir": str(folder), **run}})
    return [str(problem) for problem in look_at_program(spec, {"PATH": path}).problems]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "broken.py").write_text("x = 1\nfor\n")
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\0\1")
    (tmp_path / "work.sh").write_text("#!/bin/sh\n")
    return tmp_path


@pytest.mark.parametrize(
    "run", [{"script": "train.py"}, {"module": "train"}, {"module": "json"}, {"program": "sh"}]
)
def test_programs_that_exist_are_fine(folder: Path, run: dict[str, Any]) -> None:
    assert problems(folder, run) == []


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"script": "trian.py"}, "No such file or directory"),
        ({"script": "broken.py"}, "line 2: invalid syntax"),
        (
            {"script": "binary.py"},
            "start it as a program: ndctl run -- --no-python ./binary.py, or",
        ),
        ({"module": "nowhere.train"}, "nowhere is neither in"),
        ({"program": "./work.sh"}, "chmod +x"),
        ({"program": "no-such-program"}, "an executable file, or a name in PATH"),
        ({"script": "train.py", "workdir": "/nowhere"}, "mkdir -p /nowhere"),
    ],
)
def test_programs_that_cannot_start_are_refused(
    folder: Path, run: dict[str, Any], words: str
) -> None:
    found = problems(folder, run)
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("script", "fix"),
    [
        ("torchrun", "write run: {script: train.py, args: [...]}; ndctl starts it on each rank,"),
        (
            "torchrun --nproc-per-node 2 train.py --lr 1",
            'write run: {script: train.py, args: ["--lr", "1"]}; ndctl starts it on each rank,'
            " without torchrun",
        ),
        ("/usr/bin/accelerate launch train.py", "{script: train.py}; ndctl starts it on each rank"),
        ("python -m package.train", "write run: {module: package.train}; ndctl starts it"),
        ("train.py --lr 1", 'write run: {script: train.py, args: ["--lr", "1"]}; ndctl starts'),
        ("\u201ctrain.py\u201d", 'write "train.py": YAML knows no typographic quotes'),
        ("my train.py", "there are binary.py, broken.py, train.py"),
    ],
)
def test_a_command_line_in_place_of_a_script_is_told_where_its_words_belong(
    folder: Path, script: str, fix: str
) -> None:
    (problem,) = problems(folder, {"script": script})
    assert fix in problem


def test_a_command_in_place_of_a_script_is_answered_with_what_to_type(folder: Path) -> None:
    """As `ndctl run -- litgpt pretrain` and `ndctl run -- bash train.sh`: litgpt is Python."""
    tool = folder / "litgpt"
    tool.write_text("#!/usr/bin/python3\nimport sys\nsys.exit(0)\n")
    tool.chmod(0o755)
    (found,) = problems(Path("/"), {"script": "litgpt"}, path=str(folder))
    assert f"ndctl run -- {tool}" in found
    assert problems(folder, {"script": str(tool)}) == []
    (found,) = problems(folder, {"script": "sh"})
    assert "ndctl run -- --no-python sh" in found
    (found,) = problems(folder, {"script": "sbatch"})
    assert "ndctl submits a job itself" in found


@pytest.mark.parametrize(
    ("run", "fix"),
    [
        (
            {"script": "sh", "args": ["-c", 'python acc.py "$HOME"']},
            """ndctl run -- --no-python sh -c 'python acc.py "$HOME"', or program: sh in a spec""",
        ),
        (
            {"script": "binary.py", "args": ["--name", "it's"]},
            """ndctl run -- --no-python ./binary.py --name 'it'"'"'s', or program: ./binary.py""",
        ),
        (
            {"script": "python train.py", "args": ["--name", "a b"]},
            'write run: {script: train.py, args: ["--name", "a b"]}; ndctl',
        ),
    ],
)
def test_what_to_type_has_all_arguments_in_quotes_of_the_shell(
    folder: Path, run: dict[str, Any], fix: str
) -> None:
    (found,) = problems(folder, run)
    assert fix in found


def test_what_to_type_for_a_python_command_has_its_arguments(folder: Path) -> None:
    tool = folder / "litgpt"
    tool.write_text("#!/usr/bin/python3\nimport sys\n")
    tool.chmod(0o755)
    run = {"script": "litgpt", "args": ["pretrain", "--out", "$HOME/a b"]}
    (found,) = problems(Path("/"), run, path=str(folder))
    assert f"ndctl run -- {tool} pretrain --out '$HOME/a b', or script: {tool} in a spec" in found


def test_a_script_that_the_user_may_not_read_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # the folders of pytest are root's own
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "train.py").touch(mode=0o000)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            if os.geteuid() == 0:  # who may read everything
                os.seteuid(65_534)
            os.write(writer, json.dumps(problems(folder, {"script": "train.py"})).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            (found,) = json.loads(answer.read())
        os.waitpid(child, 0)
    assert f"{folder}/train.py: Permission denied" in found


def test_a_module_that_hides_the_package_ndctl_is_named(folder: Path) -> None:
    def doubts(run: dict[str, Any]) -> tuple[str, ...]:
        spec: ScriptSpec = decode(ScriptSpec, {"name": "a", "run": {"workdir": str(folder), **run}})
        return look_at_program(spec, {}).doubts

    assert doubts({"script": "train.py"}) == ()
    (folder / "ndctl.py").touch()
    (said,) = doubts({"script": "train.py"})
    assert said.startswith(f"run: `import ndctl` of the program gets {folder / 'ndctl.py'}")
    assert len(doubts({"module": "train"})) == 1
    assert doubts({"program": "sh"}) == ()


def test_the_program_of_a_pod_is_in_its_image(folder: Path) -> None:
    spec: ScriptSpec = decode(
        ScriptSpec,
        {"name": "a", "run": {"script": "x.py"}, "cluster": {"backend": "kubernetes"}},
    )
    looked = look_at_program(spec, {})
    assert not looked.problems
    assert looked.unchecked == (
        "run was neither copied nor checked: pods run x.py in `.` of their image or a volume, so it"
        " must be there"
    )


def test_the_spec_of_ndctl_run(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    asked = Asked(
        words=("sub/train.py", "--lr", "1"), hosts=2, overrides=("resilience.stop_grace=5",)
    )
    spec = write(asked, str(tmp_path), {}).spec
    assert isinstance(spec, ScriptSpec)
    assert (spec.name, spec.run.script, spec.run.args) == ("train-2", "sub/train.py", ("--lr", "1"))
    assert (spec.cluster.hosts, spec.resilience.stop_grace) == (2, 5)


def test_the_name_of_a_job_that_the_user_gives_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    asked = Asked(words=("-m", "a.b"), name="mine")
    assert write(asked, str(tmp_path), {}).spec.name == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lr", "1"), "--lr is an option, not a program"),
        (("-m",), "no program after -m"),
        (("-m", "a b"), "ndctl run: run.module: must be the name of a Python module"),
    ],
)
def test_bad_words_are_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(SpecError) as exc:
        write(Asked(words=words), str(tmp_path), {})
    assert said in str(exc.value)
