"""A batch script of Slurm, or another script of a shell, as a job spec."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from orchestrator.contract.spec.slurm_spec import OURS
from orchestrator.specs.foreign.around_program import executable_of, own_python, starts_ranks
from orchestrator.specs.foreign.carried import (
    Carried,
    braced,
    job_name,
    number_of,
)
from orchestrator.specs.foreign.command_lines import (
    ALL_RANKS,
    HOSTS,
    RUNTIMES,
    is_launcher,
    program_of,
    sizes_of,
    unclear_size,
    variable_ranks,
)
from orchestrator.specs.foreign.other_schedulers import set_other_scheduler
from orchestrator.specs.foreign.run_key import (
    ONLY_A_SHELL_KNOWS,
    ask_for_loops,
    names_file,
    set_program,
    set_variables,
    short,
)
from orchestrator.specs.foreign.shell.own_path import with_own_path
from orchestrator.specs.foreign.shell.script import (
    QUIET,
    Shell,
    Start,
    folder_behind,
    read_shell,
)
from orchestrator.specs.foreign.shell.words import Values, variables_for_placeholders
from orchestrator.specs.foreign.srun_options import of_srun, srun_args
from orchestrator.specs.slurm_options import SBATCH, SENTENCES, SRUN

SHORT: Mapping[str, str] = {
    "N": "nodes", "n": "ntasks", "J": "job-name", "p": "partition", "A": "account", "q": "qos",
    "t": "time", "o": "output", "e": "error", "c": "cpus-per-task", "G": "gpus", "C": "constraint",
    "w": "nodelist", "x": "exclude", "D": "chdir", "L": "licenses", "d": "dependency",
    "a": "array", "M": "clusters", "s": "oversubscribe", "H": "hold", "b": "begin", "k": "no-kill",
    "m": "distribution",
}  # fmt: skip
SAME = (
    *("partition", "account", "qos", "time", "constraint", "nodelist", "exclude", "reservation"),
    *("licenses", "switches", "comment", "mail_type", "mail_user", "mem", "segment"),
)
"""Options that `cluster.slurm` has under the same name."""
BY_NDCTL = frozenset(
    (
        *("requeue", "no_kill", "open_mode", "output", "error", "nodes", "ntasks"),
        *("ntasks_per_node", "gpus", "gpus_per_node", "gpus_per_task", "gres", "cpus_per_task"),
        *("cpus_per_gpu", "mem_per_cpu", "mem_per_gpu", "job_name", "exclusive", "chdir"),
        *("export", "signal"),
    )
)
"""Options that are read on their own, or that ndctl sets itself."""
OF_A_JOB = BY_NDCTL | SBATCH | {*SAME}
INSTEAD: Mapping[str, str] = {
    "array": "submit with --sweep KEY=A,B",
    "dependency": "submit with --after JOB",
    "ntasks_per_gpu": "each GPU has one rank",
    "no_requeue": "ndctl requeues the job at its time limit and after a lost host",
}
OTHER_SPELLINGS: Mapping[str, str] = {
    "tasks_per_node": "ntasks_per_node",
    "packjob": "hetjob",
    "workdir": "chdir",
    "gpus_per_host": "gpus_per_node",
}
SIGNAL = re.compile(r"(?:[A-Z]+:)*(?:SIG)?(\w+?)@(\d+)")
SIZE = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
GPUS = re.compile(
    r"(?:gres[/:])?gpu(?::([A-Za-z][\w.-]*|\w[\w.-]*(?=:)))?(?::(\$?\{?\w+\}?))?(?:\([^)]*\))?"
)
READS_HOSTS = re.compile(
    r"SLURM_(JOB_)?(NNODES|NUM_NODES|NODELIST)|PBS_NODEFILE|LSB_HOSTS|ds_ssh|(?i:hostfile)"
)
"""What a script reads that runs on as many hosts as it gets."""
IN_BRACKETS = re.compile(r"(?<=[= ])(?:\[([A-Za-z][\w .-]*)\]|(YOUR[_-]\w+))(?=\s|$)")
"""`[budget code]` or `YOUR_ACCOUNT` as the whole value of an option. `node[1-4]` is a list."""
RAY = re.compile(r"^[^#\n]*\bray +(?:start|job +submit)\b", re.MULTILINE)
POSITIONAL = re.compile(r"\$(?:([1-9#@*])|\{([1-9]\d*|[#@*](?:\}|:[\d:]*)))")
"""An argument of the script itself, or their number."""


def from_script(text: str, stem: str, path: str = "") -> Carried:
    """The spec that the script `text` describes.

    Args:
        stem: its file name, for a name of the job.
        path: its absolute path; empty if that is not known.
    """
    carried, text = Carried(), with_own_path(text, path)
    given = options_in(text)
    hosts = _hosts(carried, given)
    shell = read_shell(text, _of_slurm(given, hosts))
    start = shell.training()
    words = list(start.words) if start is not None else []
    step = _options(of_srun(words))
    if not given:  # srun outside of a job asks for one
        given = {name: step[name] for name in step if name in OF_A_JOB}
    typed = {**given, **step}
    carried.name = job_name(given.get("job_name") or stem)
    _export(shell, given, typed)
    _run(carried, shell, start, given)
    words = _before_arguments(words)
    sizes = dict(zip(*[iter(sizes_of(words))] * 2, strict=True))
    each, how = _gpus(typed, hosts, variable_ranks(words) or sizes.get("--gpus-per-host"))
    asked = "nodes" in given and options_in(text) != {}
    hosts = _hosts_of_launcher(carried, words, sizes, hosts, asked=asked)
    each = each or _visible_devices(shell)
    if each is None:
        carried.before.append("set cluster.gpus_per_host: the script does not say how many GPUs")
    of_slurm = bool(given) or re.search(r"SLURM_|\bsrun\b", text) is not None
    backend = "slurm" if of_slurm else "local"
    carried.cluster = {"backend": backend, "hosts": hosts, "gpus_per_host": each or 1}
    _ask_for_hosts(carried, text, given, step)
    if of_slurm:
        steps = {name: step[name] for name in step if name not in {*OF_A_JOB, *SENTENCES, *INSTEAD}}
        asked_for = {**_cpus_of_step(given, step, hosts), **given}
        carried.cluster["slurm"] = _slurm(carried, asked_for, how, each, steps) | _around(shell)
        _container(carried, typed)
    else:
        set_other_scheduler(carried, text)
        carried.before += [f"type in the shell that submits: {line}" for line in shell.setup]
    _ask_for_environment(carried, shell, words)
    _rest(carried, shell, start)
    _ask_about_program(carried, text, words, typed)
    for key in ("image", "mounts", "workdir"):
        for one in _texts(carried.cluster.get("slurm", {}).get("container", {}).get(key)):
            if ONLY_A_SHELL_KNOWS.search(one):
                carried.before.append(
                    f"replace {one} in cluster.slurm.container.{key}, which only the script's shell"
                    " knows"
                )
    return carried


def _before_arguments(words: list[str]) -> list[str]:
    """A command line without the arguments of its program, which are no sizes of a job."""
    found = program_of(words) or executable_of(words)
    return words[: len(words) - len(found.args)] if found is not None else words


def _export(shell: Shell, *options: Mapping[str, str]) -> None:
    """The variables of `--export=ALL,NAME=VALUE`."""
    for one in ",".join(given.get("export", "") for given in options).split(","):
        name, is_value, value = one.partition("=")
        if is_value:
            shell.exported[name] = value


def _ask_for_environment(carried: Carried, shell: Shell, words: Sequence[str]) -> None:
    """Asks for ndctl where the script has its interpreter. `words`: what is before the program."""
    slurm = carried.cluster.get("slurm", {})
    own = None if {PurePath(word).name for word in words} & {*RUNTIMES} else own_python(words)
    if own is not None and "container" in slurm:
        if is_launcher(own):
            carried.before.append(f"set cluster.slurm.container.python to the one of {own}")
        else:
            slurm["container"]["python"] = own
    elif own is not None:
        carried.before.append(ENVIRONMENT.format(f"of {own}"))
    elif shell.setup and slurm:
        carried.before.append(ENVIRONMENT.format("that cluster.slurm.setup activates"))


ENVIRONMENT = (
    "install ndctl in the environment {}, and submit from it: ranks run with the interpreter of"
    " `ndctl submit`"
)


def _texts(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def _ask_about_program(
    carried: Carried, text: str, words: Sequence[str], typed: Mapping[str, str]
) -> None:
    _ask_for_ranks(carried, words, typed)
    _ask_for_ray(carried, text)
    _ask_for_arguments(carried)


def _ask_for_ray(carried: Carried, text: str) -> None:
    if RAY.search(text):
        carried.before.append(
            "check run: the script starts a Ray cluster, and ndctl does not. A program that needs"
            " Ray stays with this script"
        )


def _ask_for_arguments(carried: Carried) -> None:
    """Nothing replaces `$1` in a spec."""
    # `{print $2}` is of awk.
    text = re.sub(r"\{ *print[^{}]*\}", "", str(carried.run))
    numbers = {one[0] or one[1].rstrip("}") for one in POSITIONAL.findall(text)}
    if numbers:
        # In a shell `$10` is `${1}0`.
        in_order = sorted(numbers, key=lambda one: (len(one), one))
        names = ", ".join(f"${one}" if len(one) == 1 else f"${{{one}}}" for one in in_order)
        carried.before.append(f"replace {names} in run, which are arguments of the script")


def _hosts(carried: Carried, given: Mapping[str, str]) -> Any:
    nodes = given.get("nodes", "")
    if (several := re.fullmatch(r"(\d+)-(\d+)", nodes)) is not None:
        carried.before.append(f"check cluster.hosts: the script takes {nodes} nodes")
        return int(several[1])
    tasks, each = number_of(given.get("ntasks")), number_of(given.get("ntasks_per_node"))
    if not nodes and isinstance(tasks, int) and isinstance(each, int) and each:
        return max(1, tasks // each)
    if not nodes and tasks not in (None, 1):
        carried.before.append(
            f"set cluster.hosts: the script asks for {tasks} tasks, not for nodes"
        )
    return number_of(nodes) or 1


def _ask_for_hosts(
    carried: Carried, text: str, given: Mapping[str, str], step: Mapping[str, str]
) -> None:
    """Asks for the number of hosts of a script that gets it when it is submitted. `step`: the
    options of its srun."""
    if not given and re.search(r"^[ \t]+#SBATCH ", text, re.MULTILINE):
        carried.before.append(
            "move #SBATCH to the start of its line, and repeat this command: sbatch reads no other"
        )
    told = any("cluster.hosts" in one for one in carried.before)
    # One host may come from SLURM_NNODES, whose value is not known.
    by_srun = number_of(step.get("nodes", "1")) != 1
    if told or by_srun or given.keys() & {"nodes", "ntasks"}:
        return
    of_slurm = carried.cluster["backend"] == "slurm" and not options_in(text)
    if READS_HOSTS.search(text) or (of_slurm and carried.cluster["hosts"] == 1):
        carried.before.append("set cluster.hosts: the script does not say how many hosts")


def _ask_for_ranks(carried: Carried, words: Sequence[str], typed: Mapping[str, str]) -> None:
    """Asks whether a program that the script starts fewer times than a host has GPUs can be a rank
    of each GPU. It may start a process for each GPU itself."""
    hosts, gpus = carried.cluster["hosts"], carried.cluster["gpus_per_host"]
    by_srun = [PurePath(word).name for word in words if is_launcher(word)] in ([], ["srun"])
    found = program_of(words)
    if not by_srun or found is None or "ntasks_per_gpu" in typed or starts_ranks(words):
        return
    tasks = (_tasks_of_a_host(typed, hosts) or 1) if any(map(is_launcher, words)) else 1
    if isinstance(tasks, int) and isinstance(gpus, int) and tasks < gpus:
        often = "once" if tasks == 1 else f"{tasks} times"
        carried.before.append(
            f"check run: the script starts {found.name} {often} per host, and ndctl starts it once"
            f" per GPU, {gpus} times. It must take its GPU from LOCAL_RANK, and must not start"
            " processes for the GPUs itself, as mp.spawn does"
        )


def _hosts_of_launcher(
    carried: Carried, words: list[str], sizes: Mapping[str, str], otherwise: Any, *, asked: bool
) -> Any:
    """The number of hosts that a launcher gets. `asked`: Slurm is asked for `otherwise`."""
    if asked:
        if sizes.get("--hosts", str(otherwise)) != str(otherwise):
            carried.before.append(
                f"check cluster.hosts: the script takes {otherwise} nodes, and starts the program"
                f" on {sizes['--hosts']}"
            )
        return otherwise
    if "--hosts" in sizes:
        return number_of(sizes["--hosts"])
    if (value := unclear_size(words, HOSTS)) is not None:
        number = number_of(value.partition(":")[0])  # a range has the least number first
        if number is None:
            carried.before.append(f"set cluster.hosts: a launcher gets {short(value)} hosts")
        return number or otherwise
    if (value := unclear_size(words, [one for one in ALL_RANKS if one != "-n"])) is not None:
        carried.before.append(f"set cluster.hosts: a launcher starts {short(value)} ranks")
    return otherwise


DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _visible_devices(shell: Shell) -> int | None:
    """The GPUs that the script shows to its program."""
    lists = [shell.exported.get(name, "") for name in DEVICES]
    found = next((one for one in lists if re.fullmatch(r"\d+(,\d+)*", one)), None)
    return None if found is None else found.count(",") + 1


def options_in(text: str) -> dict[str, str]:
    """The options of the `#SBATCH` lines, with underscores. Slurm uses the last of each.

    Of a heterogeneous job it has those of the first component, and the key `hetjob`.
    """
    words: list[str] = []
    for line in re.findall(r"^#SBATCH[ \t]+(.*)", text, re.MULTILINE):
        line = variables_for_placeholders(IN_BRACKETS.sub(r"<\1\2>", line))
        if line.split()[:1] in (["hetjob"], ["packjob"]):
            return {**_options(words), "hetjob": ""}
        try:
            words += shlex.split(line, comments=True)
        except ValueError:
            words += line.partition(" #")[0].split()
    return _options(words)


def _options(words: list[str]) -> dict[str, str]:
    """The options at the start of a command line or of `#SBATCH` lines."""
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if joined := re.fullmatch(r"-([A-Za-z])(.+)", word):
            name, equals, value = joined[1], "=", joined[2]
        elif not re.fullmatch(r"--?[A-Za-z][\w-]*", name):
            continue
        if not equals and at + 1 < len(words) and not words[at + 1].startswith("-"):
            value = words[at + 1]
        name = name.lstrip("-")
        name = SHORT.get(name, name).replace("-", "_")
        name, value = OTHER_SPELLINGS.get(name, name), braced(value)
        # Slurm adds the second kind of mail to the first.
        several = name == "mail_type" and name in found
        found[name] = f"{found[name]},{value}" if several else value
    return found


def _of_slurm(given: Mapping[str, str], hosts: Any) -> Values:
    """Variables that Slurm sets and whose value follows from the options."""
    tasks = given.get("ntasks_per_node", "1")
    gpus = GPUS.fullmatch(given.get("gres", ""))
    each = given.get("gpus_per_node") or (gpus[2] or "1" if gpus else "")
    known = {
        "SLURM_NNODES": str(hosts),
        "SLURM_JOB_NUM_NODES": str(hosts),
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_GPUS_PER_NODE": each.rpartition(":")[2],
        "SLURM_GPUS_ON_NODE": each.rpartition(":")[2],
        "SLURM_CPUS_PER_TASK": given.get("cpus_per_task", ""),
        "SLURM_JOB_NAME": given.get("job_name", ""),
        "SLURM_SUBMIT_DIR": "${PWD}",
        "PWD": given.get("chdir", ""),
    }
    values: Values = {name: value for name, value in known.items() if value}
    return values


def _gpus(
    given: Mapping[str, str], hosts: Any, by_launcher: str | None
) -> tuple[Any, dict[str, str]]:
    """Devices of a host, and how Slurm is asked for them."""
    tasks = _tasks_of_a_host(given, hosts)
    for name, how in (("gpus_per_node", "per-node"), ("gres", "gres"), ("gpus", "per-node")):
        for one in given.get(name, "").split(","):
            found = GPUS.fullmatch(one if name == "gres" else f"gpu:{one}")
            if found is None:
                continue
            count = number_of(found[2] or "1")
            if name == "gpus" and isinstance(count, int) and isinstance(hosts, int):
                count = max(1, count // hosts)
            return count, {"gpus": how, **({"gpu_type": found[1]} if found[1] else {})}
    kind, _, count = given.get("gpus_per_task", "").rpartition(":")
    if (each := number_of(count)) is not None:
        several = isinstance(each, int) and isinstance(tasks, int)
        return each * tasks if several else each, {"gpu_type": kind} if kind else {}
    # Some sites give whole hosts with all their GPUs, and refuse requests for GPUs. A script
    # without options gets them on the command line of sbatch, so how it asks is unknown.
    alone: dict[str, str] = {"gpus": "none"} if given else {}
    if by_launcher is not None:
        return number_of(by_launcher), alone
    return (tasks if tasks != 1 else None), alone


def _tasks_of_a_host(given: Mapping[str, str], hosts: Any) -> Any:
    """The tasks of a host, also if the script says how many all hosts have; None: unknown."""
    tasks, total = number_of(given.get("ntasks_per_node")), number_of(given.get("ntasks"))
    if tasks is None and isinstance(total, int) and isinstance(hosts, int) and total % hosts == 0:
        return total // hosts
    return tasks


def _slurm(
    carried: Carried,
    given: Mapping[str, str],
    how: Mapping[str, str],
    gpus: Any,
    step: Mapping[str, str],
) -> dict[str, Any]:
    found: dict[str, Any] = {name: given[name] for name in SAME if given.get(name)}
    if "segment" in found:
        found["segment"] = number_of(found["segment"])
    found.update(how)
    found["exclusive"] = given.get("exclusive") == ""
    found.update(_of_a_host(carried, given, gpus))
    gres = [one for one in given.get("gres", "").split(",") if one and not GPUS.fullmatch(one)]
    if gres:
        found["gres"] = ",".join(gres)
    ours = {one.replace("-", "_") for one in OURS}
    known = SRUN | BY_NDCTL | ours | {*SAME, *INSTEAD, *SENTENCES, "hetjob"}
    # Plugins of a site add options, such as --image of Shifter.
    args = [_flag(name, given[name]) for name in given if name not in known]
    if given.get("exclusive"):  # from jobs of other users alone, for example
        args.append(_flag("exclusive", given["exclusive"]))
    both = {**{name: given[name] for name in given if name in SRUN}, **step}
    steps = [*srun_args(carried, both)]
    found.update({"sbatch_args": args} if args else {}, **({"srun_args": steps} if steps else {}))
    for name in given:
        instead = INSTEAD.get(name) or SENTENCES.get(name)
        if instead is None and name in ours and name not in SAME:
            instead = "ndctl sets it itself"
        if name not in BY_NDCTL and instead is not None:
            carried.leave(f"#SBATCH {_flag(name, given[name])}: {instead}")
    if "hetjob" in given:
        carried.leave("#SBATCH hetjob: all hosts are alike; here are those of the first component")
    _signal(carried, found, given.get("signal", ""))
    return found


def _signal(carried: Carried, found: dict[str, Any], given: str) -> None:
    """How long before the time limit the job gets a signal."""
    one = SIGNAL.fullmatch(given)
    if one is None:
        return
    found["notice_s"] = int(one[2])
    if one[1] not in ("TERM", "15"):
        carried.leave(
            f"#SBATCH --signal={given}: ranks get SIGTERM {one[2]} s before the time limit, not"
            f" {one[1]}; ndctl.should_stop() says it too"
        )


def _cpus_of_step(given: Mapping[str, str], step: Mapping[str, str], hosts: Any) -> dict[str, str]:
    """The CPUs that srun asks for in a job that does not say how many it needs."""
    asked = step.get("cpus_per_task", "")
    # A variable of Slurm repeats what the command line of sbatch says.
    if "cpus_per_task" in given or not asked or "SLURM_" in asked:
        return {}
    tasks = step.get("ntasks_per_node", given.get("ntasks_per_node"))
    if tasks is None and (total := step.get("ntasks", given.get("ntasks"))) is not None:
        if not (total.isdecimal() and isinstance(hosts, int) and int(total) % hosts == 0):
            return {}
        tasks = str(int(total) // hosts)
    return {"cpus_per_task": asked, "ntasks_per_node": tasks or "1"}


def _of_a_host(carried: Carried, given: Mapping[str, str], gpus: Any) -> dict[str, Any]:
    """CPUs and memory of the one task that ndctl starts on each host."""
    found: dict[str, Any] = {}
    cpus = number_of(given.get("cpus_per_task"))
    tasks = 1
    if given.keys() & {"ntasks", "ntasks_per_node"}:
        tasks = _tasks_of_a_host(given, carried.cluster["hosts"]) or 1
        if not given.keys() & {"nodes", "ntasks_per_node"} and isinstance(gpus, int):
            tasks = min(tasks, gpus)  # the number of hosts that share the tasks is unknown
    elif "ntasks_per_gpu" in given:
        tasks = gpus
    if cpus is None and isinstance(gpus, int):
        cpus, tasks = number_of(given.get("cpus_per_gpu")), gpus
    if isinstance(cpus, int) and isinstance(tasks, int):
        found["cpus_per_task"] = cpus * tasks
    elif cpus is not None:
        found["cpus_per_task"] = cpus
    for name, count in (("mem_per_cpu", found.get("cpus_per_task", tasks)), ("mem_per_gpu", gpus)):
        size = SIZE.fullmatch(given.get(name, ""))
        if size is not None and isinstance(count, int):
            found["mem"] = f"{int(size[1]) * count}{size[2].upper()}"
        elif name in given:
            carried.leave(f"#SBATCH {_flag(name, given[name])}: {SENTENCES[name]}")
    return found


def _flag(name: str, value: str) -> str:
    return f"--{name.replace('_', '-')}" + (f"={value}" if value else "")


LOADS = re.compile(r"(?:module (?:load|add)|ml)((?: (?!-)[\w./+-]+| \$\{\w+\})+)")


def _around(shell: Shell) -> dict[str, Any]:
    """Modules, and what else prepares the environment.

    ndctl loads `modules` before `setup`. So a script that does something else before, such as
    `module use FOLDER`, keeps all lines in its order.
    """
    setup = list(shell.setup)
    modules: list[str] = []
    while setup and (loads := LOADS.fullmatch(setup[0])) and "purge" not in setup[0]:
        modules += loads[1].split()
        setup.pop(0)
    if any(re.match(r"(module|ml)\b", line) for line in setup):
        modules, setup = [], list(shell.setup)
    return {
        **({"modules": modules} if modules else {}),
        **({"setup": setup} if setup else {}),
    }


def _run(carried: Carried, shell: Shell, start: Start | None, given: Mapping[str, str]) -> None:
    set_program(carried, start)
    folder = shell.folder
    if (chdir := given.get("chdir")) is not None:  # `cd` in the script starts there
        folder = folder_behind(chdir, folder or ".")
    if folder is not None and ONLY_A_SHELL_KNOWS.search(folder):
        words = f"set run.workdir: only the script's shell knows {short(folder)}"
        carried.before.append(words)
    elif folder not in (None, ".", "${PWD}"):
        carried.run["workdir"] = folder
    set_variables(carried, shell)
    ask_for_loops(carried, shell)


def _container(carried: Carried, typed: Mapping[str, str]) -> None:
    if not typed.get("container_image"):
        return
    typed = {name: variables_for_placeholders(value) for name, value in typed.items()}
    mounts = [one for one in typed.get("container_mounts", "").split(",") if one]
    found: dict[str, Any] = {"image": typed["container_image"], "mounts": mounts}
    if workdir := typed.get("container_workdir"):
        found["workdir"] = workdir
    carried.cluster["slurm"]["container"] = found
    carried.before += [
        "install ndctl in the image of cluster.slurm.container (manifests/image/ has the recipe)",
        "add the run root to cluster.slurm.container.mounts",
    ]
    for name in typed:
        if name.startswith(("container_", "no_container")) and name not in (
            *("container_image", "container_mounts", "container_workdir"),
        ):
            carried.leave(f"--{name.replace('_', '-')}: write it to cluster.slurm.srun_args")


MOST_LINES = 100
"""Most lines of a script that are said one by one."""


def _rest(carried: Carried, shell: Shell, start: Start | None) -> None:
    """Lines that do something else than to start the training."""
    named = start.words if start is not None else ()
    written = [(line, text) for line, file, text in shell.written if names_file(named, file)]
    others = [*shell.others, *written, *_not_training(shell, start)]
    lines = sorted([*((line, short(text)) for line, text in others), *_maybe(shell, start)])
    for line, text in lines[:MOST_LINES]:
        carried.leave(f"line {line}: {text}")
    if len(lines) > MOST_LINES:
        carried.leave(f"{len(lines) - MOST_LINES} more lines, from line {lines[MOST_LINES][0]}")
    if lines and carried.cluster["backend"] == "local":
        carried.leave("what the job needs of these lines: type it before you submit")
    elif lines:
        carried.leave(
            "what these lines do belongs into cluster.slurm.setup (first host, before the ranks)"
            " or cluster.slurm.hooks (each host)"
        )


def _maybe(shell: Shell, start: Start | None) -> Iterator[tuple[int, str]]:
    """What the script does on a condition that only a shell knows, if the training needs it."""
    text = start.text if start is not None else ""
    for one in shell.maybe:
        name, is_value, _ = one.words[0].partition("=")
        needed = re.search(rf"\$\{{?{re.escape(name.rstrip('+'))}\b", text) is not None
        body = shell.functions.get(one.words[0], "")
        # A function such as `usage` only prints, and ends the script.
        prints = re.search(r"\bexit\b|[Uu]sage", body) is not None
        runs = one.words[0] == "export" or not (one.words[0] in QUIET or prints)
        if needed if is_value else runs:
            yield one.line, f"{short(one.text)} (only a shell knows whether it runs)"


def _not_training(shell: Shell, start: Start | None) -> Iterator[tuple[int, str]]:
    # A script may have the line of the training twice, in two branches.
    training = None if start is None else start.words
    yield from ((one.line, one.text) for one in shell.starts if one.words != training)
