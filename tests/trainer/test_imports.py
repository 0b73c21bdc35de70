"""Optional packages are hidden from imports of the trainer, so that they do not slow each rank."""

import importlib
import sys

import pytest

from trainer.imports import hidden


def test_a_hidden_package_cannot_be_imported() -> None:
    sys.modules.pop("this", None)
    with hidden("this"):
        assert importlib.util.find_spec("this") is None
        with pytest.raises(ImportError):
            importlib.import_module("this")
    assert importlib.util.find_spec("this") is not None


def test_a_package_that_was_already_imported_stays() -> None:
    with hidden("json"):
        assert importlib.import_module("json") is sys.modules["json"]
    assert "json" in sys.modules
