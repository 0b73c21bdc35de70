"""Calls a function when a module has been imported, now or later."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call `call` with the module `name`: now if it is imported already, else after its import."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    """Finds one module as Python does, with a loader that also makes the call."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self.name, self.call = name, call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.call)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, call: Callable[[ModuleType], None]) -> None:
        self.loader, self.call = loader, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Code that asks for the module's loader, such as pkgutil, gets the real one.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.call(module)
