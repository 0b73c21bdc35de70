"""`${VAR}` in a spec: which values are replaced, how they are read, and what stays as it is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.spec.job_spec import JobSpec, ScriptSpec
from orchestrator.errors import SpecError
from orchestrator.load import dump_spec, load_spec

GOOD = """\
name: "${NAME:-demo}"
model: {preset: llama-tiny}
data: {files: "${DATA:-{stdlib}}/*.py", sequence_length: 64}
train:
  steps: ${STEPS:-10}
  global_batch_size: 8
  optimizer: {lr: "${LR:-3e-4}"}
  wandb: ${PROJECT:-}
"""


def job(environ: dict[str, str], more: str = "", *sets: str) -> JobSpec:
    spec = load_spec(GOOD + more, "job.yaml", sets, environ)
    assert isinstance(spec, JobSpec)
    return spec


def test_defaults_are_used_for_what_is_not_set_or_empty() -> None:
    for environ in ({}, {"STEPS": "", "DATA": ""}):
        spec = job(environ)
        assert (spec.name, spec.train.steps, spec.train.optimizer.lr) == ("demo", 10, 3e-4)
        assert spec.data.files == "{stdlib}/*.py"
        assert spec.train.wandb is None


def test_a_value_is_read_like_the_yaml_that_it_then_is() -> None:
    spec = job({"STEPS": "20", "LR": "1e-3", "DATA": "/data", "PROJECT": "llama"})
    assert (spec.train.steps, spec.train.optimizer.lr) == (20, 1e-3)
    assert (spec.data.files, spec.train.wandb) == ("/data/*.py", "llama")


@pytest.mark.parametrize("name", ["123", "1e5", "true", "0x1f"])
def test_a_key_that_takes_text_gets_the_text(name: str) -> None:
    assert job({"NAME": name, "PROJECT": name}).name == name
    assert job({"NAME": name, "PROJECT": name}).train.wandb == name


def test_a_variable_that_is_not_set_is_a_problem_with_its_place() -> None:
    with pytest.raises(SpecError) as refused:
        job({}, 'run_root: "/x/${TEAM}/${USER_X}"\nobjective: ${GOAL}\n')
    said = str(refused.value)
    assert "job.yaml:9: run_root: must be a value whose variables are set; TEAM is not" in said
    assert "USER_X is not" in said
    assert "job.yaml:10: objective" in said
    assert "write ${TEAM:-default}" in said


def test_an_option_replaces_a_value_whose_variable_is_not_set() -> None:
    assert job({}, "run_root: ${TEAM}\n", "run_root=/y").run_root == "/y"


def test_two_dollars_keep_the_text() -> None:
    assert job({"X": "1"}, 'run_root: "/a/$${X}/$X/$$/${X}"\n').run_root == "/a/${X}/$X/$$/1"


@pytest.mark.parametrize("form", ["${A-b}", "${A:?unset}", "${A:+b}"])
def test_other_forms_of_a_shell_are_refused_with_the_way_out(form: str) -> None:
    with pytest.raises(SpecError) as refused:
        job({"A": "1"}, f'run_root: "/x/{form}"\n')
    assert "${VAR:-default}" in str(refused.value)
    assert f"$${form[1:]}" in str(refused.value)


SHELL = """\
cluster:
  slurm:
    setup: ['export OUT=${SCRATCH}/$SLURM_JOB_ID', 'echo ${HOME:-x} $${y}']
    hooks: {before: 'test -d ${SCRATCH}'}
  kubernetes: {pod_template: {spec: {containers: [{name: a, command: [sh, -c, '${POD}']}]}}}
notify: [{command: [sh, -c, 'cat > ${LOG}']}]
resilience:
  failure_classes: [{name: a, scope: user, action: stop, patterns: ['x$|${']}]
"""


def test_text_that_a_shell_or_another_program_reads_stays_as_it_is() -> None:
    spec = job({"HOME": "/home/me"}, SHELL)
    slurm = spec.cluster.slurm
    assert slurm.setup == ("export OUT=${SCRATCH}/$SLURM_JOB_ID", "echo ${HOME:-x} $${y}")
    assert slurm.hooks.before == "test -d ${SCRATCH}"
    assert spec.notify[0].command == ("sh", "-c", "cat > ${LOG}")
    assert spec.resilience.failure_classes[0].patterns == ("x$|${",)
    assert "${POD}" in str(spec.cluster.kubernetes.pod_template)
    assert load_spec(dump_spec(spec), "copy") == spec


OWN = "name: x\nrun: {PROGRAM, args: [-c, 'echo ${RANK}', '${OUT:-here}']}\n"


@pytest.mark.parametrize("shell", ["bash", "/bin/sh", "/usr/bin/zsh"])
def test_arguments_of_a_shell_stay_as_they_are(shell: str) -> None:
    spec = load_spec(OWN.replace("PROGRAM", f"program: {shell}"), "job.yaml", (), {})
    assert isinstance(spec, ScriptSpec)
    assert spec.run.args == ("-c", "echo ${RANK}", "${OUT:-here}")


def test_arguments_of_other_programs_are_replaced() -> None:
    text = OWN.replace("PROGRAM", "script: train.py")
    spec = load_spec(text, "job.yaml", (), {"RANK": "7", "OUT": "/out"})
    assert isinstance(spec, ScriptSpec)
    assert spec.run.args == ("-c", "echo 7", "/out")
    with pytest.raises(SpecError, match=r"run.args\[1\].*RANK is not"):
        load_spec(text, "job.yaml", (), {})


def test_interpolations_of_hydra_stay_as_they_are() -> None:
    text = "name: x\nrun: {script: t.py, args: ['a=${oc.env:LR}', 'b=${now:%Y}', 'c=${d.e}']}\n"
    spec = load_spec(text, "job.yaml", (), {})
    assert isinstance(spec, ScriptSpec)
    assert spec.run.args == ("a=${oc.env:LR}", "b=${now:%Y}", "c=${d.e}")


def test_inside_braces_a_variable_without_quotes_is_explained() -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(GOOD + "cluster: {hosts: ${HOSTS}}\n", "job.yaml", (), {"HOSTS": "2"})
    assert 'quote a value with variables: "${VAR}"' in refused.value.fix


def test_a_spec_that_ndctl_wrote_has_no_variables() -> None:
    """The copy in a run directory must not change when the job resumes elsewhere."""
    spec = job({"DATA": "/data"}, 'run_root: "/a/$${HOME}"\n')
    copy = dump_spec(spec)
    assert "$${HOME}" in copy
    assert load_spec(copy, "copy") == spec
    assert load_spec(copy, "copy", (), {"HOME": "/home/me"}) == spec


@given(st.text(alphabet="${}AB:-x", min_size=1, max_size=12))
def test_any_text_survives_being_written_and_read(text: str) -> None:
    spec = load_spec(GOOD, "job.yaml", (f"run_root='{text}'",), {})
    assert spec.run_root == text
    assert load_spec(dump_spec(spec), "copy").run_root == text
    assert load_spec(dump_spec(spec), "copy", (), {"A": "1", "B": "2"}).run_root == text


def test_a_run_directory_keeps_dollars(tmp_path: Path) -> None:
    spec = load_spec("name: x\nrun: {script: t.py, args: ['$${A}']}\n", "job.yaml", (), {})
    assert isinstance(spec, ScriptSpec)
    assert spec.run.args == ("${A}",)
    path = tmp_path / "spec.yaml"
    path.write_text(dump_spec(spec))
    from orchestrator.load import read_spec

    assert read_spec(path) == spec
