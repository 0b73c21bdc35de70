"""Commands that say which keys a spec has: `explain`, `schema`."""

import click

from orchestrator.cli.options import json_option, json_text, print_json, say


def complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from orchestrator.specs.keys import all_keys

    paths = (key.path.replace("[]", "") for key in all_keys())
    return [path for path in paths if path.startswith(incomplete)]


@click.command(epilog="Example: ndctl explain train.optimizer")
@click.argument("key", default="", shell_complete=complete_key)
@click.option("--recursive", is_flag=True, help="The tree of all keys inside, without texts.")
@json_option
def explain(key: str, recursive: bool, as_json: bool) -> None:
    """Say what a key of a spec means: type, default, limits, and the keys inside it.

    Without KEY, the keys at the top of a spec.
    """
    import shutil

    from orchestrator.specs.explain import describe_key, describe_tree, key_json
    from orchestrator.specs.keys import key_at

    found = key_at(key)
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    if as_json:
        print_json(key_json(found, recursive=recursive))
    else:
        say(describe_tree(found) if recursive else describe_key(found, width))


@click.command(epilog="Example: ndctl schema > job.schema.json")
def schema() -> None:
    """Print the JSON schema of job specs, for editors."""
    from orchestrator.schema import json_schema

    say(json_text(json_schema()))
