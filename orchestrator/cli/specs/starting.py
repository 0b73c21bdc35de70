"""`ndctl init`: a first spec to start from."""

import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.options import BACKENDS, say

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    epilog="Example: ndctl init --train train.py --args '--lr 3e-4' --hosts 2 --gpus-per-host 8"
)
@click.argument("file", default="job.yaml", metavar="[SPEC]")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="A batch script of Slurm, or a Kubernetes manifest, whose job becomes a spec.",
)
@click.option("--train", metavar="WHAT", help="A script such as train.py, a preset, or a model.")
@click.option("--data", metavar="GLOB", help="Files that a model trains on.")
@click.option("--args", metavar="WORDS", help="Arguments of the script.")
@click.option("--backend", type=BACKENDS, help="Where the job runs.  [local]")
@click.option("--hosts", type=click.IntRange(min=1), metavar="H", help="Number of hosts.  [1]")
@click.option(
    "--gpus-per-host", type=click.IntRange(min=1), metavar="G", help="Ranks per host.  [1]"
)
@click.option("--name", help="Name of the job.  [from WHAT]")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def init(  # noqa: PLR0913 - click hands over one argument for each option
    file: str,
    source: str | None,
    train: str | None,
    data: str | None,
    args: str | None,
    backend: str | None,
    hosts: int | None,
    gpus_per_host: int | None,
    name: str | None,
    force: bool,
) -> None:
    """Write a first job spec with comments.

    On a terminal it asks for what the options leave open: what to train, on what, and where. With
    --from it takes over what a file of another tool says, and names what it does not take.
    """
    from pathlib import Path

    from orchestrator.load import load_spec
    from orchestrator.specs.template import Answers, spec_text

    path = Path(file)
    if source is not None:
        others = (train, data, args, backend, hosts, gpus_per_host, name)
        if any(one is not None for one in others):
            raise click.UsageError("--from cannot be combined with options about the job")
        _take_over(Path(source), path, force=force)
        return
    _check_free(path, force=force)  # before a person answers questions
    given = _asked(train, data, args, backend, hosts, gpus_per_host)
    text = spec_text(Answers(name=name or "", **given))
    load_spec(text, file)  # so that a wrong --name is refused before anything is written
    _write(path, text, force=force)


STDOUT = "-"


def _take_over(source: "Path", path: "Path", *, force: bool) -> None:
    """Write the spec of a file of another tool, and print what a person has to do."""
    from orchestrator.specs.foreign.taking_over import taken_over
    from orchestrator.yaml_document import read_text

    text = read_text(source, "give a batch script or a manifest")
    carried = taken_over(text, source, str(source.absolute()))
    _write(path, carried.text(source.name), force=force, notes=carried.notes())


def _check_free(path: "Path", *, force: bool) -> None:
    from orchestrator.errors import SpecError

    if str(path) != STDOUT and path.exists() and not force:
        raise SpecError(f"{path} exists", fix="give another SPEC, or --force to replace it")


def _write(path: "Path", text: str, *, force: bool, notes: Iterable[str] = ()) -> None:
    """`-` is the standard output, without notes: a spec that was taken over has them itself."""
    from orchestrator.errors import SpecError

    if str(path) == STDOUT:
        say(text.removesuffix("\n"))
        return
    _check_free(path, force=force)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as written:
            written.write(text)
    except OSError as exc:
        raise SpecError(
            f"{path} cannot be written: {exc.strerror}", fix="name a file in a folder of yours"
        ) from exc
    for note in notes:
        say(note)
    say(f"wrote {path}; check it with `ndctl validate {path}`")


def _asked(
    train: str | None,
    data: str | None,
    args: str | None,
    backend: str | None,
    hosts: int | None,
    gpus_per_host: int | None,
) -> dict[str, Any]:
    """The answers, from options or from a person."""
    terminal = sys.stdin.isatty()
    if train is None and not terminal:
        raise click.UsageError(
            "without a terminal, give --train WHAT and, for a model, --data GLOB;"
            " --backend, --hosts and --gpus-per-host have defaults"
        )
    if train is None:
        train = click.prompt(
            "What to train: train.py, a preset, a folder, or a hub id",
            default="llama-tiny",
        )
    script = train.endswith(".py")
    if script and data is not None:
        raise click.UsageError("--data is for models; a script gets --args")
    if not script and args is not None:
        raise click.UsageError("--args is for scripts; a model gets --data")
    if args is not None:
        _arguments(args)
    words = args if script else data
    if words is None and terminal:
        words = (
            click.prompt(
                "Arguments of the script", default="", show_default=False, value_proc=_arguments
            )
            if script
            else click.prompt(
                "On which files, as a glob (text, jsonl, parquet)", default="{stdlib}/*.py"
            )
        )
    if words is None and not script:
        raise click.UsageError("without a terminal, give --data GLOB for a model")
    if terminal and backend is None and hosts is None and gpus_per_host is None:
        backend, hosts, gpus_per_host = click.prompt(
            "Where: local, slurm or kubernetes, and HOSTSxGPUS",
            default="local 1x1",
            value_proc=_where,
        )
    return {
        "train": train,
        "data": words or "",
        "backend": backend or "local",
        "hosts": hosts or 1,
        "gpus_per_host": gpus_per_host or 1,
    }


def _arguments(text: str) -> str:
    """The text, which a shell could split into words."""
    try:
        shlex.split(text)
    except ValueError as exc:
        raise click.BadParameter(
            f"{text} has a quote that does not end", param_hint="'--args'"
        ) from exc
    return text


def _where(text: str) -> tuple[str, int, int]:
    """`slurm 4x8`: backend, hosts, and GPUs of each."""
    backend, _, size = text.strip().partition(" ")
    hosts, _, gpus = (size.strip() or "1x1").partition("x")
    if backend not in BACKENDS.choices or not (hosts.isdigit() and gpus.isdigit()):
        raise click.BadParameter(f"{text} is not like `slurm 4x8`")
    if not int(hosts) * int(gpus) > 0:
        raise click.BadParameter("there must be at least one host and one rank on it")
    return backend, int(hosts), int(gpus)
