"""The checkpoint that a job resumes from is checked by each command before a job is queued."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from msgspec.structs import replace
from transformers import AutoConfig

from orchestrator.app.submission import submit_job
from orchestrator.app.submission.inputs import Looked
from orchestrator.app.submission.resume_check import MOMENTS, look_at_run, look_back
from orchestrator.cli import cli
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import AgentRegistered, CheckpointSaved
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.contract.spec.train_spec import OptimizerSpec
from orchestrator.errors import JobError, SpecError
from orchestrator.job.state import Run
from orchestrator.journal.journal import Journal
from orchestrator.load import of_the_trainer, read_spec
from tests.agent.world import TurnedClock
from tests.jobs_on_disk import JOB, SPEC, NoCluster, cluster, events, lead, submission
from tests.trainer.checkpoint.checkpoint_launch import train_alone
from tests.trainer.data.data_files import save_tokenizer
from tests.trainer.launch.tiny_runs import tiny
from trainer.optimizer import _OPTIMIZERS, build_optimizer

__all__ = ["cluster"]
OTHER_MODEL = "model.config.hidden_size=96"
VERBS = ("submit", "validate", "doctor")


def spec(*overrides: str) -> JobSpec:
    return of_the_trainer(read_spec(SPEC, overrides), "this test")


def looked_at(now: JobSpec, config: Mapping[str, Any], run_dir: Path) -> Looked:
    return look_at_run(now, config, RunDir(run_dir), Run())


def refused(now: JobSpec, config: Mapping[str, Any], run_dir: Path) -> list[str]:
    return [problem.path for problem in looked_at(now, config, run_dir).problems]


def trained_by(config: Mapping[str, Any], run_dir: Path, step: int = 8, **more: Any) -> Path:
    """Write a complete checkpoint without tensors."""
    folder = run_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    made = {"config": dict(config), "seed": 0, "global_batch_size": 8, "sequence_length": 64}
    marker = {"step": step, "attempt": 1, "world_size": 1, "files": {}, "trained": {**made, **more}}
    (folder / "COMPLETE").write_text(json.dumps(marker))
    return folder


# The rules of the ranks


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_equals_the_model_that_transformers_builds_from_it(
    preset: str, tmp_path: Path
) -> None:
    """A checkpoint stores the complete config, a spec only the keys that the user wrote."""
    values = deepcopy(dict(PRESETS[preset]))
    whole = AutoConfig.for_model(values.pop("model_type"), **values)
    trained_by(json.loads(whole.to_json_string(use_diff=False)), tmp_path)
    assert refused(spec(), PRESETS[preset], tmp_path) == []
    wider = {**PRESETS[preset], "vocab_size": 96 * values["vocab_size"]}
    (problem,) = looked_at(spec(f"model={{preset: {preset}}}"), wider, tmp_path).problems
    assert (problem.path, problem.value) == ("model.preset", preset)
    assert "vocab_size changed from" in problem.limit
    key = "activation_function" if "gpt2" in preset else "hidden_act"
    whole_key = json.loads(whole.to_json_string(use_diff=False))[key]
    other = {**PRESETS[preset], key: "relu"}
    (problem,) = looked_at(spec(f"model={{preset: {preset}}}"), other, tmp_path).problems
    assert f"{key} changed from {whole_key} to relu" in problem.limit


@pytest.mark.process
def test_a_checkpoint_is_refused_if_the_trainer_would_refuse_it(
    tmp_path: Path,
) -> None:
    config = tiny(tmp_path / "out")
    assert train_alone(config) == exit_codes.OK
    checkpoints = tmp_path / "out" / "checkpoints"
    same = spec(
        f"train.global_batch_size={config['train']['global_batch_size']}",
        f"data.sequence_length={config['data']['sequence_length']}",
        f"train.seed={config['train'].get('seed', 0)}",
    )
    model = config["model"]["config"]
    found = looked_at(same, model, tmp_path / "out")
    assert (found.problems, found.refusal) == ((), None)
    assert found.resumes.startswith("from step-5, of 24 steps: ")
    changes: dict[str, JobSpec] = {
        "train.seed": replace(same, train=replace(same.train, seed=9)),
        "data.sequence_length": replace(same, data=replace(same.data, sequence_length=48)),
    }
    for key, changed in changes.items():
        (problem,) = looked_at(changed, model, tmp_path / "out").problems
        assert problem.path == key
        assert str(checkpoints / "step-5") in problem.limit
    (problem,) = looked_at(same, PRESETS["llama-tiny"], tmp_path / "out").problems
    assert problem.path.startswith("model.config.")


@pytest.mark.parametrize("change", [{"alpha": 32.0}, {"quantize": "nf4"}, {"rank": 4}])
def test_other_adapters_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    model = spec().model.config
    assert model is not None
    trained_by(model, tmp_path, lora={"rank": 8, "alpha": 16.0})
    now = replace(spec(), model=replace(spec().model, lora=LoraSpec()))
    assert refused(now, model, tmp_path) == []
    other = replace(now, model=replace(now.model, lora=replace(LoraSpec(), **change)))
    assert refused(other, model, tmp_path) == ["model.lora"]


def test_which_optimizers_resume_from_a_checkpoint_of_another() -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))]
    kept = {}
    for name in _OPTIMIZERS:
        made = build_optimizer(weights, OptimizerSpec(name=name))  # type: ignore[arg-type]
        kept[name] = [sorted(made.state[weight]) for weight in weights]
    for one, moments in kept.items():
        alike = {other for other in kept if kept[other] == moments}
        assert alike == {o for o in kept if MOMENTS.get(o, o) == MOMENTS.get(one, one)}


# Through the commands


@pytest.fixture
def run_dir(cluster: NoCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of a job that stopped at step 8 of 24, with a complete checkpoint."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NDCTL_RUN_ROOT", str(tmp_path))
    trained_to(tmp_path, 8)
    return tmp_path / JOB


def trained_to(run_root: Path, saved: int) -> None:
    """A job with a checkpoint but without a leader."""
    first = submission(run_root)
    submit_job.submit(first, {}, TurnedClock())
    at = TurnedClock().now()
    agents = [
        AgentRegistered(
            at=at, host=f"host-{i}", address="127.0.0.1", devices=2, pid=i, incarnation=str(i)
        )
        for i in range(2)
    ]
    lead(run_root, *agents, CheckpointSaved(at=at, attempt=1, step=saved))
    trained_by(first.planned.model_config, run_root / JOB, saved)


def ndctl(verb: str, *words: str) -> Result:
    return CliRunner().invoke(cli, [verb, str(SPEC), "--resume", *words])


def told(done: Result) -> str:
    """The text that the user sees, also for an error, which `main` prints."""
    return f"{done.output}{done.exception or ''}"


def test_each_command_prints_the_checkpoint_it_resumes_from(run_dir: Path) -> None:
    assert "resumes from step-8, of 24 steps" in told(ndctl("validate"))
    body = json.loads(ndctl("validate", "--json").stdout)
    assert (body["valid"], body["resumes"][:11]) == (True, "from step-8")
    assert "ok  resume         from step-8" in told(ndctl("doctor"))
    assert ndctl("submit").exit_code == 0


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.config.hidden_size", "96", "hidden_size changed from 64 to 96"),
        ("model.config.rms_norm_eps", "0.5", "rms_norm_eps changed from"),
        ("train.seed", "9", "must be 0, as in"),
        ("train.global_batch_size", "16", "must be 8, as in"),
        ("train.optimizer.name", "sgd", "must be adamw, as in"),
        ("data.document_mask", "true", "must be False, as in"),
        ("data.files", "/data/none/*.txt", "matches no file"),
        ("data.tokenizer", "org/nowhere", "it is not in"),
        ("train.steps", "8", "no steps left: 8 of 8 steps are done"),
    ],
)
def test_changes_of_a_spec_are_refused_in_the_same_way(
    verb: str, key: str, value: str, said: str, run_dir: Path, cluster: NoCluster
) -> None:
    before = events(run_dir.parent)
    done = ndctl(verb, "--set", f"{key}={value}")
    assert done.exit_code != 0
    assert said in told(done)
    assert key in told(done)
    assert (len(cluster.submitted), events(run_dir.parent)) == (1, before)


@pytest.mark.parametrize("verb", VERBS)
def test_a_tokenizer_with_other_tokens_is_refused(
    verb: str, run_dir: Path, tmp_path: Path, cluster: NoCluster
) -> None:
    words = save_tokenizer(tmp_path / "words", ["one"])
    done = ndctl(verb, "--set", f"data.tokenizer={words}")
    assert "must be bytes, as in" in told(done)
    assert (done.exit_code != 0, len(cluster.submitted)) == (True, 1)


@pytest.mark.parametrize("verb", VERBS)
def test_other_data_files_are_reported_but_not_refused(
    verb: str, run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "moved.txt").write_text("one")
    done = ndctl(verb, "--set", f"data.files={tmp_path}/moved.txt")
    assert done.exit_code == 0
    assert "data.files changed from {stdlib}/*.py to" in told(done)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("how", ["removed", "torn"])
def test_a_job_that_lost_its_only_checkpoint_does_not_start_at_step_0(
    verb: str, how: str, run_dir: Path, cluster: NoCluster
) -> None:
    marker = run_dir / "checkpoints" / "step-8" / "COMPLETE"
    if how == "torn":
        marker.write_text(marker.read_text()[:20])
    else:
        marker.unlink()
        marker.parent.rmdir()
    done = ndctl(verb)
    assert (done.exit_code != 0, len(cluster.submitted)) == (True, 1)
    assert "job e2e saved step 8, but" in told(done)
    assert ("its marker cannot be read" if how == "torn" else "the folder is empty") in told(done)


@pytest.mark.parametrize("verb", VERBS)
def test_an_older_checkpoint_replaces_a_damaged_one(verb: str, run_dir: Path) -> None:
    config = submission(run_dir.parent).planned.model_config
    (trained_by(config, run_dir, 9) / "COMPLETE").unlink()
    done = ndctl(verb)
    assert done.exit_code == 0
    assert "step-9 is skipped: COMPLETE is missing" in told(done)


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_job_cannot_resume(
    verb: str, cluster: NoCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDCTL_RUN_ROOT", str(tmp_path))
    done = ndctl(verb)
    assert (done.exit_code != 0, cluster.submitted) == (True, [])
    assert "has no run to resume" in told(done)
    assert "submit it without --resume" in told(done)


@pytest.mark.parametrize("verb", VERBS)
def test_a_running_job_cannot_resume(verb: str, run_dir: Path, cluster: NoCluster) -> None:
    with Journal(run_dir / "journal.jsonl", TurnedClock()):
        done = ndctl(verb)
    assert (done.exit_code != 0, len(cluster.submitted)) == (True, 1)
    assert "job e2e already exists and has not ended" in told(done)
    assert f"ndctl cancel {JOB}" in told(done)


def test_all_problems_are_reported_at_once(run_dir: Path) -> None:
    edits = [OTHER_MODEL, "train.steps=8", "data.files=/data/none", "parallel.tp=3"]
    done = ndctl("validate", *(word for edit in edits for word in ("--set", edit)))
    assert isinstance(done.exception, SpecError)
    assert "has 4 problems" in done.exception.message
    assert "no steps left" in done.exception.message
    assert "parallel.tp=3: must divide" in done.exception.message


def test_the_run_root_can_be_an_option(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NDCTL_RUN_ROOT")
    for verb in VERBS:
        assert ndctl(verb, "--run-root", str(run_dir.parent)).exit_code == 0


def test_a_resume_needs_a_spec() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--resume"])
    assert done.exit_code == exit_codes.USAGE


def test_for_a_job_in_pods_only_local_facts_are_checked(tmp_path: Path) -> None:
    on = spec("cluster.backend=kubernetes")
    found = look_back(on, None, RunDir(tmp_path / JOB), {})
    assert "it is on a volume of the pods" in found.unchecked
    assert (found.problems, found.refusal) == ((), None)


def test_a_job_that_has_done_all_steps_is_not_started_again(
    cluster: NoCluster, tmp_path: Path
) -> None:
    trained_to(tmp_path, 24)
    before = len(events(tmp_path))
    for begin in (submit_job.submit, submit_job.dry_run):
        with pytest.raises(JobError, match="no steps left: 24 of 24 steps are done") as done:
            begin(submission(tmp_path, resume=True), {}, TurnedClock())
        assert "raise train.steps" in done.value.fix
    assert (len(cluster.submitted), len(events(tmp_path))) == (1, before)
    submit_job.submit(submission(tmp_path, "train.steps=25", resume=True), {}, TurnedClock())
    assert [launch.launch for launch in cluster.submitted] == [1, 2]


def test_another_model_is_refused_before_anything_is_written(
    run_dir: Path, cluster: NoCluster
) -> None:
    good = (run_dir / "spec.yaml").read_text()
    before = len(events(run_dir.parent))
    again = submission(run_dir.parent, OTHER_MODEL, resume=True)
    with pytest.raises(SpecError, match=r"--set model\.config\.hidden_size: must be the same"):
        submit_job.submit(again, {}, TurnedClock())
    assert (run_dir / "spec.yaml").read_text() == good
    assert (len(cluster.submitted), len(events(run_dir.parent))) == (1, before)
