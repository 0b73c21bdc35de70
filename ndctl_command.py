"""The command `ndctl`, from the packages beside this file.

PYTHONPATH comes before installed packages, and `PYTHONPATH=.` is common. So a folder `orchestrator`
of the user would be imported in place of ndctl's. This module has a name that nobody else uses, and
imports the packages by path. It does so when it is imported, as worker processes of `ndctl
simulate` do.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def _load_packages() -> None:
    path = Path(__file__).resolve().parent / "orchestrator" / "run_module.py"
    spec = spec_from_file_location("orchestrator.run_module", path)
    assert spec is not None
    assert spec.loader is not None
    run_module = module_from_spec(spec)
    spec.loader.exec_module(run_module)
    run_module.load_packages(run_module.OF_COMMANDS)
    sys.modules["orchestrator.run_module"] = run_module


_load_packages()

from orchestrator.cli import main  # noqa: E402 (after the packages are loaded)

__all__ = ["main"]

if __name__ == "__main__":
    main()
