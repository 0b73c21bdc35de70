"""The key `run` of a spec, from what a script starts and exports."""

import re
from collections.abc import Sequence
from pathlib import PurePath

from orchestrator.contract.spec.slurm_spec import OURS_BEGIN, bad_variable
from orchestrator.specs.foreign.around_program import (
    ENVIRONMENTS,
    around,
    executable_of,
    options_left_out,
    placed_by_mpi,
)
from orchestrator.specs.foreign.carried import Carried, in_a_shell, variables_of
from orchestrator.specs.foreign.command_lines import (
    SET_IN_SCRIPT,
    Program,
    is_launcher,
    program_of,
    settings_in,
)
from orchestrator.specs.foreign.in_container import in_container
from orchestrator.specs.foreign.shell.script import Shell, Start, variables
from orchestrator.specs.foreign.shell.words import OWN_ARGUMENTS, PLACEHOLDER

ONLY_A_SHELL_KNOWS = re.compile(
    r"[$<>]\(|`|(?<!\$)\$\{(?:SLURM|RANDOM|HOSTNAME|[!#]|\w+(?:[\[/#%^,@]|:\d))"
)

OWN_ARE_LEFT_OUT = (
    "add to run.args what you type behind the script's name: it hands its arguments to the program"
)
MAY_BE_PLACEHOLDER = re.compile(r"(?:^|=)(\{[A-Za-z]\w*\})$")
"""`{config}`. A program may also read it, as in `--name={epoch}`."""


def set_program(carried: Carried, start: Start | None) -> None:
    """The key `run`, for the program that a command line starts."""
    words = start.words if start is not None else ()
    if start is not None and (inside := in_container(start)) is not None:
        _set_container(carried, start, inside)
        return
    found = program_of(words) or executable_of(words)
    if "uv" in words[: len(words) - len(found.args if found is not None else ())]:
        carried.before.append(
            "add ndctl to the project that `uv run` uses, and type `uv run ndctl submit`"
        )
    if found is None:
        carried.run = {"script": "train.py", "args": []}
        carried.before.append("set run: no program was found that runs on each rank")
        return
    _say_around(carried, start, found)
    _say_loop(carried, start)
    carried.run = {found.key: found.name, "args": [*found.args]}
    if found.key == "program" and start is not None:
        carried.before.append(
            f"check run: {found.name} starts on each rank, with the variables of torchrun; it must"
            " not start a launcher itself"
        )
    if settings := settings_in(words):
        carried.before.append(SET_IN_SCRIPT.format(", ".join(settings)))
    if placed := placed_by_mpi(words):
        carried.leave(f"mpirun {' '.join(placed)}: ndctl starts one rank per GPU, bound to no core")
    carried.run["args"] = [one for one in found.args if not OWN_ARGUMENTS.fullmatch(one)]
    if len(carried.run["args"]) < len(found.args):
        carried.before.append(OWN_ARE_LEFT_OUT)
    if found.key == "script" and found.args and re.fullmatch(r"[^-=]*\.py", found.args[0]):
        carried.before.append(
            f"check run: if {found.name} starts {found.args[0]} on each rank, as a launcher does,"
            f" {found.args[0]} is run.script"
        )
    carried.before += [
        f"replace {one} in run: a shell expands it, and ndctl does not"
        for one in (start.patterns if start is not None else ())
        if one in found.args
    ]
    if in_a_shell(carried.run):  # which reads a spec's `$${` as it is
        carried.run["args"] = [one.replace("$${", "${") for one in carried.run["args"]]
    else:
        _ask_for_unclear(carried, (found.name, *found.args))


def _set_container(carried: Carried, start: Start, inside: Program) -> None:
    """The key `run`, for a program that starts another one in a container."""
    carried.run = {"program": inside.name, "args": [*inside.args]}
    carried.before.append(
        f"check run: {inside.name} starts the program in its container. The variables of"
        " torchrun (RANK, WORLD_SIZE, MASTER_ADDR, …) must reach it, and no line there may"
        " set them; run.metrics reads its steps from its output"
    )
    if any(map(OWN_ARGUMENTS.fullmatch, start.words)):
        carried.before.append(OWN_ARE_LEFT_OUT)
    _say_loop(carried, start)
    script = len(start.before) > 0  # its last word is a script of the shell in the container
    _ask_for_unclear(carried, inside.args[: len(inside.args) - script])


