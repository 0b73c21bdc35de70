"""Files of other tools that a user gives as a job spec, and command lines in place of `run`.

One sentence about the whole file says more than one about each of its keys.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from msgspec import Struct

from orchestrator.contract.codec import Problem
from orchestrator.yaml_document import Document

DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
ACCELERATE = ("compute_environment", "distributed_type", "machine_rank")
SKYPILOT = ("resources", "num_nodes", "file_mounts", "envs")
LIGHTNING = ("trainer", "seed_everything")
"""Keys at the top of files of these tools, and of no job spec."""


class Program(Struct, frozen=True):
    """A program and its arguments, found in a command line."""

    key: str
    """script or module."""
    name: str
    args: tuple[str, ...]

    @property
    def spec(self) -> str:
        """As the key `run` of a spec, in YAML."""
        args = "" if not self.args else f", args: {json.dumps(self.args, ensure_ascii=False)}"
        return f"run: {{{self.key}: {self.name}{args}}}"


def foreign_text(text: str, path: PurePath) -> tuple[str, str] | None:
    """What a text is that is not YAML, and a fix; None: nothing known."""
    if path.suffix == ".toml":
        return "this is a TOML file, not a job spec in YAML", "`ndctl init` writes a job spec"
    if path.suffix == ".py":
        fix = f"ndctl run -- {path}, or a spec with run: {{script: {path}}}"
        return "this is a Python script, not a job spec", fix
    if text.startswith("#!"):
        of_slurm = re.search(r"^#SBATCH", text, re.MULTILINE)
        what = "a batch script of Slurm" if of_slurm else "a script"
        backend = f" --backend slurm{_requested(text)}" if of_slurm else ""
        found = program_in(text)
        train = "" if found is None or found.key != "script" else f" --train {found.name}"
        return (
            f"this is {what}, not a job spec",
            f"`ndctl init{backend}{train}` writes a job spec, from which ndctl writes its own",
        )
    return None


def _requested(script: str) -> str:
    """The hosts and GPUs of a batch script of Slurm, as options of `ndctl init`."""
    asked = " ".join(re.findall(r"^#SBATCH ([^#\n]*)", script, re.MULTILINE))
    hosts = re.search(r"(?:--nodes[= ]|-N ?)(\d+)", asked)
    gpus = re.search(r"(?:--gpus-per-node[= ]|--gres[= ]gpu:)(?:[A-Za-z][\w.-]*:)?(\d+)", asked)
    sizes = f" --hosts {hosts[1]}" if hosts else ""
    return f"{sizes} --gpus-per-host {gpus[1]}" if gpus else sizes


def foreign_file(document: Document) -> Problem | None:
    """What a document is that another tool reads; None: a job spec, or nothing known."""
    data, file = document.data, document.source
    if {"apiVersion", "kind"} <= data.keys():
        words = f"this is a Kubernetes manifest ({data['kind']}), not a job spec"
        fix = (
            f"`kubectl apply -f {file}` starts it; `ndctl init --backend kubernetes` writes a job"
            " spec, and `ndctl render` the manifest of it"
        )
        return Problem(path="kind", limit="", words=words, fix=fix)
    if OURS & data.keys() or isinstance(data.get("run"), Mapping):
        return None
    for tool, signs, say in TOOLS:
        if (sign := next((key for key in signs if key in data), None)) is not None:
            words = f"this file is for {tool}, not a job spec"
            return Problem(path=sign, limit="", words=words, fix=say(data, file))
    return None


def _for_a_script(option: str) -> Any:
    def say(data: Mapping[str, Any], file: str) -> str:
        return (
            f"your script reads it: ndctl run -- train.py{option.format(file=file)}; for the"
            " bundled trainer, `ndctl init` writes a job spec"
        )

    return say


def _for_skypilot(data: Mapping[str, Any], file: str) -> str:
    found = program_in(data["run"]) if isinstance(data.get("run"), str) else None
    run = "" if found is None or found.key != "script" else f" --train {shlex.quote(found.name)}"
    if run and found is not None and found.args:
        run += f" --args {shlex.quote(shlex.join(found.args))}"
    hosts = data.get("num_nodes", 1)
    return (
        f"`ndctl init{run} --hosts {hosts} --gpus-per-host {_gpus(data.get('resources'))}` writes a"
        " job spec; variables are run.env"
    )


def _gpus(resources: Any) -> int:
    """Of `{accelerators: H100:8}`; 1 without a number."""
    wanted = resources.get("accelerators") if isinstance(resources, Mapping) else None
    if isinstance(wanted, Mapping):
        wanted = ":".join(map(str, next(iter(wanted.items()), ())))
    found = re.search(r":(\d+)", str(wanted))
    return int(found[1]) if found else 1


TOOLS = (
    ("SkyPilot", SKYPILOT, _for_skypilot),
    ("DeepSpeed", DEEPSPEED, _for_a_script(" --deepspeed {file}")),
    ("Accelerate", ACCELERATE, _for_a_script("")),
    ("Lightning", LIGHTNING, _for_a_script(" fit --config {file}")),
)


def program_in(text: str) -> Program | None:
    """The Python program that a command line or a script of a shell starts; None: none is seen."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for at, word in enumerate(words):
            if " " in word and ".py" in word and words[max(at - 1, 0)] == "-c":  # bash -c '...'
                return program_in(word)
            if word.endswith(".py"):
                return Program("script", word, tuple(words[at + 1 :]))
            if word == "-m" and at + 1 < len(words) and words[at + 1] not in LAUNCHERS:
                return Program("module", words[at + 1], tuple(words[at + 2 :]))
    return None


