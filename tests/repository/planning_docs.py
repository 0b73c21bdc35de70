"""The outputs of commands in the documents named below.

    python -m tests.repository.planning_docs

writes the present outputs into the documents.
"""

import re
import shlex
import sys
from pathlib import Path

from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.errors import NdctlError

ROOT = Path(__file__).parents[2]
NAMES = ("plan", "decide", "known_figures", "forecast", "diagnose")
DOCUMENTS = [ROOT / "docs" / f"{name}.md" for name in NAMES]
BLOCK = re.compile(r"```console\n\$ ndctl (.+)\n(?:.*\n)*?```")
FILTER = " | grep -E "
"""A document may show some lines of a long output."""


def commands(text: str) -> list[str]:
    return BLOCK.findall(text)


def printed(command: str) -> str:
    """The output of `ndctl COMMAND` in the root of the repository, without what jobs in a run root
    there have measured. A pipe to `grep -E` leaves some lines of it."""
    said, _, pattern = command.partition(FILTER)
    done = CliRunner(env={"NDCTL_RUN_ROOT": "no-such-folder"}).invoke(cli, shlex.split(said))
    if isinstance(done.exception, NdctlError):
        return f"error: {done.exception}"
    assert done.exception is None, done.exception
    if not pattern:
        return done.output.rstrip()
    (kept,) = shlex.split(pattern)
    return "\n".join(line for line in done.output.splitlines() if re.search(kept, line))


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
