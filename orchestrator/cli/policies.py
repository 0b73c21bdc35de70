"""What failures are, and what is done about them: `classify`, `policy`."""

from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import json_option, print_as, set_option

if TYPE_CHECKING:
    from typing import BinaryIO


@click.group(invoke_without_command=True, epilog="Example: ndctl policy explain nccl-system-error")
@click.pass_context
def policy(ctx: click.Context) -> None:
    """Show what ndctl does about each class of failure, and which rule says so."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_rules)


@policy.command("list", epilog="Example: ndctl policy list examples/quickstart.yaml")
@click.argument("spec", required=False)
@set_option
@json_option
def list_rules(
    spec: str | None = None, overrides: tuple[str, ...] = (), as_json: bool = False
) -> None:
    """Print all rules in their order, and all classes; with SPEC, its own among them."""
    from orchestrator.app import policies

    found = policies.policy_of(spec, overrides)
    print_as(as_json, found, policies.listed_json, policies.listed_text)


@policy.command(epilog="Example: ndctl policy explain disk-full examples/quickstart.yaml")
@click.argument("name", metavar="CLASS")
@click.argument("spec", required=False)
@set_option
@json_option
def explain(name: str, spec: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the rules that failures of CLASS meet, in order, with the budget."""
    from orchestrator.app import policies

    found = policies.explain(name, policies.policy_of(spec, overrides))
    print_as(as_json, found, policies.explained_json, policies.explained_text)


def _as_signal(ctx: click.Context, param: click.Parameter, said: str | None) -> str | None:
    from orchestrator.app.classification import signal_number

    if said is None:
        return None
    try:
        signal_number(said)
    except ValueError as exc:
        raise click.BadParameter(str(exc), ctx, param) from exc
    return said


@click.command(epilog="Example: ndctl classify --signal SIGABRT rank-3.log")
@click.argument("file", required=False, type=click.File("rb"), metavar="FILE|-")
@click.option(
    "--kernel", type=click.File("rb"), metavar="FILE", help="Lines of its host's kernel (dmesg)."
)
@click.option("--exit-code", type=int, metavar="N", help="With which the rank left.  [1]")
@click.option(
    "--signal", metavar="NAME", callback=_as_signal, help="That ended it, as SIGKILL, KILL or 9."
)
@json_option
def classify(
    file: "BinaryIO | None",
    kernel: "BinaryIO | None",
    exit_code: int | None,
    signal: str | None,
    as_json: bool,
) -> None:
    """Print the class of a failure, of the end of one rank's log, and what ndctl does about it.

    FILE is the log, of any size; `-` is the standard input.
    """
    from orchestrator.app import classification

    if file is None and kernel is None and exit_code is None and signal is None:
        raise click.UsageError("Give FILE, --kernel, --exit-code or --signal: what is to be read?")
    if exit_code is not None and signal is not None:
        raise click.UsageError("A rank ends by an exit code or by a signal: give one of them.")
    found = classification.classify_log(
        "" if file is None else classification.read_end(file),
        kernel=""
        if kernel is None
        else classification.read_end(kernel, classification.KERNEL_BYTES),
        exit_code=exit_code,
        signal=signal,
    )
    print_as(as_json, found, classification.as_json, classification.as_text)
