"""Checks before submission that the user's own program exists and can be started."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path, PurePath

from orchestrator.app.submission.inputs import Looked, sees_other_files
from orchestrator.contract.codec import Problem
from orchestrator.contract.spec.job_spec import ScriptSpec
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.specs.foreign.command_lines import COMMANDS, run_of
from orchestrator.specs.foreign.recognised import foreign_text
from orchestrator.specs.other_values import straight_quotes


def look_at_program(
    spec: ScriptSpec, environ: Mapping[str, str], *, other_hosts: bool = False
) -> Looked:
    """Check the program of `spec` and its working directory.

    Args:
        other_hosts: the hosts are described, and may see other files than this machine.
    """
    if spec.elsewhere:
        unchecked = f"run was neither copied nor checked: {spec.elsewhere}, so it must be there"
        return Looked(unchecked=unchecked)
    if elsewhere := sees_other_files(spec, other_hosts):
        return Looked(unchecked=f"run was not checked: {elsewhere}")
    return Looked(problems=tuple(_problems(spec.run, environ)), doubts=tuple(_doubts(spec.run)))


def _doubts(run: RunSpec) -> Iterator[str]:
    """The program gets its own modules, also where their names are those of ndctl's packages."""
    workdir = Path(run.workdir)
    folder = workdir if run.script is None else (workdir / run.script).parent
    if run.is_python and (spec := PathFinder.find_spec("ndctl", [str(folder)])):
        if spec.origin is None or (folder / "orchestrator" / "run_module.py").is_file():
            return  # a folder without Python files, or ndctl's own repository
        yield (
            f"run: `import ndctl` of the program gets {spec.origin}, as under `python`; to call"
            " ndctl.log and ndctl.checkpoint, rename that file"
        )


def _problems(run: RunSpec, environ: Mapping[str, str]) -> Iterator[Problem]:
    workdir = Path(run.workdir)
    if not workdir.is_dir():
        limit = "a folder that exists"
        fix = (
            f"mkdir -p {workdir}, or correct the path" if not workdir.exists() else "give a folder"
        )
        yield Problem(path="run.workdir", value=run.workdir, limit=limit, fix=fix)
        return
    if run.script is not None:
        yield from _script(run.script, run.args, workdir, environ)
    elif run.module is not None:
        yield from _module(run.module, workdir, environ)
    else:
        assert run.program is not None
        yield from _program(run.program, workdir, environ)


def _script(
    script: str, args: Sequence[str], workdir: Path, environ: Mapping[str, str]
) -> Iterator[Problem]:
    path = workdir / script
    limit = "a readable file of Python code"
    try:
        source = path.read_bytes()
    except OSError as exc:
        limit = f"{limit} ({path}: {exc.strerror})"
        fix = _script_fix(script, args, path, environ)
        yield Problem(path="run.script", value=script, limit=limit, fix=fix)
        return
    # Some manifests are also Python code: `kind: Job` is an annotation.
    text = source.decode("utf-8-sig", errors="replace")
    told = None if path.suffix == ".py" else foreign_text(text, path)
    if told is not None:
        yield Problem(path="run.script", value=script, limit=f"{limit} ({told[0]})", fix=told[1])
        return
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as exc:
        line = getattr(exc, "lineno", None)
        place = f"line {line}: " if line else ""
        said = getattr(exc, "msg", None) or str(exc)
        program = script if script.startswith("/") else f"./{script}"
        yield Problem(
            path="run.script",
            value=script,
            limit=f"{limit} ({place}{said})",
            fix=f"correct it, or start it as a program: {_typed('--no-python', program, *args)}, or"
            f" program: {program} in a spec",
        )


SUBMITTERS = ("sbatch", "salloc", "qsub", "bsub")
"""Commands that would submit another job from each rank."""


def _script_fix(script: str, args: Sequence[str], path: Path, environ: Mapping[str, str]) -> str:
    """The fix of a script that cannot be read."""
    if (fix := straight_quotes(script)) is not None:
        return fix
    # A command line, such as `torchrun train.py --lr 1`; spaces alone may belong to a path.
    first = PurePath(script.split(" ")[0])
    launcher = first.name if first.name in (*COMMANDS, "python", "python3") else ""
    if launcher or (first.suffix == ".py" and " " in script):
        without = f", without {launcher}" if launcher else ""
        return (
            f"write {run_of(f'{script} {shlex.join(args)}')}; ndctl starts it on each rank{without}"
        )
    if (fix := _command(script, args, environ)) is not None:
        return fix
    similar = sorted(one.name for one in path.parent.glob("*.py"))[:5]
    there = f"in {path.parent.absolute()} there are {', '.join(similar)}"
    return there if similar else "give its path: absolute, or from run.workdir"


def _command(name: str, args: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """What to type for the command `name` with its arguments, such as bash, or litgpt, which pip
    wrote as a Python script; None if there is no such command."""
    if name in SUBMITTERS:
        return f"give the program that the script of {name} starts: ndctl submits a job itself"
    found = shutil.which(name, path=environ.get("PATH")) if "/" not in name else None
    if found is None:
        return None
    try:
        compile(Path(found).read_bytes(), found, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        typed = _typed("--no-python", name, *args)
        return f"for the command {name}: {typed}, or program: {name} in a spec"
    return (
        f"for the command {name}, give its file: {_typed(found, *args)}, or script: {found} in a"
        " spec"
    )


def _typed(*words: str) -> str:
    """The words as a command line of a shell."""
    return shlex.join(["ndctl", "run", "--", *words])


def _module(module: str, workdir: Path, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Only the top-level package is searched. To search inside it, Python would import it."""
    top = module.partition(".")[0]
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [str(workdir), *(str(workdir / one) for one in given if one), *sys.path]
    if top not in sys.builtin_module_names and PathFinder.find_spec(top, folders) is None:
        limit = f"a module that Python finds ({top} is neither in {workdir.absolute()}, nor in"
        limit += " PYTHONPATH, nor installed)"
        fix = "set run.workdir to the folder that contains it, or install it"
        yield Problem(path="run.module", value=module, limit=limit, fix=fix)


def _program(program: str, workdir: Path, environ: Mapping[str, str]) -> Iterator[Problem]:
    path = str(workdir.absolute() / program) if "/" in program else program
    if shutil.which(path, path=environ.get("PATH")) is None:
        exists = "/" in program and Path(path).is_file()
        fix = (
            f"chmod +x {path}" if exists else "correct the name; ./NAME is in the working directory"
        )
        limit = "an executable file, or a name in PATH"
        yield Problem(path="run.program", value=program, limit=limit, fix=fix)
