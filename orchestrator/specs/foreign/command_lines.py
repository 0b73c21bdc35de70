"""Command lines of other tools: their launchers, the program, and the number of ranks."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import PurePath

from msgspec import Struct


class Program(Struct, frozen=True):
    """A program and its arguments, found in a command line."""

    key: str
    """script, module or program."""
    name: str
    args: tuple[str, ...]

    @property
    def spec(self) -> str:
        """As the key `run` of a spec, in YAML."""
        args = "" if not self.args else f", args: {json.dumps(self.args, ensure_ascii=False)}"
        return f"run: {{{self.key}: {self.name}{args}}}"


def program_in(text: str) -> Program | None:
    """The Python program that a command line or a script of a shell starts; None: none is seen."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        if (found := program_of(words)) is not None:
            return found
    return None


def program_of(words: Sequence[str]) -> Program | None:
    """The Python program that the words of a command line start; None: none is seen."""
    for at, word in enumerate(words):
        if " " in word and ".py" in word and words[max(at - 1, 0)] == "-c":  # bash -c '...'
            return program_in(word)
        # Not SCRIPT=train.py and --config=a.py, which are a variable and an option.
        if word.endswith(".py") and "=" not in word:
            args = without_separator(words[:at], words[at + 1 :])
            return Program("script", word, tuple(args))
        long = word == "--module" and any(map(is_launcher, words[:at]))
        if (word == "-m" or long) and _is_module(words, at + 1):
            args = without_separator(words[:at], words[at + 2 :])
            return Program("module", words[at + 1], tuple(args))
    return None


def without_separator(before: Sequence[str], args: Sequence[str]) -> Sequence[str]:
    """The arguments of a program without the first `--`, which torchrun and others like it drop
    behind the program, as argparse does. `before`: the words before the program."""
    drops = any(PurePath(word).name in OF_ARGPARSE for word in before) and "--" not in before
    return args[1:] if drops and "".join(args[:1]) == "--" else args


def _is_module(words: Sequence[str], at: int) -> bool:
    """Whether a word behind -m is a module of Python, not a message of git or a mode of mkdir."""
    if at >= len(words) or PurePath(words[0]).name in OTHERS_WITH_M:
        return False
    if words[at] in (*LAUNCHERS, *PREPARE):
        return False
    return MODULE.fullmatch(words[at]) is not None


def launched(words: Sequence[str]) -> Sequence[str]:
    """The words from the launcher on, behind a profiler or numactl; empty: there is none."""
    if not words or PurePath(words[0]).name not in WRAPPERS:
        return ()
    at = next((at for at, word in enumerate(words) if is_launcher(word)), len(words))
    return words[at:]


def is_launcher(word: str) -> bool:
    """Whether it starts another program on each rank."""
    return PurePath(word).name in COMMANDS or word in LAUNCHERS


def settings_in(words: Sequence[str]) -> list[str]:
    """Options of `accelerate launch` that it hands to the script as variables, and which ranks
    would miss without it."""
    names = [PurePath(word).name for word in words]
    start = next((at for at, one in enumerate(names) if one in ACCELERATE), None)
    found = program_of(words[start + 1 :]) if start is not None else None
    if start is None or found is None:
        return []
    own = [
        one
        for one in words[start + 1 : len(words) - len(found.args)]
        if one not in (found.name, "--")
    ]
    own.append("--")
    return [
        f"{one} {value}" if "=" not in one and not value.startswith("-") else one
        for one, value in pairwise(own)
        if one.startswith("--") and not OF_THE_LAUNCH.match(one.lstrip("-").replace("-", "_"))
    ]


def sizes_of(words: Sequence[str], *, of_mpi: bool = False) -> Iterator[str]:
    """The options of `ndctl run` for those of a launcher."""
    included = _included(words)
    hosts = _number(words, HOSTS if of_mpi else (*HOSTS, "-N")) or included[0]
    each = _number(words, (*RANKS_OF_A_HOST, "-N") if of_mpi else RANKS_OF_A_HOST) or included[1]
    # srun has a number of tasks of its own, and jsrun one of sets of resources.
    total = _number(words, ("--num-processes",))
    if total is None and "jsrun" not in words:
        total = _number(words, ALL_RANKS)
    if each is None and total is not None and total % (hosts or 1) == 0:
        each = total // (hosts or 1)
    elif hosts is None and each is not None and total is not None and total % each == 0:
        hosts = total // each
    yield from () if hosts is None else ("--hosts", str(hosts))
    yield from () if each is None else ("--gpus-per-host", str(each))


