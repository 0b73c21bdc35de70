"""The outputs of commands in docs/plan.md, docs/forecast.md and docs/diagnose.md.

    python -m tests.repository.planning_docs

writes the present outputs into the documents.
"""

import re
import sys
from pathlib import Path

from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.errors import NdctlError

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "docs" / f"{name}.md" for name in ("plan", "forecast", "diagnose")]
BLOCK = re.compile(r"```console\n\$ ndctl (.+)\n(?:[^`]*\n)??```")


def commands(text: str) -> list[str]:
    return BLOCK.findall(text)


def printed(command: str) -> str:
    """The output of `ndctl COMMAND` in the root of the repository, without what jobs in a run root
    there have measured."""
    done = CliRunner(env={"NDCTL_RUN_ROOT": "no-such-folder"}).invoke(cli, command.split())
    if isinstance(done.exception, NdctlError):
        return f"error: {done.exception}"
    assert done.exception is None, done.exception
    return done.output.rstrip()


def with_outputs(text: str) -> str:
    """`text` with the output of each command below it."""
    return BLOCK.sub(
        lambda found: f"```console\n$ ndctl {found[1]}\n{printed(found[1])}\n```", text
    )


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(with_outputs(document.read_text()))
        written = len(commands(document.read_text()))
        sys.stdout.write(f"{document.name}: {written} outputs written\n")
