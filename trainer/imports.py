"""Imports all modules that training needs. This takes seconds, so an agent can import this module
once in a fork server instead of once per rank."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from trainer.model.known_names import remembered_names, user_cache


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Make imports of `package` fail inside, unless it is already imported.

    transformers imports torchao if it is installed, for quantisers that the trainer does not use.
    That costs each rank a second and prints several warnings.
    """
    if package in sys.modules:
        yield
        return
    vars(sys)["modules"][package] = None
    try:
        yield
    finally:
        del sys.modules[package]


# The imports load thousands of modules and leave no garbage. Garbage collection would make them one
# sixth slower, and would later write to memory pages that forked ranks share.
gc.disable()
with hidden("torchao"), remembered_names(user_cache(os.environ)):  # noqa: TID251 (an entry point)
    from trainer.main import main
    from trainer.model.families import FAMILIES

    # transformers itself imports the code of a model only when one is built.
    for family in FAMILIES:
        import_module(f"transformers.models.{family}.modeling_{family}")
gc.freeze()
gc.enable()

train = main
