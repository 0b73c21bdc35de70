"""Nodes on which Slurm could not start an agent, by what was written in its place.

A task whose program cannot be executed ends at once, and srun, which goes on without it, says so
nowhere but in the output of that task.
"""

import contextlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from orchestrator.backends.slurm import render
from orchestrator.contract.launch import LaunchPlan
from orchestrator.inventory.slurm.hostlist import expand

MOST_BYTES = 16_384
FATAL = re.compile(
    r"""
    slurmstepd[^:\s]*:\ error:\ (?:
        execve\(\):\ .*                      # no such file, permission denied, exec format error
        | .*(?:pyxis|spank):?\ .*            # the container did not come up
        | task_p_pre_(?:launch|setuid).*
    )
    | .*error\ while\ loading\ shared\ libraries:\ .*
    | .*can't\ open\ file\ .*\[Errno\ \d+\].*  # the interpreter is there, and ndctl is not
    | Fatal\ Python\ error:\ .*
    | (?:ModuleNotFoundError|ImportError):\ .*
    | .*(?:bad\ interpreter|No\ module\ named)\b.*
    """,
    re.VERBOSE,
)
"""A line of which no agent comes; a warning, as of a folder that is not there, is none."""


def why(text: str) -> str:
    """The first line that says why there is no agent, as it was written; empty: none does."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if FATAL.fullmatch(line)), "")


def found(
    launch: LaunchPlan, environ: Mapping[str, str], hosts: Collection[str]
) -> Mapping[str, str]:
    """Of `hosts`, those whose task of the asking agent's own step says why it ended -> its words.
    An agent that began has a log of its own, and says nothing more here."""
    nodes = expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    said = {
        node: why(_text(render.task_errors(launch, environ, task)))
        for task, node in enumerate(nodes)
        if node in hosts
    }
    return {node: words for node, words in said.items() if words}


def _text(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(MOST_BYTES).decode(errors="replace")
    return ""
