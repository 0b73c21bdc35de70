"""Files of other tools in place of a job spec. The texts are as those tools' documentation has
them, shortened."""

import re
import shlex
import sys
from pathlib import Path, PurePath

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli import cli
from orchestrator.errors import SpecError
from orchestrator.load import load_spec, read_spec
from orchestrator.specs.foreign.around_program import without_launcher
from orchestrator.specs.foreign.command_lines import LAUNCHERS, program_in
from orchestrator.specs.foreign.recognised import foreign_text
from orchestrator.specs.foreign.taking_over import taken_over

FILES = {
    "pytorchjob.yaml": (
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\nspec: {}\n",
        "pytorchjob.yaml: this is a Kubernetes manifest (PyTorchJob), not a job spec",
        "`ndctl init --from pytorchjob.yaml` writes a job spec from it",
    ),
    "service-first.yaml": (
        "# a comment\napiVersion: v1\nkind: Service\nmetadata: {name: b}\n---\n"
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\nspec: {}\n",
        "service-first.yaml: this is a Kubernetes manifest (PyTorchJob), not a job spec",
        "`ndctl init --from service-first.yaml` writes a job spec from it",
    ),
    "job.json": (
        '{"apiVersion": "batch/v1", "kind": "Job", "spec": {}}',
        "job.json: this is a Kubernetes manifest (Job), not a job spec",
        "`ndctl init --from job.json` writes a job spec from it",
    ),
    "claim.yaml": (
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: b}\n",
        "no job that trains is in this manifest (PersistentVolumeClaim)",
        "`kubectl apply -f claim.yaml` creates it",
    ),
    "templates.yaml": (
        "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n"
        "metadata:\n  name: {{ .Values.name }}\n",
        "this is a template of Helm, not a manifest",
        "helm template CHART > manifest.yaml, then ndctl init --from manifest.yaml",
    ),
    "values.yaml": (
        "{{- $config := .Values.job }}\napiVersion: batch/v1\nkind: Job\n",
        "this is a template of Helm, not a manifest",
        "helm template CHART > manifest.yaml, then ndctl init --from manifest.yaml",
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
        "`ndctl init --from job.sh` writes a job spec from it",
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


@pytest.mark.parametrize("name", ["job.sh", "pytorchjob.yaml"])
def test_a_file_in_place_of_a_program_is_named_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(FILES[name][0])
    done = CliRunner().invoke(cli, ["run", "--run-root", "runs", "--", name])
    assert isinstance(done.exception, SpecError)
    assert FILES[name][2] in str(done.exception)


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
        ("torchrun --nproc-per-node 8 -m pkg.m -- -i x", 'run: {module: pkg.m, args: ["-i", "x"]}'),
        ("torchrun t.py -- a -- b", 'run: {script: t.py, args: ["a", "--", "b"]}'),
        ("torchrun -- t.py -- a", 'run: {script: t.py, args: ["--", "a"]}'),
        ("python -m accelerate.commands.launch t.py -- a", 'run: {script: t.py, args: ["a"]}'),
        ("srun python t.py -- a", 'run: {script: t.py, args: ["--", "a"]}'),
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


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("torchrun --nproc_per_node 4 train.py --lr 1", "--gpus-per-host 4 -- train.py --lr 1"),
        (
            "/opt/bin/torchrun --nnodes=2:4 --nproc-per-node=8 -m pkg.train a",
            "--hosts 4 --gpus-per-host 8 -- -m pkg.train a",
        ),
        ("torchrun --nproc_per_node=gpu train.py", "-- train.py"),
        ("python3.11 -u train.py 'a b'", "-- train.py 'a b'"),
        ("python -m torch.distributed.run --nproc-per-node 2 t.py", "--gpus-per-host 2 -- t.py"),
        ("accelerate launch --num_machines=2 train.py", "--hosts 2 -- train.py"),
        (
            "deepspeed --num_gpus 4 train.py --deepspeed ds.json",
            "--gpus-per-host 4 -- train.py --deepspeed ds.json",
        ),
        ("srun --ntasks-per-node=8 python train.py", "--gpus-per-host 8 -- train.py"),
        (
            "accelerate launch --num_processes 16 --num_machines 2 train.py",
            "--hosts 2 --gpus-per-host 8 -- train.py",
        ),
        ("accelerate launch --num_processes 3 --num_machines 2 train.py", "--hosts 2 -- train.py"),
        ("mpirun -np 4 python train.py", "--gpus-per-host 4 -- train.py"),
        (
            "srun -N 2 --ntasks-per-node=8 python -u train.py",
            "--hosts 2 --gpus-per-host 8 -- train.py",
        ),
        ("srun -N2 -n16 python train.py", "--hosts 2 --gpus-per-host 8 -- train.py"),
        ("mpirun -np 8 -N 2 python train.py", "--hosts 4 --gpus-per-host 2 -- train.py"),
        ("torchrun --nnodes 0 -n 4 train.py", "--gpus-per-host 4 -- train.py"),
        (
            "srun --nodes=2 bash -c 'torchrun --nproc-per-node 8 train.py --lr 1'",
            "--hosts 2 --gpus-per-host 8 -- train.py --lr 1",
        ),
        ("uv run train.py --lr 1", "-- train.py --lr 1"),
        ("uv run torchrun --nproc_per_node 2 -m pkg.train", "--gpus-per-host 2 -- -m pkg.train"),
    ],
)
def test_a_launcher_is_left_out(line: str, typed: str) -> None:
    words = shlex.split(line)
    assert without_launcher(words) == (PurePath(words[0]).name, f"ndctl run {typed}")
    done = CliRunner().invoke(cli, ["run", "--", *words])
    assert isinstance(done.exception, SpecError)
    assert done.exception.message.startswith(f"leave {PurePath(words[0]).name} out: ")


