"""Adds ndctl to frameworks when a script has imported them, and imports none of them itself."""

import functools
from types import ModuleType

from ndctl.rank.link import Link
from trainer.program.after_import import after_import


def add_to_frameworks(link: Link) -> None:
    """Only in a rank that ndctl has started."""
    if not link.active:
        return
    after_import("transformers.trainer_utils", _skip_torn_checkpoints)
    after_import("transformers.trainer", functools.partial(_add_to_transformers, link))


def _skip_torn_checkpoints(module: ModuleType) -> None:
    from trainer.program.frameworks.last_checkpoint import skip_torn

    skip_torn(module)


def _add_to_transformers(link: Link, module: ModuleType) -> None:
    from trainer.program.frameworks.transformers_trainer import add_to

    add_to(module, link)
