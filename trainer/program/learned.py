"""Remembers which modules a script had imported at its first step, so that hosts import them once.

The list is in `imports.json` of the run directory. The user's own modules are not on it: they may
be changed between two attempts.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.env import RUN_DIR, RankEnv
from orchestrator.contract.files.run_dir import RunDir
from trainer.program.names import NAMES, top_of


def remember_imports() -> None:
    """Write the list, if this is rank 0 and there is none."""
    environ = os.environ  # noqa: TID251 (the script's process has no other place for its environment)
    env = RankEnv.from_mapping(environ)
    if env.rank != 0 or RUN_DIR not in environ:
        return
    path = RunDir(Path(environ[RUN_DIR])).learned_imports
    with contextlib.suppress(OSError):  # restarts are then slower
        if not path.exists():
            names = installed(sys.modules, site_folders(sys.path))
            write_whole(path, json.dumps(names, indent=0).encode())


def site_folders(search: Iterable[str]) -> tuple[str, ...]:
    """Folders of installed packages. Editable installs of the user are not among them."""
    return tuple(one for one in search if Path(one).name in ("site-packages", "dist-packages"))


def installed(modules: Mapping[str, ModuleType], folders: tuple[str, ...]) -> list[str]:
    """Names of the modules that are files in `folders`, in the order of their import.

    In a host's fork server, the names of ndctl's packages are ndctl's.
    """
    return [
        name
        for name, module in list(modules.items())
        if name != "__main__"
        and top_of(name) not in NAMES
        and str(getattr(module, "__file__", None) or "").startswith(folders)
    ]
