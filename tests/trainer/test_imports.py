"""Imports of each rank are fast: optional packages are hidden from them, and the names of
transformers are remembered."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import import_utils

from trainer.imports import hidden
from trainer.model.known_names import remembering, user_cache

# Without its own memory, because transformers changes the answer that it remembers.
define_import_structure = import_utils.define_import_structure.__wrapped__
MODELS = Path(sys.modules["transformers"].__file__ or "").parent / "models"
PROGRAM = """
import sys
from pathlib import Path
from trainer.model.known_names import remembered_names
with remembered_names(Path(sys.argv[1])):
    import transformers
    import transformers.models
print(*dir(transformers), *dir(transformers.models))
"""


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


def test_names_are_read_once_and_are_those_of_transformers(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "names.json"
    calls: list[str] = []

    def learn(*asked: object) -> object:
        calls.append(str(asked[0]))
        return define_import_structure(*asked)

    for _ in range(2):
        names = remembering(learn, MODELS, file)  # type: ignore[arg-type]
        assert names(MODELS, prefix="models") == define_import_structure(MODELS, prefix="models")
        assert names(str(MODELS / "__init__.py")) == define_import_structure(MODELS)
        inner = str(MODELS / "llama" / "__init__.py")
        assert names(inner) == define_import_structure(inner)
    assert calls == [str(MODELS), inner, inner]
    assert [path.name for path in file.parent.iterdir()] == ["names.json"]


@pytest.mark.parametrize("text", ["", "[", "[1]", '[[["torch"], 3]]', '{"a": 1}'])
def test_a_damaged_file_is_written_again(text: str, tmp_path: Path) -> None:
    file = tmp_path / "names.json"
    file.write_text(text)
    found = {frozenset(("torch",)): {"llama.modeling_llama": {"LlamaModel"}}}
    assert remembering(lambda *_: found, MODELS, file)(MODELS) == found

    def must_not_learn(*_: object) -> object:
        raise AssertionError

    assert remembering(must_not_learn, MODELS, file)(MODELS) == found  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = {frozenset[str](): {"llama": {"LlamaModel"}}}
    names = remembering(lambda *_: found, MODELS, tmp_path / "file" / "names.json")
    assert names(MODELS, "models") == {frozenset(): {"models.llama": {"LlamaModel"}}}


@pytest.mark.process
def test_transformers_has_the_same_names_with_and_without_a_file(tmp_path: Path) -> None:
    learned = _import_in_a_process(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace('"LlamaModel"', '"LlamaModelOfTheFile"'))
    remembered = _import_in_a_process(tmp_path)
    assert {"LlamaModel", "GPT2Config", "AutoConfig", "pipeline"} <= learned
    assert learned ^ remembered == {"LlamaModel", "LlamaModelOfTheFile"}


def _import_in_a_process(cache: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cache)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return set(done.stdout.split())


def test_the_cache_is_in_the_folder_that_the_user_chose() -> None:
    assert user_cache({"XDG_CACHE_HOME": "/scratch/me"}) == Path("/scratch/me/ndctl")
    for ignored in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert user_cache(ignored) == Path.home() / ".cache" / "ndctl"
