"""A training program of the user's own, which ndctl supervises in place of the bundled trainer."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Struct, field

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import Matches
from orchestrator.contract.spec.slurm_spec import bad_variable
from orchestrator.contract.spec.types import Auto

File = Annotated[str, Matches(r"[^\0]+", "a path, not empty", "train.py")]
Module = Annotated[
    str, Matches(r"[^\W\d]\w*(\.[^\W\d]\w*)*", "the name of a Python module", "package.train")
]
Pattern = Annotated[str, Matches(r"[\s\S]+", "a regular expression, not empty", r"step (\d+)")]


class MetricPatterns(Struct, frozen=True, kw_only=True):
    """Regular expressions (RE2) that find metrics in the lines that rank 0 prints. The first group
    is the number."""

    step: Pattern | None = None
    """Optimizer steps of the job that are done."""
    loss: Pattern | None = None
    """The loss of the step."""


class Keep(Struct, frozen=True, kw_only=True):
    """What the program's ranks need to know of `checkpoint`."""

    keep: int = 2
    keep_every: int | None = None
    verify: bool = True


class Capture(Struct, frozen=True, kw_only=True):
    """The copy of the program that ranks run."""

    folder: str
    """The user's own folder."""
    copy: str


class RunSpec(Struct, frozen=True, kw_only=True):
    """The program of each rank. Give exactly one of `script`, `module` and `program`."""

    script: File | None = None
    """A Python file, relative to `workdir`."""
    module: Module | None = None
    """A Python module, as in `python -m`."""
    program: File | None = None
    """An executable, as with `torchrun --no-python`: a path with a slash, relative to `workdir`, or
    a name in PATH."""
    args: tuple[str, ...] = ()
    """Arguments of the program."""
    workdir: File = "."
    """Working directory of each rank, relative to the folder in which you submit."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of each rank."""
    capture: bool = True
    """On Slurm, ranks run the script or module from a copy that is made at submission, so that
    edits do not change a job that waits or restarts. The working directory stays `workdir`. False:
    from the folder itself, for example if it has too many files."""
    metrics: MetricPatterns | None = None
    """Reads progress from the log of rank 0, for programs that report none."""
    preload: tuple[Module, ...] | Auto = "auto"
    """Modules that a host imports once, so that a restart does not wait for them. `auto`: those
    that the script had imported when it did its first step; `[]`: none."""

    def __post_init__(self) -> None:
        problems = [_not_one(self), *map(bad_variable, self.env)]
        if found := [problem for problem in problems if problem is not None]:
            raise Invalid(found)

    @property
    def is_python(self) -> bool:
        """Whether the interpreter of ndctl runs it, so that its steps can be counted."""
        return self.program is None

    @property
    def folder(self) -> str:
        """The folder that is copied: `workdir`, or the script's folder if that is elsewhere."""
        if self.script is None:
            return self.workdir
        home = Path(os.path.normpath(self.workdir))
        script = Path(os.path.normpath(home / self.script))
        return str(home if script.is_relative_to(home) else script.parent)

    @property
    def words(self) -> tuple[str, ...]:
        """The program and its arguments, as after `ndctl run --`."""
        if self.script is not None:
            return (self.script, *self.args)
        if self.module is not None:
            return ("-m", self.module, *self.args)
        assert self.program is not None
        return ("--no-python", self.program, *self.args)


def _not_one(run: RunSpec) -> Problem | None:
    given = [key for key in ("script", "module", "program") if getattr(run, key) is not None]
    if len(given) == 1:
        return None
    return Problem(
        path="",
        value=", ".join(given) or "none",
        limit="given by exactly one of script, module, program",
        fix=f"keep one, for example {given[0]}"
        if given
        else "add one, for example script: train.py",
    )
