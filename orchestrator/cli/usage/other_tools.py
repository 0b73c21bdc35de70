"""What commands and options are called in other tools, and here.

From Slurm, kubectl, torchrun, torchx, SkyPilot, DeepSpeed's and Accelerate's launchers. Names of
keys are in `orchestrator/specs/other_names.py`.
"""

import re
from collections.abc import Mapping

import click

COMMANDS: Mapping[str, str] = {
    # Slurm
    "sbatch": "submit SPEC",
    "srun": "run -- PROGRAM",
    "salloc": "submit SPEC --here",
    "squeue": "list",
    "sacct": "list --all",
    "sinfo": "inventory --backend slurm",
    "scancel": "cancel JOB",
    "scontrol": "describe JOB",
    "sattach": "logs JOB --follow",
    # kubectl
    "apply": "submit SPEC",
    "create": "submit SPEC",
    "get": "list",
    "delete": "cancel JOB",
    "attach": "logs JOB --follow",
    "top": "dashboard JOB",
    "config": "explain",
    # torchrun, torchx, SkyPilot, launchers
    "launch": "submit SPEC",
    "start": "submit SPEC",
    "train": "submit SPEC",
    "torchrun": "run -- PROGRAM",
    "jobs": "list",
    "queue": "list",
    "ps": "list",
    "ls": "list",
    "down": "cancel JOB",
    "stop": "cancel JOB",
    "kill": "cancel JOB",
    "end": "cancel JOB",
    "log": "logs JOB",
    "tail": "logs JOB --follow",
    "ssh": "exec JOB --host HOST -- COMMAND",
    "check": "doctor SPEC",
    "runopts": "explain",
    "builtins": "init",
    "new": "init",
    "info": "describe JOB",
    "show": "describe JOB",
    "watch": "dashboard JOB",
    "monitor": "dashboard JOB",
    "resume": "submit SPEC --resume",
    "restart": "submit SPEC --resume",
    "rm": "prune JOB",
    "remove": "prune JOB",
    "clean": "prune",
    "dryrun": "submit SPEC --dry-run",
    "sweep": "submit SPEC --sweep KEY=A,B",
    "help": "--help",
    "version": "--version",
}
"""Command elsewhere -> what to type after `ndctl`."""

ENV: Mapping[str, str] = dict.fromkeys(("--env", "-e"), "Did you mean --set run.env.NAME=VALUE?")
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "logs": {
        "--previous": "Did you mean --attempt N? The earlier attempts have their own logs",
        "-p": "Did you mean --attempt N? The earlier attempts have their own logs",
        "--container": "Did you mean --host HOST or --rank N? A host has one agent and its ranks",
        "-c": "Did you mean --host HOST or --rank N? A host has one agent and its ranks",
        "-l": "Give the name of a job; `ndctl list` shows them",
        "--regex": "Did you mean --grep REGEX?",
    },
    "submit": {
        "--wait": "Did you mean --follow, or `ndctl wait JOB`?",
        "-w": "Did you mean --follow, or `ndctl wait JOB`?",
        "--detach": "Leave it out: without --follow, submit returns at once",
        "--detach-run": "Leave it out: without --follow, submit returns at once",
        "-d": "Leave it out: without --follow, submit returns at once",
        "--yes": "Leave it out: submit asks nothing",
        "-y": "Leave it out: submit asks nothing",
        "--array": "Did you mean --sweep KEY=A,B?",
        "--dependency": "Did you mean --after JOB?",
        "-J": "Did you mean --set name=…?",
        "-N": "Did you mean --set cluster.hosts=…?",
        "-p": "Did you mean --set cluster.slurm.partition=…?",
        "-t": "Did you mean --set cluster.slurm.time=…?",
        "-A": "Did you mean --set cluster.slurm.account=…?",
        "--scheduler": "Did you mean --backend?",
        "-s": "Did you mean --backend?",
        **ENV,
    },
    "run": ENV,
}
"""Command here -> option elsewhere -> what to do."""

OWN_OPTIONS: Mapping[str, str] = {
    "cluster.hosts": "--hosts",
    "cluster.gpus_per_host": "--gpus-per-host",
    "cluster.spare_hosts": "--spare-hosts",
    "name": "--name",
}
"""Keys for which `ndctl run` and `ndctl init` have options."""


def command_words(name: str) -> str | None:
    """What to type for a command of another tool."""
    typed = COMMANDS.get(name.lower())
    return None if typed is None else f"Did you mean `ndctl {typed}`?"


def option_words(option: str, command: click.Command) -> str | None:
    """What to type for an option that another tool has; None: it is not known."""
    name = command.name or ""
    if known := OPTIONS.get(name, {}).get(option):
        return known
    options = {text for one in command.params for text in one.opts}
    if "--set" not in options or not option.startswith("--"):
        return None
    from orchestrator.specs.advice import keys_for_name

    keys = keys_for_name(option)
    if name == "run" and not any(re.match(r"cluster\.|run\.|resilience\.", key) for key in keys):
        return f"Options of a program follow its name: ndctl run -- PROGRAM {option} …"
    typed = (_typed(key, options) for key in keys)
    return f"Did you mean {' or '.join(typed)}?" if keys else None


def _typed(key: str, options: set[str]) -> str:
    own = OWN_OPTIONS.get(key)
    return own if own in options else f"--set {key}=…"
