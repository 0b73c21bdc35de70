"""Faults on order: a team rehearses a failure before it trusts us with weeks."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import AtLeast

Fault = Literal[
    "kill",
    "stop",
    "slow",
    "raise",
    "exit",
    "oom",
    "nan",
    "busy",
    "skip",
    "shape",
    "order",
    "data",
    "write",
]
"""SIGKILL, SIGSTOP; waiting at the beginning of this step and all later ones as long as a step
takes (at least 0.25 s); a Python exception, or leaving with exit code 1; asking the device for more
memory than there is, or a weight that is no number any more; a loop in C that holds the GIL; the
step's all-reduce left out, called with another size, or called after an operation that no other
rank calls; a data loader that gives nothing any more; files of checkpoints that cannot be written,
as on storage that does not answer."""
FAULTS: tuple[Fault, ...] = get_args(Fault)
FORM = f"FAULT:rank=R@step=S with FAULT one of {', '.join(FAULTS)}; or kill:host=H@step=S"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One fault at one step; it happens once, whatever is restarted afterwards."""

    id: int
    """Place in the job's list of drills, from 1."""
    fault: Fault
    target: Literal["rank", "host"]
    """For a host, its agent and all its ranks are killed."""
    index: Annotated[int, AtLeast(0)]
    """Global rank, or node rank of the host."""
    step: Annotated[int, AtLeast(1)]
    """The optimizer step, from 1, at whose beginning the fault happens."""

    def __str__(self) -> str:
        return f"{self.fault}:{self.target}={self.index}@step={self.step}"


def parse_drill(text: str, number: int) -> Drill:
    """`kill:rank=1@step=25` as the `number`-th drill of a job.

    Raises:
        Invalid: when the text has another form.
    """
    found = re.fullmatch(rf"({'|'.join(FAULTS)}):rank=(\d+)@step=([1-9]\d*)", text)
    target: Literal["rank", "host"] = "rank"
    if found is None:
        found = re.fullmatch(r"(kill):host=(\d+)@step=([1-9]\d*)", text)
        target = "host"
    if found is None:
        fix = "for example --drill kill:rank=1@step=25"
        raise Invalid([Problem(path="--drill", value=text, limit=FORM, fix=fix)])
    fault, index, step = found.groups()
    known = next(one for one in FAULTS if one == fault)
    return Drill(id=number, fault=known, target=target, index=int(index), step=int(step))
