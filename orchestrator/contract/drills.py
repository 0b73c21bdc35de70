"""Drills: faults that a user orders, to see how a job recovers before it runs for weeks."""

import re
from typing import Annotated, Literal, get_args

from msgspec import Struct

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import AtLeast
from orchestrator.contract.spec.run_spec import RunSpec

Fault = Literal[
    "kill",
    "stop",
    "slow",
    "raise",
    "exit",
    "segv",
    "oom",
    "nan",
    "busy",
    "skip",
    "shape",
    "order",
    "data",
    "write",
    "warn",
]
"""What happens to the rank:

- `kill`, `stop`: SIGKILL, SIGSTOP
- `slow`: this step and all later ones start late by one step time, at least 0.25 s
- `raise`, `exit`: a Python exception; exit code 1
- `segv`: SIGSEGV
- `oom`: it allocates more device memory than there is
- `nan`: a weight becomes NaN
- `busy`: a loop in C that holds the GIL
- `skip`, `shape`, `order`: it leaves out the step's all-reduce, calls it with another size, or
  calls another operation before it that no other rank calls
- `data`: its data loader blocks
- `write`: checkpoint files cannot be written, as on storage that does not respond

To a host: `kill`, and `warn`: its agent reports memory errors of a GPU.
"""
ON_HOSTS: tuple[Fault, ...] = ("kill", "warn")
FAULTS: tuple[Fault, ...] = tuple(one for one in get_args(Fault) if one != "warn")
"""What happens to a rank."""
FROM_OUTSIDE: tuple[Fault, ...] = ("kill", "stop", "slow", "segv")
"""What the agent can do to any process. It slows one down by stopping it for half of the time."""
IN_PYTHON: tuple[Fault, ...] = ("exit",)
"""What it can do to a Python program, which handles a signal for it."""
FORM = (
    f"FAULT:rank=R@step=S with FAULT one of {', '.join(FAULTS)};"
    " or kill:host=H@step=S or warn:host=H@step=S"
)


class Drill(Struct, frozen=True, kw_only=True):
    """One fault at one step. It happens once, even if the step runs again after a restart."""

    id: int
    """Position in the job's list of drills, from 1."""
    fault: Fault
    target: Literal["rank", "host"]
    """`host`: its agent and all its ranks are killed, or with `warn` its agent reports a warning.
    """
    index: Annotated[int, AtLeast(0)]
    """Global rank of a rank, or node rank of a host."""
    step: Annotated[int, AtLeast(1)]
    """Optimizer step, from 1. The fault happens at its beginning."""

    def __str__(self) -> str:
        return f"{self.fault}:{self.target}={self.index}@step={self.step}"


def parse_drill(text: str, number: int) -> Drill:
    """The drill of a text such as `kill:rank=1@step=25`; `number` becomes its id.

    Raises:
        Invalid: the text has another form.
    """
    found = re.fullmatch(rf"({'|'.join(FAULTS)}):rank=(\d+)@step=([1-9]\d*)", text)
    target: Literal["rank", "host"] = "rank"
    if found is None:
        found = re.fullmatch(rf"({'|'.join(ON_HOSTS)}):host=(\d+)@step=([1-9]\d*)", text)
        target = "host"
    if found is None:
        fix = "for example --drill kill:rank=1@step=25"
        raise Invalid([Problem(path="--drill", value=text, limit=FORM, fix=fix)])
    fault, index, step = found.groups()
    known = next(one for one in (*FAULTS, *ON_HOSTS) if one == fault)
    return Drill(id=number, fault=known, target=target, index=int(index), step=int(step))


def faults_of(run: RunSpec) -> tuple[Fault, ...]:
    """The faults that a job of the user's own program can have."""
    return (*FROM_OUTSIDE, *IN_PYTHON) if run.is_python else FROM_OUTSIDE
