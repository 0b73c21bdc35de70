"""What every `--json` has in common."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from orchestrator.cli import cli
from orchestrator.journal.journal import from_line, read
from tests.cli.test_verbs import job, ndctl, run_root
from tests.jobs_on_disk import JOB, SPEC, cluster

__all__ = ["cluster", "job", "run_root"]
CAPTURED = Path(__file__).parents[1] / "captured"
ANSWERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "validate": ((str(SPEC),),),
    "plan": ((str(SPEC),), (str(SPEC), "--compare", "parallel.tp=1,3"), (str(SPEC), "--zero")),
    "inventory": ((),),
    "explain": ((), ("train.optimizer",), ("train", "--recursive")),
    "forecast": ((str(SPEC), "--days", "5", "--histories", "2"),),
    "list": ((), ("--run-root", "no-such-folder")),
    "status": ((JOB,), ("*",), (JOB, JOB)),
    "describe": ((JOB,),),
    "diagnose": ((str(CAPTURED / "flight"),),),
    "doctor": ((),),
    "hosts": ((), ("--all",)),
    "policy list": ((), (str(SPEC),)),
    "policy explain": (("hang",),),
    "classify": (("--exit-code", "1"),),
    "simulate": (("--seed", "1"),),
}
"""Verbs that print one object, each with the arguments that print it in every form."""


def verbs(group: click.Group = cli, before: str = "") -> Iterator[str]:
    """All verbs that have `--json`."""
    for name, command in group.commands.items():
        if any("--json" in option.opts for option in command.params):
            yield before + name
        if isinstance(command, click.Group):
            yield from verbs(command, f"{before}{name} ")


def test_every_verb_with_json_is_checked_here() -> None:
    # `snapshot` and `profile` need ranks that run: tests/e2e/test_running_job.py. `calibrate` runs
    # ranks itself: tests/calibrate/test_calibrate.py.
    assert set(verbs()) == {*ANSWERS, "events", "snapshot", "profile", "calibrate"}


@pytest.mark.parametrize(
    "words", [(*verb.split(), *more) for verb, forms in ANSWERS.items() for more in forms], ids=str
)
def test_an_answer_is_an_object_with_the_version_first(words: tuple[str, ...], job: Path) -> None:
    done = ndctl(*words, "--json")
    body = json.loads(done.stdout)
    assert next(iter(body.items())) == ("schema_version", 1)
    assert len(body) > 1


def test_an_answer_that_is_an_error_has_the_version_too() -> None:
    body = json.loads(ndctl("validate", str(SPEC), "--set", "nmae=1", "--json").stdout)
    assert (body["schema_version"], body["valid"]) == (1, False)


def test_each_line_of_events_has_the_version_and_is_a_line_of_a_journal(job: Path) -> None:
    lines = ndctl("events", JOB, "--json").stdout.splitlines()
    assert {json.loads(line)["schema_version"] for line in lines} == {1}
    assert [from_line(line.encode()) for line in lines] == [*read(job / "journal.jsonl")]


def test_a_json_schema_is_no_answer_and_has_no_version_of_answers() -> None:
    assert "schema_version" not in json.loads(ndctl("schema").stdout)