@pytest.mark.parametrize(
    ("line", "left_out", "typed"),
    [
        (
            "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py",
            "torchrun",
            "--set 'run.env.CUDA_VISIBLE_DEVICES=\"0,1\"' --gpus-per-host 2 -- train.py",
        ),
        ("env OMP_NUM_THREADS=1 t.py", "env", "--set 'run.env.OMP_NUM_THREADS=\"1\"' -- t.py"),
        ("nohup python train.py", "python", "-- train.py"),
    ],
)
def test_variables_before_a_command_are_options(line: str, left_out: str, typed: str) -> None:
    assert without_launcher(shlex.split(line)) == (left_out, f"ndctl run {typed}")


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("torchrun --nproc-per-node 2 --no-python ./x.sh a", "--gpus-per-host 2 -- --no-python"),
        ("mpirun -np 8 -N 2 ./x.sh a", "--hosts 4 --gpus-per-host 2 -- --no-python"),
        ("nohup ./x.sh a", "-- --no-python"),
        (
            "A=1 torchrun --nproc-per-node 2 --no-python ./x.sh a",
            "--set 'run.env.A=\"1\"' --gpus-per-host 2 -- --no-python",
        ),
    ],
)
def test_an_executable_behind_a_launcher_is_in_the_fix(line: str, typed: str) -> None:
    done = CliRunner().invoke(cli, ["run", "--", *shlex.split(line)])
    assert isinstance(done.exception, SpecError)
    assert done.exception.fix == f"ndctl run {typed} ./x.sh a"


@pytest.mark.parametrize("line", ["nohup", "srun bash", "python3", "torchrun", "torchrun --help"])
def test_without_a_program_the_fix_is_an_example(line: str) -> None:
    done = CliRunner().invoke(cli, ["run", "--", *shlex.split(line)])
    assert isinstance(done.exception, SpecError)
    assert done.exception.fix == "for example: ndctl run -- train.py"


def test_a_launcher_that_exists_is_left_out_too() -> None:
    done = CliRunner().invoke(cli, ["run", "--", sys.executable, "train.py"])
    assert isinstance(done.exception, SpecError)
    assert done.exception.fix == "ndctl run -- train.py"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_as_a_module_is_left_out_too(name: str) -> None:
    """`python -m torch.distributed.run train.py`, typed without python."""
    done = CliRunner().invoke(cli, ["run", "--", "-m", name, "--nproc_per_node=2", "train.py"])
    assert isinstance(done.exception, SpecError)
    assert done.exception.message.startswith(f"leave {name} out: ")
    assert done.exception.fix == "ndctl run --gpus-per-host 2 -- train.py"


@given(
    st.sampled_from(["srun", "torchrun", "mpirun", "python", "uv"]),
    st.lists(
        st.sampled_from(
            ["-N", "-n", "-N0", "--nnodes=0", "--nproc-per-node", "bash", "-c", "-m", "2", "t.py",
             "torchrun 't.py' -n 2", "x 't.py", "m -m 'a b' t.py", ""]
        )
    ),
)  # fmt: skip
def test_any_command_line_gets_an_answer(launcher: str, words: list[str]) -> None:
    answer = without_launcher([launcher, *words])
    assert answer is not None
    assert not answer[1] or answer[1].startswith("ndctl run ")


def test_other_programs_are_no_launchers() -> None:
    for words in (("train.py",), ("-m", "pkg.train"), ("--no-python", "torchrun"), ()):
        assert without_launcher(words) is None


