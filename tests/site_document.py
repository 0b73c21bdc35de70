"""What the tests of docs/slurm.md and docs/kubernetes.md share."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands_in(document: str) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def keys_of_a_site(document: str) -> set[str]:
    """The keys in the table of the section with this name."""
    table = document.partition("## Keys of a site")[2].partition("## ")[0]
    cells = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def with_ndctl(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """An environment whose `ndctl` runs this source tree, with run directories in the folder."""
    own = folder / "bin"
    own.mkdir()
    (own / "ndctl").write_text(f'#!/bin/sh\nexec {sys.executable} -m orchestrator "$@"\n')
    (own / "ndctl").chmod(0o755)
    return {
        **environ,
        "PATH": f"{own}:{environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "NDCTL_RUN_ROOT": str(folder / "runs"),
        "COLUMNS": "120",
    }
