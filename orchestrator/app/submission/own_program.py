"""The spec of `ndctl run`."""

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from orchestrator.contract.spec.job_spec import CommonSpec, kubernetes_name
from orchestrator.errors import SpecError
from orchestrator.inventory.local import visible_gpus
from orchestrator.job_paths import run_root_of
from orchestrator.load import Written, written_from
from orchestrator.specs.foreign.around_program import without_launcher
from orchestrator.specs.foreign.command_lines import SET_IN_SCRIPT, settings_in

LONGEST_NAME = 55
"""Leaves room for a number."""


class Asked(Struct, frozen=True, kw_only=True):
    """What the user typed. None: not given."""

    words: tuple[str, ...]
    """The program and its arguments."""
    name: str | None = None
    hosts: int | None = None
    gpus_per_host: int | None = None
    spare_hosts: int | None = None
    overrides: tuple[str, ...] = ()


def write(asked: Asked, run_root: str | None, environ: Mapping[str, str]) -> Written:
    """The spec of `asked`. Without a name it gets one that no job in the run root has.

    Raises:
        SpecError: with all problems.
    """
    run = _run(asked.words)
    stem = asked.name or _name_of(run)
    written = _written(asked, run, stem, environ)
    if asked.name is not None:
        return written
    if written.spec.cluster.backend == "kubernetes":
        return _written(asked, run, kubernetes_name(stem), environ)
    root = run_root_of(run_root, environ, written.spec.run_root)
    name = next(one for one in _numbered(stem) if not (root / one).exists())
    return _written(asked, run, name, environ)


def refuse_launcher(words: Sequence[str]) -> None:
    """Raises SpecError if `words` start the program by torchrun or another launcher. The fix is the
    command without it."""
    in_quotes = len(words) == 1 and " " in words[0] and not Path(words[0]).exists()
    text = words[0]
    if in_quotes:
        words = _split(text)
    found = without_launcher(words)
    if in_quotes and found is None and words[0].endswith(".py"):
        fix = f"ndctl run -- {text}"
        raise SpecError("the program and its arguments are one word in quotes", fix=fix)
    # A script in the working directory may have such a name; /usr/bin/python is the launcher.
    if found is None or ("/" not in words[0] and Path(words[0]).is_file()):
        return
    launcher, typed = found
    settings = settings_in(words)
    also = f". {SET_IN_SCRIPT.format(', '.join(settings))}" if settings else ""
    raise SpecError(
        f"leave {launcher} out: ndctl starts torchrun on each host, and your program on each rank"
        f"{also}",
        fix=typed or "for example: ndctl run -- train.py",
    )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote without its end, or the end of a line after a backslash
        return text.split()


def _written(
    asked: Asked, run: Mapping[str, Any], name: str, environ: Mapping[str, str]
) -> Written:
    given = {
        "hosts": asked.hosts,
        "gpus_per_host": asked.gpus_per_host,
        "spare_hosts": asked.spare_hosts,
    }
    cluster = {key: value for key, value in given.items() if value is not None}
    data = {"name": name, "run": run, "cluster": cluster}
    written = written_from(data, "ndctl run", asked.overrides, environ)
    if asked.gpus_per_host is None and _follows_gpus(written.spec, asked):
        # As `torchrun --nproc-per-node=gpu` counts them.
        count = len(visible_gpus(environ)) // written.spec.cluster.hosts
        data["cluster"] = {**cluster, "gpus_per_host": max(1, count)}
        written = written_from(data, "ndctl run", asked.overrides, environ)
    return written


def _follows_gpus(spec: CommonSpec, asked: Asked) -> bool:
    said = any(one.startswith("cluster.gpus_per_host=") for one in asked.overrides)
    return spec.cluster.backend == "local" and not said


def _run(words: tuple[str, ...]) -> dict[str, Any]:
    first, rest = words[0], list(words[1:])
    if first not in ("-m", "--no-python"):
        if first.startswith("-"):
            raise SpecError(
                f"{first} is an option, not a program",
                fix="write options of ndctl before --, and options of your program after its name",
            )
        return {"script": first, "args": rest}
    if not rest:
        raise SpecError(f"no program after {first}", fix=f"for example: ndctl run -- {first} NAME")
    key = "module" if first == "-m" else "program"
    return {key: rest[0], "args": rest[1:]}


def _name_of(run: Mapping[str, Any]) -> str:
    program = run.get("script") or run.get("module") or run.get("program")
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(str(program)).stem).strip("-_")
    return plain[:LONGEST_NAME] or "run"


def _numbered(stem: str) -> "itertools.chain[str]":
    return itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