def _included(words: Sequence[str]) -> tuple[int | None, int | None]:
    """The hosts and the GPUs of a host of `deepspeed --include a@b:0,1`. A host without numbers
    has all its GPUs."""
    start = next((at for at, word in enumerate(words) if PurePath(word).name == "deepspeed"), None)
    for word, following in pairwise([*words[start:], ""] if start is not None else ()):
        name, equals, value = word.partition("=")
        if name in ("-i", "--include") and (given := value if equals else following):
            hosts = given.split("@")
            numbers = [one.partition(":")[2] for one in hosts]
            return len(hosts), max(one.count(",") + 1 if one else 0 for one in numbers) or None
        if word.endswith(".py"):  # what follows is for the program
            break
    return None, None


def unclear_size(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of one of these options, if no one can read it as a number."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        found = value if equals else following
        if name.replace("_", "-") in names and not found.replace(":", "").isdecimal():
            return found or None
    return None


def variable_ranks(words: Sequence[str]) -> str | None:
    """The ranks of a host, if a launcher gets them as a variable."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in RANKS_OF_A_HOST:
            found = value if equals else following
            return found if re.fullmatch(r"\$\{\w+\}", found) else None
    return None


def _number(words: Sequence[str], names: Sequence[str]) -> int | None:
    """The value of the first of these options, if it is a number or, as 2:4, a range."""
    for at, word in enumerate(words):
        joined = re.fullmatch(r"(-[A-Za-z])(\d+)", word)  # -N2
        name, _, value = (joined[1], "", joined[2]) if joined else word.partition("=")
        if name.replace("_", "-") in names:
            value = value or (words[at + 1] if at + 1 < len(words) else "")
            if (found := re.fullmatch(r"(?:\d+:)?([1-9]\d{0,5})", value)) is not None:
                return int(found[1])
    return None


def run_of(text: object) -> str:
    """The key `run` of a spec for a command line, or an example of it."""
    found = program_in(text) if isinstance(text, str) else None
    return "run: {script: train.py, args: [...]}" if found is None else found.spec


COMMANDS = (
    *("torchrun", "accelerate", "deepspeed", "torchx", "srun", "mpirun", "mpiexec", "composer"),
    *("ft_launcher", "hyperpodrun", "jsrun", "aprun", "uv", "accelerate-launch"),
)
"""Programs that start another one on each rank, as ndctl does itself; and uv, which starts one in
the environment of a project."""
RUNTIMES = (
    *("singularity", "apptainer", "shifter", "podman-hpc", "podman", "docker", "enroot", "sarus"),
    *("ch-run", "udocker"),
)
"""Programs that start another one in a container. ndctl itself starts containers by pyxis alone."""
PYTHON = re.compile(r"python(3(\.\d+)?)?")
SHELLS = ("bash", "sh", "zsh")
WRAPPERS = ("nsys", "ncu", "numactl", "nice", "taskset", "timeout", "stdbuf", "py-spy")
"""Programs that people write around a launcher or around Python, and that ndctl does not start."""
PREPARE = ("venv", "virtualenv", "pip", "ensurepip", "json.tool", "http.server")
"""Modules of Python that people run before a training."""
OTHERS_WITH_M = ("git", "gh", "mkdir", "install", "chmod", "pytest", "sacct", "curl", "awk")
MODULE = re.compile(r"[A-Za-z_][\w.-]*|[\w.]*\$\{?\w+.*")
PREFIXES = ("env", "nohup", "time", "exec")
"""What people write before a command."""
VARIABLE = re.compile(r"[A-Za-z_]\w*=.*")
# Options of launchers, with hyphens for underscores. -N is the number of hosts for srun, and the
# number of ranks on each host for mpirun.
HOSTS = ("--nnodes", "--num-nodes", "--num-machines", "--nodes")
RANKS_OF_A_HOST = (
    *("--nproc-per-node", "--num-gpus", "--ntasks-per-node", "--nproc"),
    *("--npernode", "-npernode", "--ppn", "-ppn", "--tasks-per-rs"),
)
ALL_RANKS = ("--num-processes", "--ntasks", "-np", "-n")
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
OF_ARGPARSE = (
    *("torchrun", "accelerate", "accelerate-launch", "deepspeed", "composer", "ft_launcher"),
    *("hyperpodrun", *LAUNCHERS),
)
"""Launchers that read their command line with argparse, and start a script of Python."""
ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
OF_THE_LAUNCH = re.compile(
    r"num_(processes|machines|cpu)|machine_rank|main_(process|training)|rdzv|same_network|multi_gpu"
    r"|role|tee|log_dir|max_restarts|monitor_interval|gpu_ids|module|no_python|cpu$|debug|quiet"
)
"""Options of `accelerate launch` about where and how ranks start."""
SET_IN_SCRIPT = (
    "accelerate launch hands {} to the script as variables, and ndctl does not: set them in"
    " Accelerator(…) or TrainingArguments, or as ACCELERATE_… in run.env"
)
