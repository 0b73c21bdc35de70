"""What a command line has before its program: launchers with their options, and other programs."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import PurePath

from orchestrator.specs.foreign.command_lines import (
    LAUNCHERS,
    OF_ARGPARSE,
    PREFIXES,
    PYTHON,
    SHELLS,
    VARIABLE,
    Program,
    is_launcher,
    launched,
    program_in,
    program_of,
    sizes_of,
    without_separator,
)
from orchestrator.specs.foreign.srun_options import of_srun


def executable_of(words: Sequence[str]) -> Program | None:
    """The executable that a launcher starts, as in `mpirun -n 2 ./solver`; None: none is seen."""
    words = launched(words) or words
    at, key = 0, "program"
    while at < len(words):
        name, following = PurePath(words[at]).name, "".join(words[at + 1 : at + 2])
        behind = behind_options(words, at)
        if name in SHELLS and re.fullmatch(r"-[a-z]*c", following):
            if re.search(r"[\s;&|<>]", "".join(words[at + 2 : at + 3])):
                return Program("program", words[at], tuple(words[at + 1 :]))
        elif name in OF_ARGPARSE:
            # What torchrun starts is a script, also if its name is a variable.
            without_python = {"--no-python", "--no_python"} & {*words[at:behind]}
            key = "program" if without_python else "script"
        elif not _is_before_program(words, at):
            args = without_separator(words[:at], words[at + 1 :])
            return Program("program" if PYTHON.fullmatch(name) else key, words[at], tuple(args))
        at = behind
    return None


def _is_before_program(words: Sequence[str], at: int) -> bool:
    """Whether a launcher, a variable or such a word as `nohup` is here."""
    word = words[at]
    if is_launcher(word) or word in PREFIXES or VARIABLE.fullmatch(word):
        return True
    starts_launcher = "".join(words[behind_options(words, at) :][:1]) in LAUNCHERS
    return PYTHON.fullmatch(PurePath(word).name) is not None and starts_launcher


BEFORE = {"script": (), "module": ("-m",), "program": ("--no-python",)}
"""Key of a program -> the words before its name in `ndctl run`."""


def without_launcher(words: Sequence[str]) -> tuple[str, str] | None:
    """The launcher at the start of a command line, and the same as `ndctl run`, which is
    empty if no program is seen; None: it starts with no launcher that is known."""
    prefix = [*takewhile(lambda word: word in PREFIXES or VARIABLE.fullmatch(word), words)]
    words = words[len(prefix) :]
    launcher = PurePath(words[0]).name if words else ""
    if (behind := launched(words)) and (inner := without_launcher(behind)) is not None:
        return f"{launcher} and {inner[0]}", inner[1]  # such as nsys and torchrun
    if launcher == "-m" and words[1:2] and words[1] in LAUNCHERS:
        launcher = words[1]
    if not is_launcher(launcher) and not PYTHON.fullmatch(launcher):
        if not prefix:
            return None
        launcher = prefix[0]
    found = program_in(shlex.join(words)) or executable_of(words)
    name = PurePath(found.name).name if found else ""  # empty: a variable without a value
    # Without a program, a shell or Python itself is the last word.
    if found is None or not name or name in SHELLS or PYTHON.fullmatch(name):
        return launcher, ""
    typed = ["--", *BEFORE[found.key], found.name]
    # After `bash -c` the program is a part of one word.
    before = " ".join(words).partition(found.name)[0].split()
    if found.name in words:
        before = list(words[: words.index(found.name)])
    sizes = sizes_of(before, of_mpi=launcher == "mpirun")
    return launcher, shlex.join(["ndctl", "run", *_env(prefix), *sizes, *typed, *found.args])


def _env(prefix: Sequence[str]) -> Iterator[str]:
    """Options of `ndctl run` for the variables before a command."""
    for word in prefix:
        name, is_variable, value = word.partition("=")
        if is_variable:
            yield from ("--set", f"run.env.{name}={json.dumps(value)}")


def around(words: Sequence[str], found: Program) -> Iterator[Sequence[str]]:
    """The words of each program around the one that was found, such as a profiler: what is no
    launcher, no shell and not Python."""
    end = len(words) - len(found.args) - 1
    end -= end > 0 and words[end] == "--"
    at = 0
    while at < end and words[end] == found.name:  # it may be inside of a word, behind `bash -c`
        name, behind = PurePath(words[at]).name, behind_options(words, at)
        known = is_launcher(words[at]) or words[at] in PREFIXES or name in SHELLS
        if name in WITH_OTHER_OPTIONS or not (
            known or VARIABLE.fullmatch(words[at]) or IS_PYTHON.fullmatch(name)
        ):
            behind = next((one for one in range(at + 1, end) if _is_known(words[one])), end)
            if name not in WITH_OTHER_OPTIONS:
                yield words[at:behind]
        at = behind


def options_left_out(words: Sequence[str], found: Program) -> Iterator[tuple[str, str]]:
    """Options of Python and of torchrun that ranks of ndctl do not have, and what to do instead."""
    end = len(words) - len(found.args)
    for at in range(end):
        name = PurePath(words[at]).name
        if not (PYTHON.fullmatch(name) or name in OF_ARGPARSE):
            continue
        known = OF_PYTHON if PYTHON.fullmatch(name) else OF_TORCHRUN
        options = words[at + 1 : min(behind_options(words, at), end)]
        for option, following in pairwise([*options, "-"]):
            plain = option.partition("=")[0].replace("_", "-")
            instead = next((known[one] for one in known if plain.startswith(one)), None)
            if instead is not None:
                value = "" if following.startswith("-") else f" {following}"
                yield f"{name} {option}{value}", instead


def own_python(words: Sequence[str]) -> str | None:
    """Python or a launcher of PyTorch that has a folder of its own, such as
    `/opt/venv/bin/torchrun`. `words`: what is before the program."""
    for word in words:
        path = PurePath(word)
        known = IS_PYTHON.fullmatch(path.name) is not None or path.name in OF_ARGPARSE
        if known and "/" in word and str(path.parent) not in OF_THE_SYSTEM:
            return word
    return None


def starts_ranks(words: Sequence[str]) -> bool:
    """Whether a launcher whose options are not known here starts a program on each rank."""
    return any(PurePath(word).name in OTHER_LAUNCHERS for word in words)


def _is_known(word: str) -> bool:
    name = PurePath(word).name
    return is_launcher(word) or IS_PYTHON.fullmatch(name) is not None or name in SHELLS


def behind_options(words: Sequence[str], at: int) -> int:
    """The place behind the options, with their values, of the launcher or program that is here."""
    name = PurePath(words[at]).name
    if name == "srun":
        return at + 1 + len(of_srun(words[at:]))
    if name in ("accelerate", "uv") and "".join(words[at + 1 : at + 2]) in ("launch", "run"):
        at += 1  # two words of one launcher
    end = at + 1
    while end < len(words) and words[end].startswith("-") and words[end - 1] != "--":
        if PYTHON.fullmatch(name) and words[end] == "-m":
            return end + 1
        end += 1 + _values(name, words[end], "".join(words[end + 1 : end + 2]))
    return min(end, len(words))


def _values(name: str, option: str, following: str) -> int:
    """The number of words that are values of an option of the program `name`."""
    if name in OF_ARGPARSE:
        return not ("=" in option or WITHOUT_VALUE.fullmatch(option.replace("_", "-")))
    if PYTHON.fullmatch(name):
        return option in ("-W", "-X", "-c")
    if name in SHELLS:
        return 0  # the words of `bash -c` follow
    if option.lstrip("-") in ("mca", "gmca", "prtemca", "env", "genv"):
        return 2
    return WITH_VALUE.fullmatch(option) is not None or following.isdecimal()


def placed_by_mpi(words: Sequence[str]) -> list[str]:
    """The options by which mpirun binds ranks to cores or places them in a way of its own."""
    names = [PurePath(word).name for word in words]
    start = next((at for at, one in enumerate(names) if one in ("mpirun", "mpiexec")), None)
    if start is None:
        return []
    found = executable_of(words[start:])
    behind = words[start + 1 : len(words) - len(found.args) - 1 if found is not None else None]
    # ndctl binds ranks to no core either, so `none` loses nothing.
    return [
        one if "=" in one or value.startswith("-") else f"{one} {value}"
        for one, value in pairwise([*behind, "-"])
        if PLACES_RANKS.match(one) and "none" not in (value, one.partition("=")[2])
    ]


def exported_by_mpi(words: Sequence[str]) -> list[str]:
    """The variables that mpirun hands from its own environment to the ranks."""
    if not {PurePath(word).name for word in words} & {"mpirun", "mpiexec"}:
        return []
    found = program_of(words) or executable_of(words)
    before = words[: len(words) - len(found.args)] if found is not None else words
    return [name for flag, name in pairwise(before) if flag == "-x" and name.isidentifier()]


ENVIRONMENTS = ("conda", "mamba", "micromamba", "poetry", "pixi", "pipenv", "pdm", "hatch")
"""Programs that run another one in an environment of Python."""
OF_PYTHON = {
    "-W": "set PYTHONWARNINGS in run.env",
    "-O": "set PYTHONOPTIMIZE in run.env",
    "-X": "set PYTHONDEVMODE and the like in run.env",
}
OF_TORCHRUN = {
    "--max-restarts": "resilience.max_restarts is the number of restarts",
    "--local-ranks-filter": "ndctl keeps the output of each rank (`ndctl logs --rank`)",
}
OF_THE_SYSTEM = ("/bin", "/usr/bin", "/usr/local/bin")
OTHER_LAUNCHERS = ("horovodrun", "colossalai", "fabric", "lightning", "oumi", "ray")
WITH_OTHER_OPTIONS = ("uv", "torchx", "jsrun", "aprun")
"""Launchers whose options are not known here."""
IS_PYTHON = re.compile(rf"{PYTHON.pattern}|\$\{{\w*PY\w*\}}", re.IGNORECASE)
WITHOUT_VALUE = re.compile(
    # torchrun and torch.distributed.launch
    r"-h|--help|--standalone|-m|--module|--no-python|--run-path|--virtual-local-rank|--use-env|--"
    # accelerate launch
    r"|-q|--quiet|--cpu|--multi-gpu|--tpu|--enable-cpu-affinity|--same-network|--debug"
    r"|--dynamo-use-(fullgraph|dynamic|regional-compilation)|--downcast-bf16"
    r"|--use-(deepspeed|fsdp|parallelism-config|megatron-lm)|--(no-)?tpu-cluster|--tpu-use-sudo"
    r"|--fp8-use-autocast-during-eval"
    # deepspeed and composer
    r"|--no-local-rank|--no-ssh(-check)?|--force-multi|--save-pid|--elastic-training"
    r"|--bind-cores-to-rank|-v|--verbose|--module-mode|--command-mode"
)
"""Options of launchers of PyTorch, with hyphens for underscores, that have no value."""
WITH_VALUE = re.compile(
    r"--?(hostfile|hosts?|machinefile|prefix|ppn|perhost|np|npernode|(bind|map|rank)-(to|by))"
    r"|--?((cpu|mem|gpu)-bind|cpu-(set|list))|-[pAwxoeiDJtGHnNcuf]"
)
"""Options of mpirun and other launchers, and of env, whose value is the next word."""
PLACES_RANKS = re.compile(r"--?(bind-to|map-by|rank-by|cpu-(bind|set|list)|binding)\b")
