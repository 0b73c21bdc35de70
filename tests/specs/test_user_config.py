"""`~/.config/ndctl/config.yaml`: what it gives, what wins over it, and when it is not trusted."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli import cli
from orchestrator.errors import SpecError
from orchestrator.job_paths import run_root_of
from orchestrator.load import read_spec, read_written, written_from

ROOT = Path(__file__).parents[2]
H100 = str(ROOT / "examples" / "inventories" / "h100.yaml")
SPEC = """\
name: demo
model: {preset: llama-tiny}
data: {files: "{stdlib}/*.py", sequence_length: 64}
train: {steps: 10, global_batch_size: 8}
"""
MINE = """\
# my site
run_root: /scratch/${TEAM}/runs
partition: [gpu, long]
image: ghcr.io/me/ndctl:1
price: 2.5
notify:
  - {on: [failed], slack: "env:SLACK_URL"}
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "config" / "ndctl").mkdir(parents=True)
    (tmp_path / "config" / "ndctl" / "config.yaml").write_text(MINE)
    (tmp_path / "job.yaml").write_text(SPEC)
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "TEAM": "nlp", "HOME": str(tmp_path)}


def config(environ: dict[str, str]) -> Path:
    return Path(environ["XDG_CONFIG_HOME"]) / "ndctl" / "config.yaml"


def ndctl(environ: dict[str, str], *words: str) -> Result:
    return CliRunner().invoke(cli, words, env=environ)


def test_a_spec_that_says_nothing_gets_the_settings(
    environ: dict[str, str], tmp_path: Path
) -> None:
    spec = read_spec(tmp_path / "job.yaml", ("cluster.backend=slurm",), environ)
    assert spec.run_root == "/scratch/nlp/runs"
    assert spec.cluster.slurm.partition == ("gpu", "long")
    assert spec.notify[0].slack == "env:SLACK_URL"
    assert spec.cluster.kubernetes.image is None, "it is the setting of another backend"
    spec = read_spec(tmp_path / "job.yaml", ("cluster.backend=kubernetes",), environ)
    assert spec.cluster.kubernetes.image == "ghcr.io/me/ndctl:1"
    assert spec.cluster.slurm.partition is None


def test_what_the_spec_or_an_option_says_wins(environ: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SPEC + "run_root: here\nnotify: []\ncluster: {backend: slurm}\n")
    spec = read_spec(path, ("cluster.slurm.partition=debug",), environ)
    assert (spec.run_root, spec.notify) == ("here", ())
    assert spec.cluster.slurm.partition == "debug"
    # Null is what the spec says, too: the cluster's own partition.
    assert read_spec(path, ("cluster.slurm.partition=null",), environ).cluster.slurm == (
        read_spec(path, (), {}).cluster.slurm
    )


def test_the_run_root_of_commands_without_a_spec(environ: dict[str, str]) -> None:
    assert run_root_of(None, environ) == Path("/scratch/nlp/runs")
    assert run_root_of("x", environ) == Path("x")
    assert run_root_of(None, environ | {"NDCTL_RUN_ROOT": "/y"}) == Path("/y")
    config(environ).write_text("run_root: ~/runs\n")
    assert run_root_of(None, environ) == Path(environ["HOME"]) / "runs"
    config(environ).unlink()
    assert run_root_of(None, environ) == Path("ndctl-runs")


def test_a_spec_that_ndctl_wrote_and_one_of_a_notebook(
    environ: dict[str, str], tmp_path: Path
) -> None:
    assert read_spec(tmp_path / "job.yaml").run_root == "ndctl-runs"
    data = {"name": "x", "run": {"script": "t.py"}}
    assert written_from(data, "spec", (), environ).spec.run_root == "/scratch/nlp/runs"


