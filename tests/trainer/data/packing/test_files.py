"""Which files a glob selects, and their format."""

import os
import sysconfig
from pathlib import Path

import pytest

from orchestrator.contract.files.data_files import Format
from orchestrator.errors import TrainingError
from tests.trainer.data.data_files import write_texts
from trainer.data.packing.files import find


def test_stdlib_selects_pythons_library_without_installed_packages() -> None:
    stdlib = sysconfig.get_paths()["stdlib"]
    found = [file.path for file in find("{stdlib}/**/*.py", "auto", "data.files").files]
    assert found == sorted(found)
    assert f"{stdlib}/json/decoder.py" in found
    assert not any("-packages/" in path for path in found)


@pytest.mark.parametrize(
    ("name", "format_"),
    [("a.txt", "text"), ("a.jsonl", "jsonl"), ("a.parquet", "parquet"), ("a.tokens", "tokens")],
)
def test_the_format_follows_from_the_file_name(tmp_path: Path, name: str, format_: Format) -> None:
    (tmp_path / name).write_text("x")
    assert find(str(tmp_path / "*"), "auto", "data.files").format == format_


def test_a_given_format_overrides_file_names(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("x")
    (tmp_path / "b.txt").write_text("x")
    found = find(str(tmp_path / "*"), "text", "data.files")
    assert (found.format, len(found.files)) == ("text", 2)


def test_files_of_several_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("x")
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(TrainingError, match="several formats: jsonl, text"):
        find(str(tmp_path / "*"), "auto", "data.files")


def test_empty_files_are_skipped(tmp_path: Path) -> None:
    files = write_texts(tmp_path, "", "")
    with pytest.raises(TrainingError, match=r"data.validation.files '.*' matches no file"):
        find(files, "auto", "data.validation.files")


def test_a_folder_is_a_dataset_or_is_ignored(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="it is a folder: add"):
        find(str(tmp_path), "auto", "data.files")
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text("{}")
    found = find(str(tmp_path / "train"), "auto", "data.files")
    assert (found.format, found.size) == ("dataset", 2)
    with pytest.raises(TrainingError, match=r"a folder of splits \(test, train\)"):
        find(str(tmp_path), "auto", "data.files")


def test_a_broken_link_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TrainingError, match=r"a\.txt, which cannot be read: No such file"):
        find(str(tmp_path / "*.txt"), "auto", "data.files")


def test_held_out_files_are_excluded_with_any_name(tmp_path: Path) -> None:
    files = write_texts(tmp_path, "a", "b", "c")
    other = tmp_path / "held-out.txt"
    os.link(tmp_path / "1.txt", other)
    other.rename(tmp_path / "held-out.text")
    held_out = find(str(tmp_path / "held-out.text"), "auto", "data.validation.files")
    rest = find(files, "auto", "data.files").without(held_out)
    assert [Path(file.path).name for file in rest.files] == ["0.txt", "2.txt"]
