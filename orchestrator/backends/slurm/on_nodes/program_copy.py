"""The copy of the user's program for one launch: what `submit` says of it, and its making."""

import os
from collections.abc import Iterator
from pathlib import Path

from orchestrator.backends.slurm.on_nodes import capture
from orchestrator.backends.slurm.on_nodes.capture_rules import OWN
from orchestrator.contract.check_results import Finding
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.errors import Refused
from orchestrator.seams import Clock

KEY = "run.capture"


def look(launch: LaunchPlan, run: RunSpec | None, clock: Clock) -> tuple[Finding, ...]:
    """What will be copied. Raises Refused if that cannot be."""
    if not launch.capture or run is None:
        return ()
    chosen = _choose(launch, clock)
    _check_program(chosen, run)
    is_first = not any(Path(launch.run_dir).glob("capture-*"))
    return tuple(_findings(chosen, "a copy" if is_first else "a new copy"))


def make(launch: LaunchPlan, clock: Clock) -> None:
    """Copy the program, once. Raises Refused and OSError."""
    target = RunDir(Path(launch.run_dir)).capture(launch.launch)
    if launch.capture and not target.exists():
        capture.take(_choose(launch, clock), target)


def _choose(launch: LaunchPlan, clock: Clock) -> capture.Chosen:
    return capture.choose(Path(launch.capture), Path(launch.run_dir).parent, clock)


def _check_program(chosen: capture.Chosen, run: RunSpec) -> None:
    """The copy must have the program itself. A module may also be installed."""
    if run.script is not None:
        script = os.path.normpath(Path(run.workdir, run.script))
        name = os.path.relpath(script, chosen.folder)
        links = {link for link, _ in chosen.links}
        above = {str(one) for one in Path(name).parents}
        is_missing = name not in chosen.files and not links & {name, *above}
    else:
        name = (run.module or "").partition(".")[0]
        is_missing = any(one in (f"{name}.py", f"{name}/") for one in chosen.ignored)
    if is_missing:
        raise Refused(
            f"{KEY}: the copy of {chosen.folder} would be without {name}: an ignore file names it,"
            " or it is in a folder of a tool or of a Python environment",
            fix=f"write {chosen.folder / OWN}, which replaces .gitignore, or set run.capture to"
            " false; nothing was written or queued",
        )


def _findings(chosen: capture.Chosen, which: str) -> Iterator[Finding]:
    yield Finding(
        what=KEY,
        verdict="note",
        found=f"ranks run {which} of {chosen.words()}; later edits do not change this job",
    )
    if chosen.ignored_code:
        yield Finding(
            what=KEY,
            verdict="warns",
            found=f"the copy is without code that an ignore file names:"
            f" {capture.named(chosen.ignored_code)}",
            fix=f"if the program imports it, write {chosen.folder / OWN}, which replaces"
            " .gitignore, or set run.capture to false",
        )
