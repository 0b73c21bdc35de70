"""The commands that ndctl prints about a job, with the options that they need to find it.

A job name alone is not enough if the run root of the job is not the default run root.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ndctl.rank.regular_file import read_regular
from orchestrator.app.remote import Found
from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.files import env
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.types import OVERLAY
from orchestrator.dashboard.command_hints import Commands
from orchestrator.job_paths import run_root_of

if TYPE_CHECKING:
    from orchestrator.load import Written


class SubmittedFrom(Struct, frozen=True, kw_only=True):
    """`submitted.json`: how the job was submitted. It is used to print the command that resumes
    the job with the user's file, not with the copy in the run directory."""

    spec: str
    """Absolute path of the user's file, on the machine that submitted it."""
    overrides: tuple[str, ...] = ()
    folder: str = ""
    """Working directory of the submission, if paths in the spec depend on it."""
    here: bool = False
    """The job ran in an existing allocation (`--here`)."""


def remember(run_dir: RunDir, written: "Written") -> None:
    """Raises OSError."""
    write_whole(run_dir.submitted, json.dumps(submitted_from(written), indent=2).encode())


def submitted_from(written: "Written", *, here: bool = False) -> dict[str, Any]:
    """A SubmittedFrom, encoded."""
    folder = str(Path.cwd()) if _depends_on_folder(written) else ""
    overrides = tuple(map(_from_anywhere, written.overrides))
    origin = SubmittedFrom(spec=str(written.path), overrides=overrides, folder=folder, here=here)
    encoded: dict[str, Any] = encode(origin)
    return encoded


def _from_anywhere(override: str) -> str:
    """An overlay with its absolute path."""
    if not override.startswith(OVERLAY):
        return override
    return f"{OVERLAY}{Path(override.removeprefix(OVERLAY)).absolute()}"


def _depends_on_folder(written: "Written") -> bool:
    spec = written.spec
    if spec.cluster.backend == "slurm":
        return True  # Slurm starts the agents where the job was submitted
    if not isinstance(spec, JobSpec):
        return True  # run.workdir
    held_out = spec.data.validation.files if spec.data.validation else None
    globs = [files for files in (spec.data.files, held_out) if files is not None]
    folders = [spec.data.tokenizer, spec.model.weights, spec.model.path]
    here = [one for one in folders if one and not one.startswith("/") and Path(one).exists()]
    return bool(here) or any(not files.startswith(("/", "{stdlib}")) for files in globs)


def commands_for(found: Found, environ: Mapping[str, str]) -> Commands:
    """Commands for a job that was found, also in a cluster."""
    if found.copy is None:
        return commands_of(found.run_dir, environ)
    from orchestrator.backends.kubernetes.mirror.mirror_paths import options_of, run_root_above

    run_root = run_root_above(found.run_dir.path)
    place = options_of(run_root, found.run_dir.path)
    return _commands(found.run_dir, run_root, environ, place)


def commands_of(run_dir: RunDir, environ: Mapping[str, str]) -> Commands:
    """Commands for a job whose run root is the parent of `run_dir`."""
    return _commands(run_dir, run_dir.path.absolute().parent, environ)


def _commands(
    run_dir: RunDir, run_root: Path, environ: Mapping[str, str], place: tuple[str, ...] = ()
) -> Commands:
    origin = _origin(run_dir)
    said = ("--run-root", str(run_root))
    # Commands without a spec cannot read a run root from it.
    here = run_root_of(None, environ).absolute() == run_root
    anywhere = Path(environ.get(env.RUN_ROOT) or ".") == run_root
    return Commands(
        job=run_dir.path.absolute().name,
        spec=origin.spec,
        overrides=origin.overrides,
        here=origin.here,
        folder=origin.folder,
        root=() if here else said,
        submit_root=() if anywhere else said,
        place=place,
    )


def _origin(run_dir: RunDir) -> SubmittedFrom:
    """Uses the copy in the run directory if the user's file is gone or on another machine."""
    try:
        origin: SubmittedFrom = decode(SubmittedFrom, read_json(read_regular(run_dir.submitted)))
    except (OSError, ValueError, Invalid):
        return SubmittedFrom(spec=str(run_dir.spec))
    if Path(origin.spec).is_file():
        return origin
    return SubmittedFrom(spec=str(run_dir.spec), here=origin.here)
