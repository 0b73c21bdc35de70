"""Runs a module as a program, from the copy of ndctl that this file belongs to.

    python -P …/orchestrator/run_module.py MODULE [ARGUMENT …]

`python -m MODULE` searches the working directory first. A user may submit a job from a folder that
has a `trainer.py` or `torch.py`, which would then be run or imported. With `-P` the working
directory is not searched, and `orchestrator`, `trainer` and `ndctl` are the packages beside this
file, whatever else is installed under these names. PYTHONPATH is left as the user set it.
"""

import runpy
import sys
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

FLAGS = ("-P", __file__)
"""Arguments between the interpreter and the module."""


PACKAGES = ("orchestrator", "trainer", "ndctl")
"""The packages of ndctl."""
OF_COMMANDS = ("orchestrator", "ndctl")
"""Those that the command line needs. `ndctl doctor` must work although another distribution has
overwritten `trainer`."""


def command(python: str, module: str) -> list[str]:
    """The command that starts `module` as a program on this machine."""
    return [python, *FLAGS, module]


def load_packages(names: Iterable[str] = PACKAGES) -> None:
    """Import ndctl's packages from beside this file, so that other packages of these names are not
    found. Packages that are imported already stay."""
    here = Path(__file__).resolve().parent
    for name in names:
        if name not in sys.modules:
            _load(here.parent / name)


def _load(package: Path) -> None:
    folders = [str(package)]
    spec = spec_from_file_location(
        package.name, package / "__init__.py", submodule_search_locations=folders
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[package.name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[package.name])


if __name__ == "__main__":
    load_packages()
    del sys.argv[0]  # as with `python -m`: the module sees its own name and arguments
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