def test_commands_say_which_values_came_from_there(environ: dict[str, str], tmp_path: Path) -> None:
    written = read_written(tmp_path / "job.yaml", ("cluster.backend=slurm",), environ)
    assert written.from_user == (
        f"run_root: /scratch/nlp/runs is from {config(environ)}:2",
        f"cluster.slurm.partition: gpu, long is from {config(environ)}:3",
        f"notify: a list of 1 is from {config(environ)}:6",
    )
    job = (str(tmp_path / "job.yaml"), "--set", "cluster.backend=slurm", "--inventory", H100)
    for verb in ("plan", "validate"):
        done = ndctl(environ, verb, *job)
        assert done.exit_code == 0, done.output
        assert f"note: run_root: /scratch/nlp/runs is from {config(environ)}:2" in done.output
    assert "#SBATCH --partition=gpu,long" in ndctl(environ, "render", *job).stdout


def test_the_price_counts_below_the_inventory_and_the_option(
    environ: dict[str, str], tmp_path: Path
) -> None:
    job = ("plan", str(tmp_path / "job.yaml"), "--inventory", H100, "--json")

    def price(*more: str) -> tuple[float, str]:
        decision = json.loads(ndctl(environ, *job, *more).stdout)["decision"]
        return decision["price_per_gpu_hour"], decision["price_from"]

    assert price() == (2.5, "your settings")
    assert price("--price", "3") == (3.0, "--price")


def test_all_mistakes_are_reported_at_once_with_their_places(
    environ: dict[str, str], tmp_path: Path
) -> None:
    config(environ).write_text(
        "run_rot: /x\nprice: -1\nnotify: [{slack: https://hooks.slack.com/x}]\nimage: ${IMAGE}\n"
    )
    done = ndctl(environ, "validate", str(tmp_path / "job.yaml"))
    assert isinstance(done.exception, SpecError)
    said = str(done.exception)
    assert f"{config(environ)} has 4 problems" in said
    for line, key in ((1, "run_rot"), (2, "price"), (3, "notify[0].slack"), (4, "image")):
        assert f"{config(environ)}:{line}: {key}" in said
    assert "file:PATH or env:VARIABLE" in said, "secrets are not written there"


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n"])
def test_an_empty_file_changes_nothing(environ: dict[str, str], tmp_path: Path, text: str) -> None:
    config(environ).write_text(text)
    assert read_spec(tmp_path / "job.yaml", (), environ) == read_spec(tmp_path / "job.yaml")


def test_a_file_that_cannot_be_read_is_refused_by_name(environ: dict[str, str]) -> None:
    file = config(environ)
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(SpecError, match=r"config\.yaml: cannot be read: Too many levels"):
        run_root_of(None, environ)


def test_a_file_that_others_can_write_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    config(environ).chmod(0o666)
    with pytest.raises(SpecError, match="can be written by every user") as refused:
        read_spec(tmp_path / "job.yaml", (), environ)
    assert refused.value.fix == f"chmod o-w {config(environ)}"
    config(environ).chmod(0o600)
    config(environ).parent.chmod(0o777)
    with pytest.raises(SpecError, match=r"ndctl can be written by every user"):
        read_spec(tmp_path / "job.yaml", (), environ)


def test_a_link_in_a_folder_that_others_can_write_is_refused(
    environ: dict[str, str], tmp_path: Path
) -> None:
    real = tmp_path / "dotfiles" / "config.yaml"
    real.parent.mkdir()
    config(environ).rename(real)
    config(environ).symlink_to(real)
    assert read_spec(tmp_path / "job.yaml", (), environ).run_root == "/scratch/nlp/runs"
    config(environ).parent.parent.chmod(0o777)
    with pytest.raises(SpecError, match=r"config can be written by every user"):
        read_spec(tmp_path / "job.yaml", (), environ)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    os.chown(config(environ), 12345, 12345)
    with pytest.raises(SpecError, match=r"config.yaml belongs to user 12345"):
        read_spec(tmp_path / "job.yaml", (), environ)


def test_a_missing_file_costs_no_import() -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom orchestrator.job_paths import run_root_of\n"
        "run_root_of(None, {'HOME': '/nowhere'})\n"
        "assert not {'yaml', 'orchestrator.specs'} & {*sys.modules}, sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