def test_a_job_spec_is_not_taken_over() -> None:
    with pytest.raises(SpecError, match="looks like a job spec already") as refused:
        taken_over("name: a\nmodel: {preset: llama-tiny}\n", PurePath("my job.yaml"))
    assert "`ndctl submit 'my job.yaml'` starts it" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "sky.yaml",
            "resources:\n  accelerators: H100:8\nnum_nodes: 2\nrun: |\n  torchrun train.py\n",
            "sky.yaml: this file is for SkyPilot, not a job spec",
        ),
        (
            "Makefile",
            "train:\n\ttorchrun --nproc_per_node 2 train.py\n",
            "Makefile: neither a script of a shell nor a manifest of Kubernetes",
        ),
        ("a.yaml", "name: a\nrun:\n\tscript: train.py\n", "a.yaml looks like a job spec already"),
    ],
)
def test_a_file_of_another_tool_with_keys_of_a_spec_is_named(
    name: str, text: str, words: str
) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(words)}"):
        taken_over(text, PurePath(name))


@pytest.mark.parametrize("line", ["train.py --lr 1", "python train.py --lr 1"])
def test_a_command_line_in_quotes_is_written_out(line: str) -> None:
    done = CliRunner().invoke(cli, ["run", "--", line])
    assert isinstance(done.exception, SpecError)
    assert done.exception.fix == "ndctl run -- train.py --lr 1"


def test_an_option_after_the_program_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["run", "--", "missing.py", "--hosts=2", "--lr", "1"])
    assert "note: --hosts=2 is an argument of missing.py" in done.output


@pytest.mark.parametrize("name", ["start.sh", "job.slurm", "job.pbs"])
def test_a_script_without_a_first_line_of_its_shell_is_one(name: str) -> None:
    text = "set -x\ntorchrun --nproc_per_node=4 a.py --lr 1\n"
    carried = taken_over(text, PurePath(name))
    assert carried.run == {"script": "a.py", "args": ["--lr", "1"]}
    assert carried.cluster["gpus_per_host"] == 4
    what = foreign_text(text, PurePath(name))
    assert what is not None
    assert what[0] == "this is a script of a shell, not a job spec"


def test_a_kind_that_ndctl_does_not_read_is_named() -> None:
    text = "apiVersion: kubeflow.org/v1\nkind: TFJob\nmetadata: {name: a}\nspec: {}\n"
    with pytest.raises(SpecError, match="ndctl takes no TFJob over") as refused:
        taken_over(text, PurePath("a.yaml"))
    assert "ndctl takes PyTorchJob, JobSet" in str(refused.value.fix)


def test_a_launcher_behind_a_profiler_is_left_out_too() -> None:
    words = ["nsys", "profile", "-o", "out", "torchrun", "--nproc_per_node=2", "train.py", "--x"]
    done = CliRunner().invoke(cli, ["run", "--run-root", "runs", "--", *words])
    assert "leave nsys and torchrun out: ndctl starts torchrun" in str(done.exception)
    assert "ndctl run --gpus-per-host 2 -- train.py --x" in str(done.exception)


def test_a_number_that_python_refuses_to_read_is_told() -> None:
    number = "9" * 5000
    with pytest.raises(SpecError, match="has a number of 1,000 digits or more"):
        taken_over(f"#!/bin/bash\nsrun -c {number} python t.py\n", Path("job.sh"))


@pytest.mark.parametrize(("nodes", "hosts"), [("2", 2), ("9" * 5000, 1), ("many", 1), ("[2]", 1)])
def test_a_task_of_skypilot_with_odd_numbers_has_a_command_that_works(
    nodes: str, hosts: int, tmp_path: Path
) -> None:
    gpus = "8" if hosts == 2 else "9" * 5000
    task = f"resources: {{accelerators: 'H100:{gpus}'}}\nnum_nodes: {nodes}\nrun: torchrun t.py\n"
    written = tmp_path / "task.yaml"
    written.write_text(task)
    with pytest.raises(SpecError) as told:
        read_spec(written)
    expected = f"--hosts {hosts} --gpus-per-host {8 if hosts == 2 else 1}`"
    assert expected in str(told.value)


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ("""torchrun t.py --name "a b" '$HOME'""", "ndctl run -- t.py --name 'a b' '$HOME'"),
        ('t.py  --name "a  b"', 'ndctl run -- t.py  --name "a  b"'),
        ("torchrun t.py it's", """ndctl run -- t.py 'it'"'"'s'"""),
    ],
)
def test_words_in_one_pair_of_quotes_keep_their_own_quotes(words: str, typed: str) -> None:
    done = CliRunner().invoke(cli, ["run", "--", words])
    assert isinstance(done.exception, SpecError)
    assert done.exception.fix == typed
