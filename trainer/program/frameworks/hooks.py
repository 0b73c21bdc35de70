"""Adds ndctl to frameworks when a script has imported them, and imports none of them itself."""

from ndctl.rank.link import Link
from trainer.program.after_import import after_import
from trainer.program.frameworks import (
    last_checkpoint,
    lightning_trainer,
    torchtitan_trainer,
    transformers_trainer,
)


def add_to_frameworks(link: Link) -> None:
    """Only in a rank that ndctl has started."""
    if not link.active:
        return
    after_import("transformers.trainer_utils", last_checkpoint.skip_torn)
    after_import("transformers.trainer", transformers_trainer.add_to)
    for package in ("lightning.pytorch", "pytorch_lightning"):  # two names of one library
        after_import(f"{package}.trainer.trainer", lightning_trainer.add_to)
    after_import("torchtitan.trainer", torchtitan_trainer.add_to)
