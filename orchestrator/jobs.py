"""Where jobs are, by name. Imports next to nothing: every verb begins here."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract import env
from orchestrator.contract.rundir import DEFAULT_RUN_ROOT, RunDir
from orchestrator.errors import JobError


def run_root_of(option: str | None, environ: Mapping[str, str], spec_root: str = "") -> Path:
    """`--run-root`, else NDCTL_RUN_ROOT, else the spec's, else the default."""
    return Path(option or environ.get(env.RUN_ROOT) or spec_root or DEFAULT_RUN_ROOT)


def find_job(run_root: Path, name: str) -> RunDir:
    """Raises JobError, with the names there are, when there is no such job."""
    run_dir = RunDir((run_root / name).absolute())
    if not run_dir.journal.exists():
        known = ", ".join(job.path.name for job in jobs(run_root)) or "none"
        raise JobError(
            f"no job {name!r} in {run_root.absolute()}; there are: {known}",
            fix="name one of them, or give --run-root or NDCTL_RUN_ROOT",
        )
    return run_dir


def jobs(run_root: Path) -> list[RunDir]:
    """Every job of the run root, by name."""
    return [RunDir(path.parent.absolute()) for path in sorted(run_root.glob("*/journal.jsonl"))]
