"""Gives the names of ndctl's packages back to the user's program.

This process has imported `orchestrator`, `trainer` and `ndctl`. The user may have modules of these
names: a `trainer.py` beside the script is common. The program must get its own, as under `python`.
So all modules of ndctl leave `sys.modules` before the program starts. They keep each other by
reference, and import nothing of `orchestrator` and `trainer` later. If the program has no module of
the name, `import ndctl` gives it the modules that were there before, with their state.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES = frozenset({"orchestrator", "trainer", "ndctl"})
MARK = Path("orchestrator", "run_module.py")
"""A folder with this file has the packages of ndctl, in whichever version."""


def give_back_names() -> None:
    """Take ndctl's modules out of `sys.modules`. Their names are then found in the program's search
    path, in which ndctl comes last."""
    own = {name: one for name, one in sys.modules.items() if top_of(name) in NAMES}
    for name in own:
        del sys.modules[name]
        # `inspect` remembers the file of each name. It raises for a user's folder of this name that
        # has no `__init__.py`: the module's file is None, which is not the remembered one.
        vars(inspect).get("_filesbymodname", {}).pop(name, None)
    sys.meta_path.insert(0, _Finder(own))


def top_of(name: str) -> str:
    return name.partition(".")[0]


class _Finder(MetaPathFinder):
    def __init__(self, own: Mapping[str, ModuleType]) -> None:
        self.own = own

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = top_of(name)
        if top not in NAMES:
            return None
        if name == top:
            others = [one for one in sys.meta_path if one is not self]
            if (found := users_module(name, sys.path, others)) is not None:
                return found
        elif sys.modules.get(top) is not self.own.get(top):
            return None  # a submodule of the user's package
        module = self.own.get(name)
        if module is None:
            return None  # a submodule that was not imported before; its parent tells where it is
        assert module.__spec__ is not None
        return ModuleSpec(
            name, _Given(module), is_package=module.__spec__.submodule_search_locations is not None
        )


class _Given(Loader):
    """Gives a module that was imported before."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import has replaced it


def users_module(name: str, folders: Iterable[str], finders: Iterable[Any]) -> ModuleSpec | None:
    """The first module `name` that is not ndctl's. None: there is none.

    A folder without `__init__.py` counts, also before an installed ndctl: Python itself would
    prefer the installed package.
    """
    bare: list[str] = []
    for folder in folders:
        spec = PathFinder.find_spec(name, [folder])
        if spec is None or _is_of_ndctl(spec):
            continue
        if spec.loader is not None and spec.origin is not None:
            return spec
        bare.append(folder)
    for spec in _elsewhere(name, finders):
        if not _is_of_ndctl(spec):
            return spec
    return PathFinder.find_spec(name, bare) if bare else None


def _elsewhere(name: str, finders: Iterable[Any]) -> Iterator[ModuleSpec]:
    """Found by other finders, for example those of editable installs."""
    for finder in finders:
        if finder in (BuiltinImporter, FrozenImporter, PathFinder):
            continue
        spec = finder.find_spec(name, None, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            yield spec


def _is_of_ndctl(spec: ModuleSpec) -> bool:
    homes = (Path(one).parent for one in spec.submodule_search_locations or ())
    return any((home / MARK).is_file() for home in homes)
