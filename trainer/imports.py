"""Imports all that training needs, which takes seconds: in a rank itself, or once in a process that
ranks are forked from."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Let nobody import `package` meanwhile, unless it has been already.

    transformers imports torchao wherever it is installed: a second and several warnings at the
    start of every rank, for quantisers of its own that are not used here.
    """
    if package in sys.modules:
        yield
        return
    vars(sys)["modules"][package] = None
    try:
        yield
    finally:
        del sys.modules[package]


# Thousands of modules are about to be loaded, and none of them is garbage: looking for some would
# take a sixth longer, and later write to memory that forked ranks share.
gc.disable()
with hidden("torchao"):
    from trainer.main import main
gc.freeze()
gc.enable()

train = main
