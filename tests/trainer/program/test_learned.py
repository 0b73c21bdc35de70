"""Which modules of a script a host imports once for later attempts."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.contract.files.run_dir import RunDir
from trainer.program.learned import installed, remember_imports, site_folders


def module(name: str, file: str | None) -> ModuleType:
    made = ModuleType(name)
    made.__file__ = file
    return made


def test_only_installed_modules_are_learned_in_the_order_of_their_import() -> None:
    search = [
        "/home/ann",
        "/env/lib/python3.11",
        "/env/lib/python3.11/site-packages",
        "/d/dist-packages",
    ]
    folders = site_folders(search)
    assert folders == ("/env/lib/python3.11/site-packages", "/d/dist-packages")
    modules = {
        "__main__": module("__main__", "/env/lib/python3.11/site-packages/torchrun.py"),
        "json": module("json", "/env/lib/python3.11/json/__init__.py"),
        "torch._C": module("torch._C", "/env/lib/python3.11/site-packages/torch/_C.so"),
        "mine": module("mine", "/home/ann/mine.py"),
        "made": module("made", None),
        "yaml": module("yaml", "/d/dist-packages/yaml/__init__.py"),
        "sys": sys,
    }
    assert installed(modules, folders) == ["torch._C", "yaml"]
    assert installed(modules, ()) == []


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_writes_the_list_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("NDCTL_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("NDCTL_ATTEMPT", "1")
    remember_imports()
    path = RunDir(tmp_path).learned_imports
    assert path.exists() == (rank == "0")
    if rank == "0":
        assert "pytest" in json.loads(path.read_text())
        path.write_text("[]")
        remember_imports()
        assert path.read_text() == "[]"


def test_a_list_that_cannot_be_written_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDCTL_RUN_DIR", str(tmp_path / "gone"))
    monkeypatch.setenv("RANK", "0")
    remember_imports()
    assert not (tmp_path / "gone").exists()
