"""A version of a framework that ndctl does not know trains as without ndctl."""

from collections.abc import Callable
from types import ModuleType

import pytest

from trainer.program.frameworks import lightning_trainer, torchtitan_trainer, transformers_trainer

FRAMEWORKS = [
    ("transformers.trainer", transformers_trainer.add_to),
    ("lightning.pytorch.trainer.trainer", lightning_trainer.add_to),
    ("torchtitan.trainer", torchtitan_trainer.add_to),
]


@pytest.mark.parametrize(("name", "add_to"), FRAMEWORKS)
def test_a_trainer_without_the_known_methods_is_left_alone_and_named(
    name: str, add_to: Callable[[ModuleType], None], capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType(name)
    trainer = type("Trainer", (), {})
    module.Trainer = trainer  # type: ignore[attr-defined]
    before = dict(vars(trainer))
    add_to(module)
    assert vars(trainer) == before
    said = capsys.readouterr().err
    assert name.partition(".")[0] in said
    assert "ndctl counts optimizer steps alone" in said
