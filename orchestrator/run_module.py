"""Runs a module as a program, from the copy of ndctl that this file belongs to.

    python -P …/orchestrator/run_module.py MODULE [ARGUMENT …]

`python -m MODULE` looks into the working directory first. A job is submitted where its user works,
and a `trainer.py` that lies there would be trained instead of ours, and a `torch.py` imported.
With `-P` the working directory is not searched, and `orchestrator` and `trainer` are those beside
this file, whatever else is installed under these names. PYTHONPATH is the user's own and stays.
"""

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

FLAGS = ("-P", __file__)
"""What stands between the interpreter and the module."""


def command(python: str, module: str) -> list[str]:
    """How `module` is started as a program on this machine."""
    return [python, *FLAGS, module]


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
    here = Path(__file__).resolve().parent
    for name in (here.name, "trainer"):
        _load(here.parent / name)
    del sys.argv[0]  # as `python -m` would have it: the module is the program
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
