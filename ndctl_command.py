"""The command `ndctl`, from the packages beside this file.

PYTHONPATH comes before installed packages, and `PYTHONPATH=.` is common. So a folder `orchestrator`
of the user would be imported in place of ndctl's. This module has a name that nobody else uses, and
imports the packages by path. It does so when it is imported, as worker processes of `ndctl
simulate` do.
"""

import os
import signal
import sys

EXIT_INTERRUPTED = 130
"""As `orchestrator.contract.files.exit_codes`, which is not imported yet."""


def _exit(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)


# Ctrl-C before the command runs: no traceback of an import. `main` handles it from then on. A shell
# may have set it to be ignored.
ON_INTERRUPT = signal.getsignal(signal.SIGINT)
if ON_INTERRUPT is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit)

from importlib.util import module_from_spec, spec_from_file_location  # noqa: E402
from pathlib import Path  # noqa: E402


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

signal.signal(signal.SIGINT, ON_INTERRUPT)

__all__ = ["main"]

if __name__ == "__main__":
    main()
