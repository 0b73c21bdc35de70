"""`-f base.yaml -f site.yaml`: what wins, what null does, and where problems are reported."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.types import OVERLAY
from orchestrator.dashboard.command_hints import Commands
from orchestrator.errors import SpecError
from orchestrator.load import read_spec, read_written

ROOT = Path(__file__).parents[2]
BASE = """\
name: demo
model: {preset: llama-tiny}
data:
  files: "{stdlib}/*.py"
  sequence_length: 64
train:
  steps: 10
  global_batch_size: 8
  optimizer: {lr: 0.1, eps: 1e-6}
  grad_clip: 2.0
cluster:
  gpus_per_host: 2
  slurm:
    partition: [a, b]
    env: {A: "1", B: "2"}
    time: 90
  kubernetes:
    pod_template: {spec: {hostIPC: true, dnsPolicy: Default}}
"""


def laid(tmp_path: Path, *overlays: str, sets: tuple[str, ...] = ()) -> JobSpec:
    (tmp_path / "base.yaml").write_text(BASE)
    spec = read_spec(tmp_path / "base.yaml", (*files(tmp_path, *overlays), *sets), {})
    assert isinstance(spec, JobSpec)
    return spec


def files(tmp_path: Path, *overlays: str) -> list[str]:
    words = []
    for number, text in enumerate(overlays):
        path = tmp_path / f"over{number}.yaml"
        path.write_text(text)
        words.append(f"{OVERLAY}{path}")
    return words


def test_mappings_merge_key_by_key_and_lists_are_replaced(tmp_path: Path) -> None:
    spec = laid(tmp_path, "train: {optimizer: {lr: 0.2}}\ncluster: {slurm: {partition: [c]}}\n")
    assert (spec.train.optimizer.lr, spec.train.optimizer.eps) == (0.2, 1e-6)
    assert (spec.train.steps, spec.cluster.gpus_per_host) == (10, 2)
    assert spec.cluster.slurm.partition == ("c",)


def test_a_later_file_wins_and_an_option_wins_over_all_files(tmp_path: Path) -> None:
    overlays = ("train: {steps: 20}\nname: one\n", "train: {steps: 30}\n")
    assert laid(tmp_path, *overlays).train.steps == 30
    assert laid(tmp_path, *overlays).name == "one"
    assert laid(tmp_path, *overlays, sets=("train.steps=40",)).train.steps == 40


@pytest.mark.parametrize(
    ("overlay", "path", "value"),
    [
        ("cluster: {gpus_per_host: null}", "cluster.gpus_per_host", 1),  # the default again
        ("train: {optimizer: null}", "train.optimizer.lr", 3e-4),
        ("cluster: {slurm: {time: ~}}", "cluster.slurm.time", None),
        ("cluster: {slurm: {env: {A: null}}}", "cluster.slurm.env", {"B": "2"}),
        # These keys know null, as their own value and not as their default.
        ("train: {grad_clip: null}", "train.grad_clip", None),
        ("cluster: {kubernetes: {shm: null}}", "cluster.kubernetes.shm", None),
        # Null in a pod template removes a key of the pod.
        (
            "cluster: {kubernetes: {pod_template: {spec: {hostIPC: null}}}}",
            "cluster.kubernetes.pod_template",
            {"spec": {"hostIPC": None, "dnsPolicy": "Default"}},
        ),
    ],
)
def test_null_removes_a_key_unless_null_is_its_value(
    tmp_path: Path, overlay: str, path: str, value: object
) -> None:
    found: Any = laid(tmp_path, overlay)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_problems_name_the_file_and_line_that_the_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE.replace("steps: 10", "steps: ten"))
    overlay = (
        "cluster:\n  slurm:\n    partition:\n      - one two\ntrain:\n  global_batch_size: 0\n"
    )
    with pytest.raises(SpecError) as refused:
        read_spec(tmp_path / "base.yaml", files(tmp_path, overlay), {})
    lines = refused.value.message.splitlines()
    assert lines[0] == f"{tmp_path}/base.yaml with {tmp_path}/over0.yaml has 3 problems"
    assert {line.split(": must")[0] for line in lines[1:] if "must be" in line} == {
        f"{tmp_path}/base.yaml:7: train.steps",
        f"{tmp_path}/over0.yaml:6: train.global_batch_size",
        f"{tmp_path}/over0.yaml:3: cluster.slurm.partition",
    }


def test_a_missing_key_that_an_overlay_removed_is_reported_at_its_section(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"base.yaml:6: train.steps: must be given"):
        laid(tmp_path, "train: {steps: null}")


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        ("- train", r"over0.yaml:1: \(top\): must be a mapping of the keys that it changes"),
        ("train: [", r"over0.yaml:2:1: not YAML"),
        ("train: {steps: 1, steps: 2}", r"over0.yaml:1: train.steps: given a second time"),
        ("trian: {}", r"over0.yaml:1: trian"),
    ],
)
def test_a_wrong_overlay_is_refused_at_its_place(tmp_path: Path, overlay: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        laid(tmp_path, overlay)


def test_an_empty_overlay_changes_nothing(tmp_path: Path) -> None:
    assert laid(tmp_path, "# nothing yet\n") == laid(tmp_path)


@pytest.mark.parametrize("verb", ["validate", "plan", "render", "forecast"])
def test_commands_take_several_files(tmp_path: Path, verb: str) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "site.yaml").write_text("cluster: {backend: slurm, hosts: 3}\n")
    more = ["--inventory", str(ROOT / "examples" / "inventories" / "h100.yaml")]
    more += ["--days", "1", "--histories", "2"] if verb == "forecast" else []
    both = ["-f", str(tmp_path / "base.yaml"), "-f", str(tmp_path / "site.yaml"), *more]
    done = CliRunner().invoke(cli, [verb, *both])
    assert done.exit_code == 0, done.output
    assert {"validate": "6 ranks", "plan": "3 hosts", "render": "--nodes=3", "forecast": ""}[
        verb
    ] in done.stdout
    over = CliRunner().invoke(cli, [verb, both[1], *both[2:]])
    assert over.stdout == done.stdout
    assert CliRunner().invoke(cli, [verb]).exit_code == 2


def test_the_command_that_resumes_a_job_names_its_overlays(tmp_path: Path) -> None:
    from orchestrator.app.commands import submitted_from

    (tmp_path / "base.yaml").write_text(BASE)
    word = files(tmp_path, "train: {steps: 20}")[0]
    written = read_written(tmp_path / "base.yaml", (word, "name=two"), {})
    origin = submitted_from(written)
    commands = Commands(job="two", spec=origin["spec"], overrides=tuple(origin["overrides"]))
    assert commands.submit() == (
        f"ndctl submit {tmp_path}/base.yaml -f {tmp_path}/over0.yaml --set name=two --resume"
    )
