"""A spec with schema errors also reports what planning refuses, and only what stays refused."""

from pathlib import Path

import pytest

from orchestrator.app.planning.plans import plan_and_look, plan_spec
from orchestrator.errors import SpecError
from orchestrator.specs.repair import NOT_PLANNED

GOOD = """\
name: demo
model: {preset: llama-tiny}
data: {files: "{stdlib}/*.py", sequence_length: 64}
train:
  steps: 10
  global_batch_size: 8
  optimizer: {lr: 3e-4}
parallel: {tp: 3}
cluster: {hosts: 2, gpus_per_host: 4}
resilience: {max_restarts: 3}
"""
REFUSED = "parallel.tp=3: must divide the 4 ranks of a host"


def refused(tmp_path: Path, text: str, *sets: str) -> SpecError:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as found:
        plan_and_look(file, sets, {})
    return found.value


def keys(error: SpecError) -> list[str]:
    return [problem.path for _, problem in error.placed]


@pytest.mark.parametrize(
    ("right", "wrong", "key"),
    [
        ("name: demo", "name: My Job!", "name"),
        ("name: demo\n", "", "name"),
        ("  steps: 10", "  step: 10", "train.step"),
        ("  steps: 10\n", "", "train.steps"),
        ("  steps: 10", "  steps: -1", "train.steps"),
        ("lr: 3e-4", "lr: -1", "train.optimizer.lr"),
        ("lr: 3e-4", "learning: 1", "train.optimizer.learning"),
        ("{tp: 3}", "{tp: 3, dp: 2}", "parallel.dp"),
        ("{tp: 3}", "{tp: 3, cp: x}", "parallel.cp"),
        ("{tp: 3}", "{tpp: 3}", "parallel.tpp"),
        ("max_restarts: 3", "max_restarts: many", "resilience.max_restarts"),
        ("max_restarts: 3", "policy: [{class: x}]", "resilience.policy[0].class"),
        ("name: demo", "name: demo\nname: second", "name"),
    ],
)
def test_a_plan_error_is_reported_with_an_error_that_the_plan_does_not_depend_on(
    tmp_path: Path, right: str, wrong: str, key: str
) -> None:
    assert right in GOOD
    error = refused(tmp_path, GOOD.replace(right, wrong))
    assert key in keys(error)
    (also,) = error.also
    assert REFUSED in also.message
    assert REFUSED in error.message


@pytest.mark.parametrize(
    "wrong",
    [
        "cluster.hosts=two",
        "cluster.gpus_per_host=0",
        "model.preset=none",
        "train=3",
        "a=1",
        "data=",
    ],
)
def test_a_plan_that_depends_on_a_wrong_value_is_not_judged(tmp_path: Path, wrong: str) -> None:
    error = refused(tmp_path, GOOD, wrong)
    if wrong == "a=1":  # a key that nothing means changes nothing
        assert REFUSED in error.message
    else:
        assert REFUSED not in error.message
        assert not error.also


def test_missing_inputs_are_reported_with_the_schema_errors(tmp_path: Path) -> None:
    sets = ("data.files=/none/*.txt", "data.tokenizer=gpt2", "train.seed=-1", "parallel.tp=1")
    assert keys(refused(tmp_path, GOOD, *sets)) == ["train.seed", "data.files", "data.tokenizer"]


def test_a_misspelled_key_is_read_as_the_key_that_it_means(tmp_path: Path) -> None:
    text = GOOD.replace("tp: 3", "tpp: 300000")
    error = refused(tmp_path, text)
    # Its value is checked too, at the line where it is written.
    assert [(place.rpartition(":")[2], one.path) for place, one in error.placed] == [
        ("8", "parallel.tpp")
    ]
    assert "parallel.tp=300000" in error.also[0].message


def test_all_problems_are_counted_once(tmp_path: Path) -> None:
    text = GOOD.replace("lr: 3e-4", "lr: -1").replace("demo", "My Job!")
    assert "job.yaml has 3 problems\n" in refused(tmp_path, text).message


OTHER_VALUES: dict[str, str] = {
    "name": "other",
    "notify": "[{command: [page]}]",
    "checkpoint.every_steps": "7",
    "checkpoint.every": "auto",
    "checkpoint.keep": "9",
    "checkpoint.keep_every": "50",
    "checkpoint.verify": "false",
    "data.files": "/other/*.jsonl",
    "data.format": "jsonl",
    "data.column": "story",
    "data.validation": "{fraction: 0.1}",
    "resilience.failure_classes": "[]",
    "resilience.policy": "[]",
    "resilience.web": "{}",
    "resilience.max_restarts": "0",
    "resilience.hang_timeout": "5",
    "resilience.checkpoint_timeout": "5",
    "resilience.init_timeout": "5",
    "resilience.agent_timeout": "5",
    "train.steps": "1000000",
    "train.seed": "5",
    "train.schedule": "{kind: constant, warmup_steps: 5}",
    "train.grad_clip": "null",
    "train.spike": "{}",
    "train.profile": "{at_step: 3}",
    "train.max_bad_steps": "9",
    "train.eval_every": "2",
    "train.eval_sequences": "8",
    "train.wandb": "project",
    "train.optimizer.lr": "0.5",
    "train.optimizer.weight_decay": "0",
    "train.optimizer.beta1": "0.5",
    "train.optimizer.beta2": "0.5",
    "train.optimizer.eps": "0.5",
}


def test_keys_that_the_planner_does_not_read_change_no_plan(tmp_path: Path) -> None:
    assert set(OTHER_VALUES) == {*NOT_PLANNED}
    file = tmp_path / "job.yaml"
    file.write_text(GOOD.replace("{tp: 3}", "{}"))
    sets = [f"{key}={value}" for key, value in OTHER_VALUES.items()]
    assert plan_spec(file, sets, {}).plan == plan_spec(file, (), {}).plan


def test_a_key_of_the_bundled_trainer_in_a_spec_with_run_brings_no_further_error(
    tmp_path: Path,
) -> None:
    """`lr` means train.optimizer.lr, but there is no train beside run."""
    error = refused(tmp_path, "name: demo\nrun: {script: train.py}\nlr: 3e-4\n")
    assert keys(error) == ["run.script", "lr"]
