"""What finds a job again from where ndctl was asked: its name alone does not where its run root is
another than that of a command that names none."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.app.remote import Found
from orchestrator.contract.rundir import RunDir
from orchestrator.dashboard.commands import Commands
from orchestrator.jobs import run_root_of


def commands_for(found: Found, environ: Mapping[str, str]) -> Commands:
    """Those about a job whose run directory, or the copy of it, was found."""
    if found.copy is None:
        return commands_of(found.run_dir, environ)
    from orchestrator.backends.kubernetes.places import options_of, run_root_above

    run_root = run_root_above(found.run_dir.path)
    return Commands(
        job=found.run_dir.path.name,
        spec=str(found.run_dir.spec),
        root=_root(run_root, environ),
        place=options_of(run_root, found.run_dir.path),
    )


def commands_of(run_dir: RunDir, environ: Mapping[str, str]) -> Commands:
    """Those about a job of the run root above `run_dir`."""
    path = run_dir.path.absolute()
    root = _root(path.parent, environ)
    return Commands(job=path.name, spec=str(run_dir.spec), root=root)


def _root(run_root: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """As verbs see it that know no spec, which could name another."""
    if run_root_of(None, environ).absolute() == run_root:
        return ()
    return ("--run-root", str(run_root))
