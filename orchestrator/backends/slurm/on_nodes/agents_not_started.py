"""Find nodes on which the agent could not start, by the output of its task.

If a program cannot be executed, its task ends and srun continues. Only the output of the task has
the reason.
"""

import contextlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from ndctl.rank.regular_file import open_regular
from orchestrator.backends.slurm import render
from orchestrator.contract.launch import LaunchPlan
from orchestrator.inventory.slurm.hostlist import expand

MOST_BYTES = 16_384
FATAL = re.compile(
    r"""
    slurmstepd[^:\s]*:\ error:\ (?:
        execve\(\):\ .*                      # no such file, permission denied, exec format error
        | .*(?:pyxis|spank):?\ .*            # the container did not start
        | task_p_pre_(?:launch|setuid).*
    )
    | .*error\ while\ loading\ shared\ libraries:\ .*
    | .*can't\ open\ file\ .*\[Errno\ \d+\].*  # the interpreter exists, but ndctl does not
    | Fatal\ Python\ error:\ .*
    | (?:ModuleNotFoundError|ImportError):\ .*
    | .*(?:bad\ interpreter|No\ module\ named)\b.*
    """,
    re.VERBOSE,
)
"""Lines that mean that the agent did not start. Warnings, as of a missing folder, do not match."""


def why(text: str) -> str:
    """The first line with the reason why the agent did not start; empty: none."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if FATAL.fullmatch(line)), "")


def found(
    launch: LaunchPlan, environ: Mapping[str, str], hosts: Collection[str]
) -> Mapping[str, str]:
    """Hosts whose task in the step of the calling agent failed to start -> the reason. An agent
    that started writes to its own log instead."""
    nodes = expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    said = {
        node: why(_text(render.task_errors(launch, environ, task)))
        for task, node in enumerate(nodes)
        if node in hosts
    }
    return {node: words for node, words in said.items() if words}


def _text(path: Path) -> str:
    with contextlib.suppress(OSError), open_regular(path) as file:
        return file.read(MOST_BYTES).decode(errors="replace")
    return ""