def _say_around(carried: Carried, start: Start | None, found: Program) -> None:
    """Says the programs around the program that was found, which ndctl does not start."""
    if start is None:
        return
    for option, instead in options_left_out(start.words, found):
        carried.leave(f"line {start.line}: {option}: {instead}")
    for one in around(start.words, found):
        text = " ".join(one)
        if PurePath(one[0]).name in ENVIRONMENTS:
            carried.before.append(
                f"install ndctl in the environment of `{text}`, and type `{text} ndctl submit`"
            )
        else:
            carried.leave(
                f"line {start.line}: {short(text)} around the program: ndctl starts the program"
                " itself"
            )


def _say_loop(carried: Carried, start: Start | None) -> None:
    """Says what a shell does again and again, and what it hands to the program as input."""
    if start is None:
        return
    variable = re.match(r"for (\w+) in", start.loop or "")
    told = variable is not None and variable[1] in variables_of([*start.words])
    if start.loop is not None and not told:
        carried.leave(
            f"line {start.line}: the loop `{short(start.loop)}` around the program: ndctl starts it"
            " once, and after a failure again, up to resilience.max_restarts times"
        )
    if start.reads is not None:
        carried.leave(f"line {start.line}: {short(start.reads)}: ranks have no standard input")


def _ask_for_unclear(carried: Carried, words: Sequence[str]) -> None:
    """What a person must replace in the words of a command line."""
    for one in words:
        if ONLY_A_SHELL_KNOWS.search(one):
            carried.before.append(f"replace {one} in run, which only the script's shell knows")
        carried.before += [f"replace {part[0]} in run" for part in PLACEHOLDER.finditer(one)]
        if found := MAY_BE_PLACEHOLDER.search(one):
            carried.before.append(f"replace {found[1]} in run, if a template has it")


def set_variables(carried: Carried, shell: Shell) -> None:
    """The key `run.env`, for what the script exports."""
    kept: dict[str, str] = {}
    start = shell.training()
    for name, value in variables(shell):
        # PYTHONPATH=src:$PYTHONPATH before the program uses only itself.
        own = rf"(?<![\w-]){name}=(?:\"[^\"]*\"|'[^']*'|\S)*"
        text = re.sub(own, "", start.text) if start is not None else ""
        in_line = re.search(rf"\$\{{?{name}\b", text)
        if in_line and (value.lstrip().startswith("-") or ONLY_A_SHELL_KNOWS.search(value)):
            continue  # options, and what a launcher needs, such as the first host
        words = value.split()
        if program_of(words) is not None or (any(map(is_launcher, words)) and "/" not in words[0]):
            continue  # a part of the command line, such as CMD
        if ONLY_A_SHELL_KNOWS.search(value):
            carried.leave(f"export {name}: only the script's shell knows {short(value)}")
        elif bad_variable(name) is None and not name.startswith(OURS_BEGIN):
            # A list such as LD_LIBRARY_PATH may be unset where the job is submitted. Another
            # variable must be set: `$WORK/data` without it would be another folder.
            carried.before += [
                f"replace {part[0]} in run.env.{name}" for part in PLACEHOLDER.finditer(value)
            ]
            kept[name] = re.sub(r"(?<!\$)\$\{(\w*PATH)\}", r"${\1:-}", value)
    if kept:
        carried.run["env"] = kept


def ask_for_loops(carried: Carried, shell: Shell) -> None:
    """What a loop of the script changes in each of its jobs."""
    used = variables_of([carried.run])
    for name in (one for one in shell.loops if one in used):
        carried.before.append(
            f"replace ${{{name}}} in run: the script starts the program in a loop over"
            f" {short(shell.loops[name])}, and a spec is one job"
        )


def names_file(words: Sequence[str], file: str) -> bool:
    """Whether a command line has a file of this name."""
    name = PurePath(file).name
    return bool(name) and any(
        name in (PurePath(word).name, word.partition("=")[2]) for word in words
    )


def short(text: str) -> str:
    """One line that fits into a note."""
    plain = " ".join(text.split())
    return plain if len(plain) <= 60 else f"{plain[:57]}…"
