"""Options that several commands share."""

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from orchestrator.app.remote import Place
from orchestrator.cli import cli
from orchestrator.cli.options import backend_option, kind_option, place_options


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ([], None),
        (["--backend", "kubernetes"], Place()),
        (["-n", "team"], Place(namespace="team")),
        (["--context", "prod"], Place(context="prod")),
        (["--context", "prod", "--namespace", "team"], Place(context="prod", namespace="team")),
    ],
)
def test_options_for_a_part_of_a_cluster_select_its_scheduler(
    said: list[str], place: Place | None
) -> None:
    got = []

    @click.command()
    @place_options
    def verb(place: Place | None) -> None:
        got.append(place)

    assert CliRunner().invoke(verb, said).exit_code == 0
    assert got == [place]
    assert CliRunner().invoke(verb, ["--backend", "slurm"]).exit_code == 2


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ([], []),
        (["--backend", "slurm"], ["cluster.backend=slurm"]),
        (["--kind", "jobset"], ["cluster.backend=kubernetes", "cluster.kubernetes.kind=jobset"]),
    ],
)
def test_options_for_backend_and_kind_are_shortcuts_for_settings(
    said: list[str], settings: list[str]
) -> None:
    got: list[str] = []

    @click.command()
    @backend_option
    @kind_option
    def verb(on_backend: tuple[str, ...], of_kind: tuple[str, ...]) -> None:
        got.extend((*on_backend, *of_kind))

    assert CliRunner().invoke(verb, said).exit_code == 0
    assert got == settings


def test_the_help_of_drills_names_every_fault() -> None:
    from orchestrator.cli.launch import submit
    from orchestrator.contract.drills import FAULTS, parse_drill

    told = next(str(getattr(one, "help")) for one in submit.params if one.name == "drills")  # noqa: B009
    assert [fault for fault in FAULTS if not re.search(rf"\b{fault}\b", told)] == []
    examples = re.findall(r"\w+:\S+@step=\d+", told)
    assert [str(parse_drill(example, 1)) for example in examples] == examples
    assert len(examples) == 2


def test_a_number_of_lines_below_zero_is_refused_before_a_job_is_looked_for() -> None:
    refused = CliRunner().invoke(cli, ["logs", "no-such-job", "--tail", "-1"])
    assert refused.exit_code == 2
    assert "Invalid value for '--tail': -1 is not in the range x>=0" in refused.output


def groups(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Group]]:
    yield path, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from groups(command, *path, name)


@pytest.mark.parametrize(("path", "group"), list(groups(cli)))
def test_help_of_a_narrow_terminal_has_the_whole_sentence_of_each_command(
    path: tuple[str, ...], group: click.Group
) -> None:
    shown = CliRunner().invoke(cli, [*path, "--help"], terminal_width=40, max_content_width=40)
    assert shown.exit_code == 0
    text = "".join(shown.output.split())  # a line may also end after a hyphen
    for command in group.commands.values():
        assert "".join(command.get_short_help_str(limit=400).split()) in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "--seed", "5", "--trace", "--json"), "--trace prints text"),
        (
            ("report", "job", "--html", "a/../f", "--md", "f"),
            "--html and --md name the same file",
        ),
        (("plan", "examples/quickstart.yaml", "--tokens", "1e21"), "at least 1 and below 1e21"),
    ],
)
def test_options_that_cannot_be_used_are_refused(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(cli, words)
    assert (done.exit_code, said in " ".join(done.output.split())) == (2, True)
