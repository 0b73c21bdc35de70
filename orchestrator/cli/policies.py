"""What is done about failures: `policy`."""

import click

from orchestrator.cli.options import json_option, print_as, set_option


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
