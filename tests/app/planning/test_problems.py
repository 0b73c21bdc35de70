"""`ndctl validate --json` gives an editor the place of each problem."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.contract.files import exit_codes

GOOD = """\
name: demo
model: {preset: llama-tiny}
data: {files: "{stdlib}/*.py", sequence_length: 64}
train:
  steps: 10
  global_batch_size: 8
"""


def validated(tmp_path: Path, text: str, *more: str) -> tuple[int, dict[str, Any], str]:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    done = CliRunner().invoke(cli, ["validate", str(file), "--json", *more])
    return done.exit_code, json.loads(done.stdout), str(file)


@pytest.mark.parametrize(
    ("text", "at", "key", "value"),
    [
        (GOOD.replace("10", "ten"), (5, 3), "train.steps", "ten"),
        (GOOD.replace("llama-tiny", "llama-9b"), (2, 9), "model.preset", "llama-9b"),
        (GOOD.replace("  steps: 10\n", ""), (4, 1), "train.steps", None),
        (GOOD + "  stepz: 3\n", (7, 3), "train.stepz", "stepz"),
    ],
)
def test_each_problem_has_line_and_column(
    tmp_path: Path, text: str, at: tuple[int, int], key: str, value: str | None
) -> None:
    code, body, file = validated(tmp_path, text)
    (problem,) = body["problems"]
    assert code == exit_codes.BAD_SPEC
    assert (body["schema_version"], body["valid"]) == (1, False)
    assert (problem["file"], problem["line"], problem["column"]) == (file, *at)
    assert (problem["key"], problem["value"], problem["severity"]) == (key, value, "error")
    assert problem["fix"]
    assert problem["message"].startswith(f"{key}: ")


def test_text_that_is_not_yaml_has_a_place_too(tmp_path: Path) -> None:
    _, body, file = validated(tmp_path, GOOD + "\tx: 1\n")
    (problem,) = body["problems"]
    assert (problem["file"], problem["line"], problem["column"]) == (file, 7, 1)
    assert "spaces" in problem["fix"]


def test_what_is_given_in_an_option_is_in_no_line(tmp_path: Path) -> None:
    _, body, _ = validated(tmp_path, GOOD, "--set", "train.steps=0")
    (problem,) = body["problems"]
    assert (problem["line"], problem["place"]) == (None, "--set train.steps")


def test_a_spec_without_a_plan_is_a_problem_of_the_whole_file(tmp_path: Path) -> None:
    code, body, file = validated(tmp_path, GOOD + "parallel: {tp: 3}\n")
    (problem,) = body["problems"]
    assert (code, problem["file"], problem["line"]) == (exit_codes.NO_PLAN, file, None)
    assert "parallel.tp=3" in problem["message"]


def test_a_missing_file_and_an_unreachable_cluster_are_answers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(cli, ["validate", str(tmp_path / "none.yaml"), "--json"])
    assert done.exit_code == exit_codes.BAD_SPEC
    assert "no such file" in json.loads(done.stdout)["problems"][0]["message"]
    monkeypatch.setenv("PATH", str(tmp_path))
    code, body, _ = validated(tmp_path, GOOD, "--set", "cluster.backend=slurm")
    assert (code, body["valid"]) == (exit_codes.BACKEND, None)
    assert "--inventory FILE" in body["problems"][0]["fix"]


def test_warnings_about_a_valid_spec_have_a_place(tmp_path: Path) -> None:
    prompts = "prompt_column: q, document_mask: false"
    text = GOOD.replace("sequence_length: 64", f"sequence_length: 64, {prompts}")
    code, body, file = validated(
        tmp_path,
        text + "cluster: {backend: slurm, gpu: h100-sxm-80gb, slurm: {env: {HF_TOKEN: abc}}}\n",
    )
    assert (code, body["valid"]) == (0, True)
    found = {problem["key"]: problem for problem in body["problems"]}
    secret = found["cluster.slurm.env.HF_TOKEN"]
    assert (secret["severity"], secret["file"], secret["line"]) == ("warning", file, 7)
    assert "cluster.slurm.setup" in secret["fix"]
    assert "abc" not in json.dumps(body)
    assert found["data.prompt_column"]["line"] == 3
