"""Plans for runs of other training software: by the option, and by the key of an inventory."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.planner_accuracy import with_basis
from benchmarks.published.compared import compare
from benchmarks.published.runs import runs, sources
from orchestrator.cli import cli
from orchestrator.inventory.profiles import CALIBRATIONS, load_profile
from orchestrator.inventory.software import for_software, software_names
from orchestrator.speed_history import path_of, remember
from tests.plan.history.jobs import EXAMPLES, record, setup

SPEC = str(EXAMPLES / "llama3-8b.yaml")
KEYS = ("cluster.hosts=2", "parallel.tp=4", "parallel.pp=2", "train.compile=true")
SETTINGS = [word for key in KEYS for word in ("--set", key)]
OVERLAP = "megatron-tp-overlap"


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    return _hosts(tmp_path / "hosts.yaml", "")


def _hosts(path: Path, more: str) -> Path:
    path.write_text(f"{{profile: h100-sxm-80gb, hosts: 2, devices_per_host: 8{more}}}")
    return path


def _said(hosts: Path, *words: str) -> str:
    runner = CliRunner(env={"NDCTL_RUN_ROOT": str(hosts.parent)})
    done = runner.invoke(cli, ["plan", SPEC, *SETTINGS, "--inventory", str(hosts), *words])
    assert done.exit_code == 0, done.output
    return done.output


def _json(hosts: Path, *words: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(_said(hosts, *words, "--json"))
    return body


def test_the_option_and_the_key_are_two_ways_to_write_one_plan(hosts: Path) -> None:
    by_key = _hosts(hosts.parent / "megatron.yaml", f", software: {OVERLAP}")
    assert _said(by_key) == _said(hosts, "--software", OVERLAP)
    listed = hosts.parent / "listed.yaml"
    listed.write_text(
        f"{{profile: h100-sxm-80gb, devices_per_host: 8, software: {OVERLAP},"
        " hosts: [{name: 'node-[1-2]'}]}"
    )
    assert _json(listed)["time"] == _json(by_key)["time"]


def test_the_plan_says_which_software_it_is_for(hosts: Path) -> None:
    page = hosts.parent / "plan.html"
    text = " ".join(_said(hosts, "--software", OVERLAP, "--html", str(page)).split())
    line = f"{OVERLAP}: times are for it, memory is that of the bundled trainer; "
    assert f"software {line}" in text
    assert f"speed of {OVERLAP}, memory of the bundled trainer" in page.read_text()
    assert line in page.read_text()
    words = ("--software", OVERLAP)
    assert line in " ".join(_said(hosts, *words, "--explain", "tp=8").split())
    assert line in " ".join(_said(hosts, *words, "--compare", "parallel.tp=2,4").split())
    known = _json(hosts, *words)["software"]
    assert known["name"] == OVERLAP
    assert known["runs"] > 0


def test_a_plan_without_other_software_does_not_mention_any(hosts: Path) -> None:
    plain = _said(hosts)
    assert "software" not in plain
    assert _json(hosts)["software"] is None
    assert _said(hosts, "--software", "torch") == plain


def test_each_overlap_makes_a_step_shorter(hosts: Path) -> None:
    torch, megatron, overlap = (
        _json(hosts, "--software", name)["time"]["step_s"]
        for name in ("torch", "megatron", OVERLAP)
    )
    assert overlap < megatron < torch


def test_earlier_jobs_of_the_bundled_trainer_do_not_count(hosts: Path) -> None:
    before = _json(hosts, "--software", "megatron")
    for number in range(3):
        remember(path_of(hosts.parent), record(setup(), 2.0, number))
    assert _json(hosts)["time"]["correction"] is not None
    assert _json(hosts, "--software", "megatron") == before
    by_key = _hosts(hosts.parent / "megatron.yaml", ", software: megatron")
    assert _json(by_key)["time"] == before["time"]


def test_overridden_constants_stay() -> None:
    given = {"calibration": {"tp_hidden": 0.5, "attention": "flash2"}}
    profile = load_profile("h100-sxm-80gb", given, "a test")
    known = for_software(profile, OVERLAP).calibration
    assert (known.tp_hidden, known.attention, known.accumulate_bytes) == (0.5, "flash2", 0)
    # cuDNN's attention has no measured speed on an A100.
    assert for_software(load_profile("a100-sxm-80gb"), OVERLAP).calibration.attention == "flash2"


def test_megatron_keeps_whole_weights_unless_the_spec_says_otherwise(hosts: Path) -> None:
    words = ("--set", "parallel.tp=1", "--set", "parallel.pp=1")
    torch, megatron = (_json(hosts, *words, "--software", name) for name in ("torch", "megatron"))
    assert torch["reduce_gradients"] == "each"
    assert (megatron["reshard_after_forward"], megatron["reduce_gradients"]) == (False, "last")
    assert "parallel.fsdp" not in str(megatron["prices"])
    fixed = ("--set", "parallel.fsdp.reshard_after_forward=true")
    assert _json(hosts, *words, *fixed, "--software", "megatron")["reshard_after_forward"] is True


def test_stages_of_megatron_have_as_many_layers_each(hosts: Path) -> None:
    """The bundled trainer gives the stage with the head fewer."""
    uneven, even = (
        [
            stage["items"]["parameters"]
            for stage in _json(hosts, "--software", name)["memory_along_pp"]
        ]
        for name in ("torch", "megatron")
    )
    assert even[0] == pytest.approx(even[1], rel=1e-3)
    assert uneven[0] > 1.01 * uneven[1]


def test_a_mesh_that_does_not_fit_is_timed_as_megatron_runs_it(hosts: Path) -> None:
    """Its traffic for gradients is that of one micro batch, not of each."""
    keys = "pp=1,tp=1,train.activation_checkpointing=none,train.micro_batch_size=1"
    made = _json(hosts, "--software", "megatron", "--explain", keys)
    sent = {one["collective"]: one["bytes_per_step"] for one in made["beside"]["communication"]}
    # 8.03 billion parameters, weights in bfloat16 and gradients in float32, once in a step.
    assert sent["all-gather"] == pytest.approx(2 * 8.03e9, rel=0.1)
    assert sent["reduce-scatter"] == pytest.approx(4 * 8.03e9, rel=0.1)


def test_a_schedule_that_megatron_lacks_gets_a_note(hosts: Path) -> None:
    def said(schedule: str, *words: str) -> str:
        keys = ("train.compile=false", f"parallel.pipeline.schedule={schedule}")
        given = [word for key in keys for word in ("--set", key)]
        return " ".join(_said(hosts, *given, *words).split())

    note = "megatron has no schedule zbv; for its own: --set parallel.pipeline.schedule=interleaved"
    assert note in said("zbv", "--software", "megatron")
    assert note not in said("interleaved_1f1b", "--software", "megatron")
    assert note not in said("zbv")


def test_eager_layers_get_a_note(hosts: Path) -> None:
    note = "has fused kernels, which train.compile=true describes best"
    assert note not in _said(hosts, "--software", "megatron")
    eager = ("--software", "megatron", "--set", "train.compile=false")
    assert note in " ".join(_said(hosts, *eager).split())


@pytest.mark.parametrize(
    ("words", "key", "parts"),
    [
        (("--software", "nemo"), "", ("one of torch, megatron, ", "did you mean megatron?")),
        (("--software", "mgatron"), "", ("did you mean megatron?",)),
        (("--software", "x"), "", ("without it the plan is for torch",)),
        ((), ", software: torchtitan", ("software: must be one of torch", "did you mean torch?")),
        (("--software", "torch"), ", software: megatron", ("for runs of megatron", "leave --soft")),
        (("--software", "megatron", "--zero"), "", ("shows memory alone",)),
    ],
)
def test_mistakes_are_refused(
    tmp_path: Path, words: tuple[str, ...], key: str, parts: tuple[str, ...]
) -> None:
    hosts = _hosts(tmp_path / "hosts.yaml", key)
    done = CliRunner().invoke(cli, ["plan", SPEC, "--inventory", str(hosts), *words])
    assert done.exit_code != 0
    said = done.output if done.exception is None else f"{done.output}{done.exception}"
    assert all(part in said for part in parts), said


def test_a_job_is_not_submitted_with_the_plan_of_other_software(tmp_path: Path) -> None:
    hosts = _hosts(tmp_path / "hosts.yaml", ", software: megatron")
    words = ["submit", SPEC, "--inventory", str(hosts), "--dry-run", "--run-root", str(tmp_path)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code != 0
    assert "a job runs the bundled trainer" in str(done.exception)


def test_published_sources_and_the_option_have_the_same_names() -> None:
    assert {one.software for one in sources().values()} == set(software_names())
    said = " ".join(CliRunner().invoke(cli, ["plan", "--help"]).output.split())
    first, *others = software_names()
    assert f"training software: {first}, {' or '.join(others)}." in said
    text = (CALIBRATIONS / "software.toml").read_text()
    assert with_basis(text, compare(runs())) == text, "run planner_accuracy with --write"
