"""A job without a fault, as shown by every command."""

import json

import pytest

from tests.e2e.job import Ndctl, processes_of

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(900)]


def test_an_uninterrupted_job_succeeds_with_falling_loss(reference: Ndctl) -> None:
    status = reference.status()
    assert status["state"] == "SUCCEEDED"
    assert (status["step"], status["steps"], status["restarts"]) == (24, 24, 0)
    assert status["hosts"] == ["host-0", "host-1"]
    losses = reference.losses()
    assert status["loss"] == losses[24]
    assert sorted(losses) == list(range(1, 25))
    assert losses[24] < 0.75 * losses[1]
    assert not processes_of(reference.run_dir)


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
