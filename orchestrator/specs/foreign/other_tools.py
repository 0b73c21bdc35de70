"""YAML files of other tools that a user gives as a job spec.

One sentence about the whole file says more than one about each of its keys.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from orchestrator.contract.codec import Problem
from orchestrator.specs.foreign.command_lines import program_in
from orchestrator.yaml_document import Document

DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
ACCELERATE = ("compute_environment", "distributed_type", "machine_rank")
SKYPILOT = ("resources", "num_nodes", "file_mounts", "envs")
LIGHTNING = ("trainer", "seed_everything")
"""Keys at the top of files of these tools, and of no job spec."""


def foreign_file(document: Document) -> Problem | None:
    """What a document is that another tool reads; None: a job spec, or nothing known."""
    data, file = document.data, document.source
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
    nodes = data.get("num_nodes")
    hosts = nodes if type(nodes) is int and nodes > 0 else 1
    return (
        f"`ndctl init{run} --hosts {hosts} --gpus-per-host {_gpus(data.get('resources'))}` writes a"
        " job spec; variables are run.env"
    )


def _gpus(resources: Any) -> int:
    """Of `{accelerators: H100:8}`; 1 without a number."""
    wanted = resources.get("accelerators") if isinstance(resources, Mapping) else None
    if isinstance(wanted, Mapping):
        wanted = ":".join(map(str, next(iter(wanted.items()), ())))
    found = re.search(r":(\d{1,6})(?!\d)", str(wanted))
    return int(found[1]) if found else 1


TOOLS = (
    ("SkyPilot", SKYPILOT, _for_skypilot),
    ("DeepSpeed", DEEPSPEED, _for_a_script(" --deepspeed {file}")),
    ("Accelerate", ACCELERATE, _for_a_script("")),
    ("Lightning", LIGHTNING, _for_a_script(" fit --config {file}")),
)


OURS = {"model", "data", "train", "parallel", "cluster", "checkpoint"}
"""Keys at the top of job specs alone."""
