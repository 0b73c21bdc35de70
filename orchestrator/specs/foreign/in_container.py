"""Programs that a script starts in a container of Singularity, Shifter, Docker and the like.

ndctl itself starts containers by pyxis alone. So such a container stays a part of the command line
of each rank.
"""

import re
import shlex
from pathlib import PurePath

from orchestrator.specs.foreign.around_program import own_python
from orchestrator.specs.foreign.carried import OF_NDCTL
from orchestrator.specs.foreign.command_lines import (
    LAUNCHERS,
    PYTHON,
    RUNTIMES,
    SHELLS,
    Program,
    is_launcher,
    program_of,
)
from orchestrator.specs.foreign.shell.script import Start
from orchestrator.specs.foreign.shell.words import OWN_ARGUMENTS

SETS_RANKS = re.compile(rf"(export )?{OF_NDCTL.pattern}=")
"""A rank of Slurm is not one of torchrun."""


def in_container(start: Start) -> Program | None:
    """The program of each rank, without launchers; None: it runs on the host itself."""
    names = [PurePath(word).name for word in start.words]
    first = next((at for at, name in enumerate(names) if name in RUNTIMES), None)
    program = program_of(start.words[(first or 0) + 1 :])
    if first is None or program is None:
        return None
    end = first + 1
    while end < len(names) and not _begins_program(start.words[end]):
        end += 1
    # The end of `exec image.sif /opt/train.py` is the program itself.
    python = next((word for word in start.words[end:] if _is_python(word)), None)
    if python is None:
        own = own_python(start.words[end:])
        python = "python" if own is None else str(PurePath(own).parent / "python")
    flag = ["-m"] if program.key == "module" else []
    args = [one for one in program.args if not OWN_ARGUMENTS.fullmatch(one)]
    line = [python, *flag, program.name, *args]
    at = start.words.index(program.name) if program.name in start.words else 0
    if at and start.words[at - 1].endswith(".sh"):  # which starts Python itself
        line = line[1:]
    if start.before:
        # `&&`, `;` and new lines of the script are all `;` here, as commands are read one by one.
        kept = [_kept(one) for one in start.before if not SETS_RANKS.match(one)]
        text = "; ".join([*kept, f"exec {shlex.join(line)}"])
        line = ["bash", "-c", text]
    return Program("program", names[first], (*start.words[first + 1 : end], *line))


def _is_python(word: str) -> bool:
    return PYTHON.fullmatch(PurePath(word).name) is not None


def _begins_program(word: str) -> bool:
    name = PurePath(word).name
    return (
        name in SHELLS
        or is_launcher(word)
        or word in LAUNCHERS
        or _is_python(word)
        or (word.endswith(".py") and "=" not in word)
    )


def _kept(line: str) -> str:
    """Variables that the shell in the container knows, and not the one that submits."""
    # A shell replaces nothing between single quotes, so there it is for the one that submits.
    return re.sub(r"'[^']*'|\$\{", lambda one: "$${" if one[0] == "${" else one[0], line)
