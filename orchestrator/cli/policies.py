"""`ndctl policy` and `ndctl classify`: failure classes and the rules for them."""

import os
import signal
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import json_option, print_as, say_report, set_option
from orchestrator.cli.usage.sections import WholeSentences

if TYPE_CHECKING:
    from typing import BinaryIO


@click.group(
    cls=WholeSentences,
    invoke_without_command=True,
    epilog="Example: ndctl policy explain nccl-system-error",
)
@click.pass_context
def policy(ctx: click.Context) -> None:
    """Show the rules that decide what ndctl does about a failure."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_rules)


@policy.command("list", epilog="Example: ndctl policy list examples/quickstart.yaml")
@click.argument("spec", required=False)
@set_option
@json_option
def list_rules(
    spec: str | None = None, overrides: tuple[str, ...] = (), as_json: bool = False
) -> None:
    """Print all rules in order, and all failure classes.

    With SPEC, the rules and classes of the spec are included.
    """
    from orchestrator.app import policies

    found = policies.policy_of(spec, overrides, os.environ)
    print_as(as_json, found, policies.listed_json, policies.listed_text, say_report)


@policy.command(epilog="Example: ndctl policy explain disk-full examples/quickstart.yaml")
@click.argument("name", metavar="CLASS")
@click.argument("spec", required=False)
@set_option
@json_option
def explain(name: str, spec: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the rules for failures of CLASS, in order, and the restart budget."""
    from orchestrator.app import policies

    found = policies.explain(name, policies.policy_of(spec, overrides, os.environ))
    print_as(as_json, found, policies.explained_json, policies.explained_text, say_report)


def _check_signal(
    ctx: click.Context, param: click.Parameter | None, said: str | None
) -> str | None:
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
    "--kernel", type=click.File("rb"), metavar="FILE", help="Kernel log of the host (dmesg)."
)
@click.option(
    "--exit-code",
    type=click.IntRange(-signal.SIGRTMAX, 255),
    metavar="N",
    help="Exit code of the rank; -N is signal N, as torchrun prints it.  [1]",
)
@click.option(
    "--signal",
    "signal_name",
    metavar="NAME",
    callback=_check_signal,
    help="Signal that ended the rank: SIGKILL, KILL or 9.",
)
@json_option
def classify(
    file: "BinaryIO | None",
    kernel: "BinaryIO | None",
    exit_code: int | None,
    signal_name: str | None,
    as_json: bool,
) -> None:
    """Classify a failure from the end of one rank's log, and print what ndctl does about it.

    FILE is the log, of any size; `-` reads standard input.
    """
    from orchestrator.app import classification

    if file is None and kernel is None and exit_code is None and signal_name is None:
        raise click.UsageError("Give FILE, --kernel, --exit-code or --signal.")
    if exit_code is not None and signal_name is not None:
        raise click.UsageError("Give either --exit-code or --signal, not both.")
    if exit_code is not None and exit_code < 0:
        name = _check_signal(click.get_current_context(), None, str(-exit_code))
        exit_code, signal_name = None, name
    found = classification.classify_log(
        "" if file is None else classification.read_end(file),
        kernel=""
        if kernel is None
        else classification.read_end(kernel, classification.KERNEL_BYTES),
        exit_code=exit_code,
        signal=signal_name,
    )
    print_as(as_json, found, classification.as_json, classification.as_text, say_report)
