"""Files of other tools in place of a job spec. The texts are as those tools' documentation has
them, shortened."""

from pathlib import Path

import pytest

from orchestrator.errors import SpecError
from orchestrator.load import load_spec, read_spec
from orchestrator.specs.foreign import program_in

FILES = {
    "pytorchjob.yaml": (
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\nspec: {}\n",
        "pytorchjob.yaml:2: kind: this is a Kubernetes manifest (PyTorchJob), not a job spec",
        "`kubectl apply -f pytorchjob.yaml` starts it",
    ),
    "task.yaml": (
        "num_nodes: 2\nresources: {accelerators: 'H100:8'}\nrun: |\n  cd src\n"
        "  torchrun --nproc_per_node 8 \\\n    train.py --lr 1e-4\n",
        "this file is for SkyPilot, not a job spec",
        "`ndctl init --train train.py --args '--lr 1e-4' --hosts 2 --gpus-per-host 8` writes",
    ),
    "ds_config.json": (
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 3}}',
        "this file is for DeepSpeed, not a job spec",
        "your script reads it: ndctl run -- train.py --deepspeed ds_config.json",
    ),
    "accelerate.yaml": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n",
        "this file is for Accelerate, not a job spec",
        "your script reads it: ndctl run -- train.py;",
    ),
    "llama3_8b.toml": (
        "[job]\ndescription = 'x'\n",
        "this is a TOML file, not a job spec in YAML",
        "`ndctl init` writes a job spec",
    ),
    "job.sh": (
        "#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py --lr 1e-4\n",
        "this is a batch script of Slurm, not a job spec",
        "`ndctl init --backend slurm --train train.py` writes",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_one_sentence_says_what_the_file_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, words, fix = FILES[name]
    Path(name).write_text(text)
    with pytest.raises(SpecError) as refused:
        read_spec(Path(name))
    said = str(refused.value)
    assert words in said
    assert said.startswith(name)
    assert f"fix: {fix}" in said
    assert len(said.splitlines()) == 2, said


def test_a_job_spec_with_a_key_of_another_tool_is_a_job_spec() -> None:
    text = "name: a\nnum_nodes: 2\nrun: {script: train.py}\n"
    with pytest.raises(SpecError, match=r"did you mean cluster\.hosts"):
        load_spec(text, "job.yaml")


@pytest.mark.parametrize(
    ("line", "run"),
    [
        ("python train.py", "run: {script: train.py}"),
        ("torchrun --nproc-per-node 8 t.py --lr 1", 'run: {script: t.py, args: ["--lr", "1"]}'),
        ("python -m torch.distributed.run t.py a", 'run: {script: t.py, args: ["a"]}'),
        ("python3 -m pkg.train --x", 'run: {module: pkg.train, args: ["--x"]}'),
        ("echo it's done", None),
    ],
)
def test_the_program_of_a_command_line_is_found(line: str, run: str | None) -> None:
    found = program_in(line)
    assert (None if found is None else found.spec) == run


@pytest.mark.parametrize("key", ["run", "command"])
def test_a_command_line_in_place_of_a_program_is_written_out(key: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(f"name: a\n{key}: torchrun train.py --lr 1\n", "job.yaml")
    assert 'write run: {script: train.py, args: ["--lr", "1"]}' in str(refused.value)
