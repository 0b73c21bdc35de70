"""Data, tokenizers and weights that a spec names are checked before a job is queued."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.app.submission import submit_job
from orchestrator.app.submission.inputs import Looked, look
from orchestrator.cli import cli
from orchestrator.contract.files import exit_codes
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.errors import JobError, SpecError, TrainingError
from orchestrator.load import of_the_trainer, read_spec
from tests.agent.world import TurnedClock
from tests.jobs_on_disk import SPEC, NoCluster, cluster, submission
from tests.trainer.data.data_files import save_tokenizer
from trainer.data.packing.files import find
from trainer.data.packing.tokenizer import open_tokenizer
from trainer.model.weights import SINGLE

__all__ = ["cluster"]
GPU = "h100-sxm-80gb"
NO_DATA = "data.files=/data/none/*.txt"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache for ndctl and transformers."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NDCTL_RUN_ROOT", str(tmp_path / "runs"))
    return tmp_path / "hub"


def spec(*overrides: str) -> JobSpec:
    return of_the_trainer(read_spec(SPEC, overrides), "this test")


def paths(looked: Looked) -> list[str]:
    return [problem.path for problem in looked.problems]


def cached(hub: Path, name: str, revision: str = "abc") -> Path:
    """A model folder in the cache, in the layout of huggingface_hub."""
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    folder = repository / "snapshots" / revision
    folder.mkdir(parents=True)
    return folder


# Data, compared with what the trainer accepts


@pytest.mark.parametrize(
    ("made", "pattern", "format_"),
    [
        ({}, "*.txt", "auto"),
        ({"a.txt": ""}, "*.txt", "auto"),
        ({"a.txt": "x"}, "*.txt", "auto"),
        ({"a.txt": "x"}, "", "auto"),
        ({"a.txt": "x", "b.jsonl": "{}"}, "*", "auto"),
        ({"a.txt": "x", "b.jsonl": "{}"}, "*", "jsonl"),
        ({"d/state.json": "{}"}, "d", "auto"),
        ({"d/state.json": "{}"}, "d", "text"),
        ({"a.txt": "x"}, "**/*.txt", "auto"),
    ],
)
def test_data_is_refused_if_the_trainer_would_refuse_it(
    made: dict[str, str], pattern: str, format_: Any, tmp_path: Path
) -> None:
    for name, text in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    files = f"{tmp_path}/{pattern}"
    try:
        find(files, format_, "data.files")
        refused = []
    except TrainingError:
        refused = ["data.files"]
    assert paths(look(spec(f"data.files={files}", f"data.format={format_}"), tmp_path)) == refused


@pytest.mark.parametrize(
    ("files", "held_out", "limit"),
    [
        ("a*.txt", "b*.txt", "matches no file"),
        ("*.txt", "*.jsonl", "of text files"),
        ("a.txt", "a.txt", "leaves files of data.files"),
        ("*.txt", "a.txt", ""),
    ],
)
def test_held_out_data_is_checked_too(
    files: str, held_out: str, limit: str, tmp_path: Path
) -> None:
    for name in ("a.txt", "c.txt", "a.jsonl"):
        (tmp_path / name).write_text("{}")
    looked = look(
        spec(f"data.files={tmp_path}/{files}", f"data.validation.files={tmp_path}/{held_out}"),
        tmp_path,
    )
    assert paths(looked) == (["data.validation.files"] if limit else [])
    assert all(limit in problem.limit for problem in looked.problems)


# Tokenizers and weights, in folders and in the cache


def test_a_tokenizer_is_found_where_transformers_finds_it(hub: Path, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "words", ["one"])
    assert not look(spec(f"data.tokenizer={folder}"), hub).problems
    shutil.copytree(folder, cached(hub, "org/words"), dirs_exist_ok=True)
    assert not look(spec("data.tokenizer=org/words"), hub).problems


@pytest.mark.parametrize("made", ["nothing", "empty-folder", "model-alone", "not-main"])
def test_a_tokenizer_that_the_trainer_cannot_load_is_refused(
    made: str, hub: Path, tmp_path: Path
) -> None:
    name = "org/words"
    if made == "empty-folder":
        name = str(tmp_path / "empty")
        Path(name).mkdir()
    if made == "model-alone":
        (cached(hub, name) / "config.json").write_text('{"model_type": "llama"}')
    if made == "not-main":
        folder = cached(hub, name)
        save_tokenizer(folder.with_name("other"), ["one"])
        shutil.rmtree(folder)
    with pytest.raises(TrainingError):
        open_tokenizer(name)
    (problem,) = look(spec(f"data.tokenizer={name}"), hub).problems
    assert (problem.path, problem.value) == ("data.tokenizer", name)
    if made != "empty-folder":
        assert str(hub) in problem.limit
        assert problem.fix.startswith(f"hf download {name} ")


def test_weights_are_checked(hub: Path, tmp_path: Path) -> None:
    assert paths(look(spec("model.weights=org/llama"), hub)) == ["model.weights"]
    (cached(hub, "org/llama") / SINGLE).write_bytes(b"")
    assert not look(spec("model.weights=org/llama"), hub).problems


# Facts that this machine cannot know


@pytest.mark.parametrize(
    ("overrides", "unchecked"),
    [
        (["cluster.backend=kubernetes"], "pods see"),
        (["cluster.backend=slurm", "cluster.slurm.container.image=nvcr.io/x"], "container"),
        (["cluster.backend=slurm", "cluster.slurm.setup=[cp -r /shared /data]"], "setup has to"),
    ],
)
def test_unknown_facts_are_reported_but_not_refused(
    overrides: list[str], unchecked: str, tmp_path: Path
) -> None:
    looked = look(spec(NO_DATA, *overrides), tmp_path)
    assert not looked.problems
    assert looked.unchecked.startswith("data.files was not ")
    assert unchecked in looked.unchecked
    assert not look(spec(*overrides), tmp_path).unchecked, "it names nothing"


def test_the_login_node_of_slurm_sees_the_shared_file_system(tmp_path: Path) -> None:
    assert paths(look(spec(NO_DATA, "cluster.backend=slurm"), tmp_path)) == ["data.files"]


# Through the commands


def test_all_problems_are_reported_at_once_with_their_lines_and_those_of_the_plan(
    hub: Path,
) -> None:
    edits = ["--set", NO_DATA, "--set", "data.tokenizer=gpt2", "--set", "parallel.tp=3"]
    done = CliRunner().invoke(cli, ["validate", str(SPEC), *edits])
    assert isinstance(done.exception, SpecError)
    told = done.exception.message
    assert "has 3 problems" in told
    assert "--set data.files: must be a glob of data files" in told
    assert f"it is not in {hub}), got 'gpt2'" in told
    assert "parallel.tp=3: must divide" in told


@pytest.mark.parametrize(
    ("path", "fix"),
    [("org/llama", "hf download org/llama config.json"), ("/nope/llama", "check the path")],
)
def test_a_missing_model_is_reported_with_its_line(path: str, fix: str, hub: Path) -> None:
    edits = ["--set", "model.config=null", "--set", f"model.path={path}"]
    done = CliRunner().invoke(cli, ["validate", str(SPEC), *edits])
    assert isinstance(done.exception, SpecError)
    assert done.exception.message.startswith("--set model.path: must be a folder or a hub id")
    assert done.exception.fix.endswith(fix)


@pytest.mark.parametrize("command", ["plan", "validate", "forecast"])
def test_a_plan_for_devices_that_the_spec_names_needs_no_data_here(command: str, hub: Path) -> None:
    """It is made on a laptop, for a cluster elsewhere."""
    elsewhere = ["--set", NO_DATA, "--set", "cluster.backend=slurm"]
    done = CliRunner().invoke(cli, [command, str(SPEC), *elsewhere, "--set", f"cluster.gpu={GPU}"])
    assert done.exit_code == 0, done.exception
    assert ("data.files was not checked" in done.output) == (command == "validate")


def test_problems_can_be_printed_as_json(hub: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(SPEC.read_text().replace("{stdlib}/*.py", "/data/none"))
    done = CliRunner().invoke(cli, ["validate", str(file), "--json"])
    assert done.exit_code == exit_codes.BAD_SPEC
    body = json.loads(done.stdout)
    assert body["valid"] is False
    (problem,) = body["problems"]
    assert (problem["key"], problem["value"]) == ("data.files", "/data/none")
    line = 1 + next(n for n, text in enumerate(file.read_text().splitlines()) if "/data" in text)
    assert problem["place"] == f"{file}:{line}"


def test_doctor_names_missing_inputs(hub: Path) -> None:
    done = CliRunner().invoke(cli, ["doctor", str(SPEC), "--set", NO_DATA, "--json"])
    assert done.exit_code == 1
    (found,) = [one for one in json.loads(done.stdout)["findings"] if one["what"] == "data.files"]
    assert (found["verdict"], "matches no file" in found["found"]) == ("stops", True)


def test_a_job_with_missing_data_writes_no_file(cluster: NoCluster, tmp_path: Path) -> None:
    for begin in (submit_job.submit, submit_job.dry_run):
        with pytest.raises(SpecError, match=r"data\.files: must be a glob of data files"):
            begin(submission(tmp_path, NO_DATA), {}, TurnedClock())
    assert (cluster.submitted, list(tmp_path.iterdir())) == ([], [])


def test_a_run_root_that_is_not_utf8_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    root = tmp_path / os.fsdecode(b"runs\xff")
    told = CliRunner().invoke(cli, ["submit", str(SPEC), "--run-root", str(root)])
    assert isinstance(told.exception, JobError)
    assert "is not UTF-8" in told.exception.message
    assert not root.exists()


def test_validate_says_what_pods_need_beyond_the_plan(hub: Path) -> None:
    pods = ["--set", "cluster.backend=kubernetes", "--set", f"cluster.gpu={GPU}"]
    done = CliRunner().invoke(cli, ["validate", str(SPEC), *pods])
    assert done.exit_code == 0, done.exception
    for key in ("image", "runs"):
        assert f"to submit it, cluster.kubernetes.{key} must be set" in done.output
    given = ["cluster.kubernetes.image=x/y:1", "cluster.kubernetes.runs={claim: runs}"]
    pods += [word for one in given for word in ("--set", one)]
    done = CliRunner().invoke(cli, ["validate", str(SPEC), *pods, "--json"])
    assert json.loads(done.stdout)["doubts"] == []
