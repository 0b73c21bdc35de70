"""Directives of schedulers that ndctl does not submit to: PBS, LSF, Grid Engine, Cobalt."""

import re
from collections.abc import Iterator

from orchestrator.specs.foreign.carried import Carried

NAMES = {"PBS": "PBS", "BSUB": "LSF", "$": "Grid Engine", "COBALT": "Cobalt"}
DIRECTIVE = re.compile(r"#(PBS|BSUB|COBALT|\$)[ \t]+(-\S.*?)(?:\s+#.*)?")
HOSTS = re.compile(r"(?:\bselect|\bnodes|\bnodect)=(\d+)|-nnodes[ =](\d+)|^-n +(\d+)")
GPUS = re.compile(r"\b(?:ngpus|gpus|gpu)=(\d+)|-gpu +[\"']?num=(\d+)")


def directives_in(text: str) -> Iterator[tuple[int, str, str]]:
    """The number of each such line, the scheduler, and its options."""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := DIRECTIVE.fullmatch(line.rstrip()):
            yield number, found[1], found[2]


def set_other_scheduler(carried: Carried, text: str) -> None:
    """Says each directive, and takes the numbers of hosts and GPUs from them."""
    lines = [*directives_in(text)]
    used = re.search(r"\$\{?(PBS|COBALT)_[A-Z]", text)
    if not lines and used is None:
        return
    name = NAMES[lines[0][1] if lines else used[1] if used is not None else ""]
    for _, sign, options in lines:
        hosts, gpus = HOSTS.search(options), GPUS.search(options)
        # `-n` of LSF is a number of tasks.
        if hosts is not None and not (sign == "BSUB" and hosts[3]):
            carried.cluster["hosts"] = int(hosts[1] or hosts[2] or hosts[3])
        if gpus is not None:
            carried.cluster["gpus_per_host"] = int(gpus[1] or gpus[2])
    for number, sign, options in lines:
        carried.leave(f"line {number}: #{sign} {options}")
    carried.before.append(
        f"set cluster.backend to slurm or kubernetes: ndctl cannot submit to {name}, and local"
        " starts all hosts on this machine"
    )
