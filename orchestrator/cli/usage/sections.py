"""Groups of commands: their help with whole sentences, and their words about unknown names."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

INTERRUPTED = 130


class WholeSentences(click.Group):
    """Shows the first sentence of each command in full. click cuts it to the width."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.write_section(formatter, "Commands", list(self.commands.values()))

    def write_section(
        self, formatter: click.HelpFormatter, title: str, commands: Sequence[click.Command]
    ) -> None:
        longest = max(len(name) for name in self.commands)
        with formatter.section(title):
            formatter.write_dl(
                [
                    (f"{command.name:<{longest}}", command.get_short_help_str(limit=400))
                    for command in commands
                ]
            )


class Sections(WholeSentences):
    """The group of all commands, shown in sections."""

    def __init__(
        self, *args: Any, sections: Mapping[str, Sequence[click.Command]], **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.sections = sections
        for command in (one for commands in sections.values() for one in commands):
            self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self.sections.items():
            self.write_section(formatter, title, commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            from orchestrator.cli.usage.other_tools import command_words

            if (words := command_words(name)) is not None:
                raise click.UsageError(f"No such command {name!r}. {words}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.Abort, KeyboardInterrupt):
            # Ctrl-C or Ctrl-D. click would exit with 1, which says that the job failed.
            from orchestrator.cli.options import say

            say("\ninterrupted", err=True)
            ctx.exit(INTERRUPTED)
        except click.NoSuchOption as exc:
            from orchestrator.cli.usage.other_tools import option_words

            command = exc.ctx.command if exc.ctx is not None else self
            if (words := option_words(exc.option_name, command)) is None:
                raise
            message = f"No such option {exc.option_name!r}. {words}"
            raise click.UsageError(message, exc.ctx) from exc
