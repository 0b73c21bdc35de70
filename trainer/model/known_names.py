"""Remembers which names the modules of transformers define.

transformers makes its names available without importing its modules. To learn the names it reads
its 1,600 model files when it is imported, and reads them twice. That takes a third of the time of
all imports of the trainer, and on a shared file system every host of a job reads them. An installed
release never changes, so the answer is kept in a file of the user's cache.
"""

import contextlib
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.read_json import read_json

LEARNS_NAMES = "transformers.utils.import_utils"
"""The module of transformers with the function `define_import_structure`."""
INSTALLED = ("site-packages", "dist-packages")
"""A folder with such a parent holds a release. Files of a checkout may change, so its names are
read each time."""

Names = dict[frozenset[str], dict[str, set[str]]]
"""Optional packages that modules need -> module -> its public names."""
Learn = Callable[..., Names]


@contextmanager
def remembered_names(cache: Path | None) -> Iterator[None]:
    """Imports of transformers inside read its names from the folder `cache`, or write them there.

    Nothing changes if `cache` is None, if transformers is already imported, or if a release of
    transformers has no such function.
    """
    if cache is None or LEARNS_NAMES in sys.modules:
        yield
        return
    finder = _Finder(cache)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # it has removed itself
            sys.meta_path.remove(finder)


def user_cache(environ: Mapping[str, str]) -> Path | None:
    """The folder for ndctl's files in the user's cache; None: the user has no home."""
    try:
        chosen = Path(environ.get("XDG_CACHE_HOME", ""))
        base = chosen if chosen.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "ndctl"


class _Finder(MetaPathFinder):
    """Changes the loader of one module, once."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != LEARNS_NAMES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.cache)
        return spec


class _Loader(Loader):
    """Loads the module as `loader` does, then replaces its function."""

    def __init__(self, loader: Loader, cache: Path) -> None:
        self.loader = loader
        self.cache = cache

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        learn = getattr(module, "define_import_structure", None)
        version = getattr(sys.modules["transformers"], "__version__", None)
        models = Path(module.__file__ or "").parents[1] / "models"
        if learn and version and models.parents[1].name in INSTALLED:
            file = self.cache / f"{_name(models, version)}.json"
            vars(module)["define_import_structure"] = remembering(learn, models, file)


def _name(models: Path, version: str) -> str:
    """Two environments of a user may hold the same release with other files."""
    return f"transformers-{version}-{zlib.crc32(os.fsencode(models)):08x}"


def remembering(learn: Learn, models: Path, file: Path) -> Learn:
    """`learn`, whose answer for the folder `models` is kept in `file`."""

    def define_import_structure(module_path: str | Path, prefix: str | None = None) -> Names:
        path = Path(module_path)
        if models not in (path, path.parent) or path.name not in (models.name, "__init__.py"):
            return learn(module_path, prefix)
        names = _read(file)
        if names is None:
            names = learn(str(models))
            # Without a cache, the next process reads the files again.
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, json.dumps(_listed(names)).encode())
        if prefix is None:
            return names
        return {
            needs: {f"{prefix}.{module}": defined for module, defined in modules.items()}
            for needs, modules in names.items()
        }

    return define_import_structure


def _listed(names: Names) -> list[list[object]]:
    return [
        [sorted(needs), {module: sorted(defined) for module, defined in modules.items()}]
        for needs, modules in names.items()
    ]


def _read(file: Path) -> Names | None:
    """None: there is no such file, or it is damaged."""
    try:
        return {
            frozenset(needs): {module: set(defined) for module, defined in modules.items()}
            for needs, modules in read_json(file.read_text())
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return None
