"""A job without a fault, as shown by every command."""

import json
import shutil

import pytest

from tests.e2e.job import Ndctl, processes_of

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(900)]


def test_an_uninterrupted_job_succeeds_with_falling_loss(reference: Ndctl) -> None:
    status = reference.status()
    assert status["state"] == "SUCCEEDED"
    assert (status["step"], status["steps"], status["restarts"]) == (24, 24, 0)
    losses = reference.losses()
    assert sorted(losses) == list(range(1, 25))
    assert losses[24] < 0.75 * losses[1]
    assert not processes_of(reference.run_dir)


def test_status_as_json_has_the_keys_that_scripts_read(reference: Ndctl) -> None:
    status = reference.status()
    wanted = {
        "name", "state", "backend", "attempt", "restarts", "step", "steps", "loss",
        "tokens_per_second", "hosts", "world_size", "mesh", "incidents", "checkpoint",
    }  # fmt: skip
    assert wanted <= set(status)
    assert status["hosts"] == ["host-0", "host-1"]
    assert status["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1}
    assert status["loss"] == reference.losses()[24]


def test_status_compares_the_plan_with_what_was_measured(reference: Ndctl) -> None:
    measured = reference.status()["measured"]
    # 24 steps without the first 5, and without the two after the saves at 8 and 16.
    assert measured["steps"] == 17
    assert measured["step_s"] > 0
    assert measured["planned_step_s"] > 0
    assert (measured["calibrated"], measured["slower"]) == (False, None), "the profile of CPUs"
    assert measured["memory_bytes"] > 100 << 20
    assert measured["memory_rank"] in range(4)
    assert "the constants of cpu are guesses" in " ".join(reference("status", "e2e").out.split())


def test_every_step_is_a_line_of_metrics(reference: Ndctl) -> None:
    lines = (reference.run_dir / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert {"attempt", "step", "loss", "grad_norm", "lr", "tokens_per_second"} <= set(first)
    assert len(lines) == 24


def test_only_the_newest_checkpoints_are_kept(reference: Ndctl) -> None:
    folders = sorted(folder.name for folder in (reference.run_dir / "checkpoints").iterdir())
    assert folders == ["step-16", "step-24"]


def test_only_the_owner_can_read_the_token(reference: Ndctl) -> None:
    assert (reference.run_dir / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("list",), "SUCCEEDED"),
        (("status", "e2e"), "24 of 24"),
        (("describe", "e2e"), "Checkpoints"),
        (("events", "e2e"), "all ranks on host-1 finished"),
        (("logs", "e2e", "--rank", "0"), "step 24/24"),
        (("dashboard", "e2e"), "✓ SUCCEEDED"),
    ],
)
def test_the_views_show_a_job_after_its_end(
    reference: Ndctl, words: tuple[str, ...], shown: str
) -> None:
    done = reference(*words)
    assert done.code == 0, done.err
    assert shown in done.out


def test_a_finished_job_is_not_started_again_without_a_flag(reference: Ndctl) -> None:
    done = reference.submit()
    assert done.code == 5
    assert "--resume" in done.err
    assert "--new" in done.err


def test_a_finished_job_has_nothing_to_resume(ndctl: Ndctl, reference: Ndctl) -> None:
    shutil.copytree(reference.run_dir, ndctl.run_dir)
    done = ndctl.submit("--resume", "--follow")
    assert done.code == 5
    assert "has no steps left: 24 of 24 steps are done" in done.err
    assert ndctl.status()["state"] == "SUCCEEDED"


def test_a_dry_run_shows_and_starts_nothing(ndctl: Ndctl) -> None:
    done = ndctl.submit("--dry-run")
    assert done.code == 0
    assert "orchestrator.backends.entry.agent" in done.out
    assert '"parallel"' in done.out
    assert not ndctl.run_root.exists()


def test_an_unknown_job_is_refused_with_the_known_ones(reference: Ndctl) -> None:
    done = reference("status", "e3e")
    assert done.code == 5
    assert "existing jobs: e2e" in done.err


def test_help_of_every_verb_has_an_example() -> None:
    from click.testing import CliRunner

    from orchestrator.cli import cli

    for name in cli.commands:
        shown = CliRunner().invoke(cli, [name, "--help"])
        assert f"Example: ndctl {name}" in shown.output.replace("\n", " ").replace("  ", " ")
