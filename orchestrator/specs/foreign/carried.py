"""A job spec that was made from a manifest or a batch script, as text with comments."""

import re
import textwrap
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml
from msgspec import Struct, field

from orchestrator.specs.variables import SHELLS
from orchestrator.yaml_document import Dumper

VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
OF_NDCTL = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
)
"""Variables that ndctl sets on each rank, or that only a launcher needs."""

OF_A_LOGIN = frozenset(("HOME", "PWD", "USER", "SHELL", "LANG"))
"""Variables that each shell has."""


class Carried(Struct, kw_only=True):
    """Values of a spec, and what a person still has to know. Filled step by step."""

    name: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    resilience: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """What the file says and the spec does not, with the reason."""
    before: list[str] = field(default_factory=list)
    """What must be done before the spec can be submitted."""
    of_pods: list[str] = field(default_factory=list)
    """Variables whose values only the pods know."""

    def leave(self, words: str) -> None:
        if words not in self.left:
            self.left.append(words)

    def text(self, source: str) -> str:
        """The spec as YAML. Its comments say what was not taken over."""
        body = {"name": self.name, "run": self.run, "cluster": self.cluster}
        if self.resilience:
            body["resilience"] = self.resilience
        written: str = yaml.dump(
            body, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100
        )
        head = [f"A job of ndctl, made from {source} by `ndctl init --from`.", *self.notes()]
        return "".join(map(_comment, head)) + written

    def notes(self) -> list[str]:
        """One line for each thing that a person must know."""
        run = {**self.run, "args": []} if in_a_shell(self.run) else self.run
        used = dict.fromkeys(variables_of([run, self.cluster, self.name]))
        of_slurm = [name for name in used if name.startswith("SLURM_")]
        of_pods = [name for name in used if name in self.of_pods]
        inside = [
            f"before you submit: replace {', '.join(f'${{{name}}}' for name in names)}, {known}"
            for names, known in (
                (of_slurm, "which only a job of Slurm has"),
                (of_pods, "which only the pods know: the program can read its environment"),
            )
            if names
        ]
        names = [one for one in used if one not in (*OF_A_LOGIN, *of_slurm, *of_pods)]
        unset = [f"to set before you submit, or to replace here: {', '.join(names)}"]
        return [
            *(unset if names else []),
            *inside,
            *(f"before you submit: {one}" for one in dict.fromkeys(self.before)),
            *(f"not taken over: {one}" for one in self.left),
        ]


def in_a_shell(run: Mapping[str, Any]) -> bool:
    """Whether the arguments are lines for a shell, which keep their variables."""
    return PurePath(str(run.get("program"))).name in SHELLS


def _comment(line: str) -> str:
    lines = textwrap.wrap(line, 96, subsequent_indent="  ", break_long_words=False)
    return "".join(f"# {one}\n" for one in lines)


def variables_of(value: Any) -> list[str]:
    """Names of the variables in texts that ndctl replaces when it reads the spec."""
    if isinstance(value, str):
        return re.findall(r"(?<!\$)\$\{([A-Za-z_]\w*)\}", value)
    if isinstance(value, Mapping):
        inside = [one for key, one in value.items() if key not in ("pod_template", "setup")]
        return [name for one in inside for name in variables_of(one)]
    return [name for one in value for name in variables_of(one)] if isinstance(value, list) else []


def braced(text: str) -> str:
    """`text` with `$VAR` written as `${VAR}`, as a spec has it."""
    return VARIABLE.sub(lambda found: f"${{{found[1] or found[2]}}}", text)


def number_of(value: Any) -> Any:
    """A count: a number, a variable, or None."""
    text = braced(str(value)).strip()
    if text.isdecimal():
        return int(text)
    return text if re.fullmatch(r"\$\{\w+\}", text) else None


def job_name(text: str) -> str:
    """A name that a spec accepts, similar to `text`."""
    plain = re.sub(r"\$\{?\w+\}?|\{\{.*?\}\}", "", text)
    return re.sub(r"[^A-Za-z0-9_-]+", "-", plain).strip("-_")[:40].rstrip("-_") or "job"
