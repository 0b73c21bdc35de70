"""`run:` in a spec, and its conflicts with the keys of the bundled trainer."""

from typing import Any

import pytest

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.drills import faults_of
from orchestrator.contract.spec.job_spec import ScriptSpec
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.errors import SpecError
from orchestrator.load import dump_spec, load_spec


def refused(run: dict[str, Any], **more: Any) -> list[str]:
    with pytest.raises(Invalid) as exc:
        decode(ScriptSpec, {"name": "mine", "run": run, **more})
    return [problem.path for problem in exc.value.problems]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"script": "train.py", "args": ["--lr", "1"]}, ("train.py", "--lr", "1")),
        ({"module": "a.b"}, ("-m", "a.b")),
        ({"program": "./a"}, ("--no-python", "./a")),
    ],
)
def test_the_program_as_words_of_the_command_line(
    run: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert decode(RunSpec, run).words == words


@pytest.mark.parametrize(
    ("run", "paths"),
    [
        ({}, ["run"]),
        ({"script": "a.py", "module": "a"}, ["run"]),
        ({"script": ""}, ["run.script"]),
        ({"module": "a/b"}, ["run.module"]),
        (
            {"script": "a.py", "env": {"RANK": "1", "1X": "", "A": "b"}},
            ["run.env.RANK", "run.env.1X"],
        ),
        ({"script": "a.py", "preload": ["os;"]}, ["run.preload"]),
    ],
)
def test_bad_programs_are_refused(run: dict[str, Any], paths: list[str]) -> None:
    assert refused(run) == paths


def test_settings_that_only_the_trainer_follows_are_refused() -> None:
    given = {
        "checkpoint": {"every_steps": 5, "keep": 3, "async": False},
        "resilience": {"shrink": True, "on_nan": "rollback", "max_restarts": 1},
    }
    assert refused({"script": "a.py"}, **given) == [
        "checkpoint.every_steps",
        "checkpoint.async",
        "resilience.shrink",
        "resilience.on_nan",
    ]


def test_a_spec_with_both_is_refused_with_both_lines() -> None:
    text = "name: a\nrun: {script: train.py}\nmodel: {preset: x}\ndata: {}\n"
    with pytest.raises(SpecError) as exc:
        load_spec(text, "mine.yaml")
    said = str(exc.value)
    assert "mine.yaml:2: run: must be left out beside model, data (mine.yaml:3)" in said
    assert "mine.yaml:3: model: must be left out beside run (mine.yaml:2)" in said
    assert "mine.yaml:4: data: must be left out beside run (mine.yaml:2)" in said


def test_the_keys_of_other_tools_are_explained() -> None:
    with pytest.raises(SpecError, match=r"command: must be inside run, .*\n.*run: \{script:"):
        load_spec("name: a\ncommand: python train.py\n", "mine.yaml")


def test_a_dumped_spec_loads_as_an_equal_spec() -> None:
    text = (
        "name: a\ncluster: {hosts: 2}\nrun: {module: a.b, args: ['1'], env: {A: b}, preload: []}\n"
    )
    spec = load_spec(text, "mine.yaml")
    assert load_spec(dump_spec(spec), "again") == spec
    assert dump_spec(spec).startswith("name: a\nrun:\n")


def test_drills_of_programs() -> None:
    assert "exit" in faults_of(RunSpec(script="a.py"))
    assert "exit" not in faults_of(RunSpec(program="./a"))
