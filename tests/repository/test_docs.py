"""The documents agree with the program and with the files of the repository."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from orchestrator.backends.kubernetes.render.pods import DOWNWARD
from orchestrator.cli import cli
from orchestrator.contract.files import env, exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.job.stage import State
from tests.backends.slurm.slurm_launch import portable
from tests.golden import changes
from tests.repository import planning_docs

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
STATUS = (ROOT / "docs" / "status.md").read_text()
RECOVER = (ROOT / "docs" / "recover.md").read_text()
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "corpus/README.md"),
    *("slurm/README.md", "slurm/testbed/README.md"),
    *("manifests/README.md", "manifests/crds/README.md", "manifests/testbed/README.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "benchmarks" / "results").glob("*.md"),
]

H100 = ROOT / "examples" / "inventories" / "h100.yaml"
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.yaml") if path.stem != "trainer")
"""trainer.yaml is a configuration of the trainer, not a job spec."""


@pytest.mark.process
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "docs" / "plan" / "index.html").exists()


def test_every_exit_code_is_documented() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE, re.MULTILINE)}
    assert documented == {code for name, code in vars(exit_codes).items() if name.isupper()}


def test_every_state_is_documented() -> None:
    for state in get_args(State):
        assert state in STATUS


def test_every_environment_variable_of_ndctl_is_documented() -> None:
    values = {value for value in vars(env).values() if isinstance(value, str)}
    names = {value for value in values if value.startswith("NDCTL_")}  # the others are torchrun's
    cells = re.findall(r"^\| (`NDCTL_.+?) \|", REFERENCE, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert documented == names | set(DOWNWARD)


def test_every_file_of_the_run_directory_is_documented() -> None:
    run_dir = RunDir(Path("/run"))
    for path in (
        run_dir.spec,
        run_dir.journal,
        run_dir.metrics,
        run_dir.samples,
        run_dir.tokens,
        run_dir.token,
        run_dir.leader,
        run_dir.fence,
    ):
        assert path.name in REFERENCE


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_and_files_that_documents_mention_exist(document: Path | str) -> None:
    text = (ROOT / document).read_text()
    for verb in re.findall(r"`ndctl ([a-z]+)", text):
        assert verb in cli.commands, verb
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / document).parent.joinpath(path).exists(), path


def test_files_that_the_help_mentions_exist() -> None:
    help_text = " ".join(
        f"{command.help} {command.epilog} {[getattr(one, 'help', '') for one in command.params]}"
        for command in (cli, *cli.commands.values())
    )
    named = set(re.findall(r"examples/[\w/.-]+", help_text))
    assert any(path.startswith("examples/inventories/") for path in named)
    for path in named:
        assert (ROOT / path).is_file(), path


PLANNED = {
    name
    for document in planning_docs.DOCUMENTS
    for command in planning_docs.commands(document.read_text())
    for name in re.findall(r"^plan examples/(\S+) --inventory examples/\S+$", command)
}
"""Examples whose whole plan is in a document, where another test compares it."""


@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path.name not in PLANNED], ids=lambda path: path.name
)
def test_every_example_can_be_planned(example: Path) -> None:
    from orchestrator.app.planning import plans

    on = H100 if example.stem.startswith(("llama3", "slurm", "kubernetes")) else None
    planned = plans.plan_spec(example, (), {}, on)
    cluster = planned.spec.cluster
    assert planned.plan.world_size == cluster.hosts * cluster.gpus_per_host


def test_the_scripts_of_the_slurm_examples_equal_the_golden_files() -> None:
    from orchestrator.app.planning import plans
    from orchestrator.app.submission import payload, submit_job

    def script(name: str) -> str:
        planned = plans.plan_spec(ROOT / "examples" / f"{name}.yaml", (), {}, H100)
        submission = payload.Submission(planned=planned, run_root=Path("/runs"))
        return portable(submit_job.render(submission, {}), Path.cwd())

    golden = ROOT / "tests" / "backends" / "slurm" / "golden"
    plain = script("slurm")
    assert plain == (golden / "example-slurm.sh").read_text()
    spare = changes(plain, script("slurm-spare"))
    assert spare == (golden / "example-slurm-spare.diff").read_text()


@pytest.mark.parametrize(
    ("document", "command"),
    [
        (path.name, command)
        for path in planning_docs.DOCUMENTS
        for command in planning_docs.commands(path.read_text())
    ],
)
def test_outputs_in_documents_equal_those_of_their_commands(
    document: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m tests.repository.planning_docs` writes the present outputs."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / document).read_text()
    assert f"$ ndctl {command}\n{planning_docs.printed(command)}\n```" in text


def test_tests_that_the_guarantees_in_recover_md_mention_exist() -> None:
    named = re.findall(r"`((?:tests|orchestrator)/[^`]+)`", RECOVER)
    assert len(named) > 15
    for path in named:
        assert (ROOT / path).exists(), path


def test_files_that_the_architecture_mentions_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:orchestrator|trainer|tests)/[\w/.]+)`", text)
    assert len(named) > 30
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_walk_through_one_job_in_the_architecture_is_short() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    walk = text.split("## One job")[1].split("## State")[0]
    assert len(walk.split()) <= 1500


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