def without_launcher(words: Sequence[str]) -> tuple[str, str] | None:
    """The launcher at the start of a command line, and the same as `ndctl run`; None: it starts
    with no launcher that is known."""
    prefix = [*takewhile(lambda word: word in PREFIXES or VARIABLE.fullmatch(word), words)]
    words = words[len(prefix) :]
    launcher = PurePath(words[0]).name if words else ""
    if launcher == "-m" and words[1:2] and words[1] in LAUNCHERS:
        launcher = words[1]
    if launcher not in (*COMMANDS, *LAUNCHERS) and not PYTHON.fullmatch(launcher):
        if not prefix:
            return None
        launcher = prefix[0]
    found = program_in(shlex.join(words))
    if found is None:
        return launcher, "ndctl run -- train.py"
    typed = ["--", found.name] if found.key == "script" else ["--", "-m", found.name]
    # After `bash -c` the program is a part of one word.
    before = " ".join(words).partition(found.name)[0].split()
    if found.name in words:
        before = list(words[: words.index(found.name)])
    sizes = _sizes(before, of_mpi=launcher == "mpirun")
    return launcher, shlex.join(["ndctl", "run", *_env(prefix), *sizes, *typed, *found.args])


def _env(prefix: Sequence[str]) -> Iterator[str]:
    """Options of `ndctl run` for the variables before a command."""
    for word in prefix:
        name, is_variable, value = word.partition("=")
        if is_variable:
            yield from ("--set", f"run.env.{name}={json.dumps(value)}")


def _sizes(words: Sequence[str], *, of_mpi: bool) -> Iterator[str]:
    """The options of `ndctl run` for those of a launcher."""
    hosts = _number(words, HOSTS if of_mpi else (*HOSTS, "-N"))
    each = _number(words, (*RANKS_OF_A_HOST, "-N") if of_mpi else RANKS_OF_A_HOST)
    total = _number(words, ALL_RANKS)
    if each is None and total is not None and total % (hosts or 1) == 0:
        each = total // (hosts or 1)
    elif hosts is None and each is not None and total is not None and total % each == 0:
        hosts = total // each
    yield from () if hosts is None else ("--hosts", str(hosts))
    yield from () if each is None else ("--gpus-per-host", str(each))


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


OURS = {"model", "data", "train", "parallel", "cluster", "checkpoint"}
"""Keys at the top of job specs alone."""
COMMANDS = ("torchrun", "accelerate", "deepspeed", "torchx", "srun", "mpirun", "composer", "uv")
"""Programs that start another one on each rank, as ndctl does itself; and uv, which starts one in
the environment of a project."""
PYTHON = re.compile(r"python(3(\.\d+)?)?")
PREFIXES = ("env", "nohup", "time", "exec")
"""What people write before a command."""
VARIABLE = re.compile(r"[A-Za-z_]\w*=.*")
# Options of launchers, with hyphens for underscores. -N is the number of hosts for srun, and the
# number of ranks on each host for mpirun.
HOSTS = ("--nnodes", "--num-nodes", "--num-machines", "--nodes")
RANKS_OF_A_HOST = ("--nproc-per-node", "--num-gpus", "--ntasks-per-node", "--nproc")
ALL_RANKS = ("--num-processes", "--ntasks", "-np", "-n")
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
