"""Documents from Parquet files and saved datasets."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import TrainingError
from trainer.data.packing import tables
from trainer.data.packing.documents import Columns
from trainer.data.packing.files import find
from trainer.data.packing.sources import read_pieces

ROWS: dict[str, list[Any]] = {
    "text": ["one", "", "two"],
    "question": ["1?", "", "2?"],
    "n": [1, 2, 3],
}


def save_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path.with_suffix(".parquet"), row_group_size=2)


def save_dataset(path: Path, columns: dict[str, list[Any]]) -> None:
    datasets: Any = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(columns).save_to_disk(str(path))


Save = Callable[[Path, dict[str, list[Any]]], None]
tables_of_both_kinds = pytest.mark.parametrize("save", [save_parquet, save_dataset])


def read(folder: Path, *columns: str) -> list[tuple[str, bool, bool]]:
    found = find(str(folder / "*"), "auto", "data.files")
    pieces = read_pieces(found, Columns(*columns), utf8=True)
    return [(piece.text.decode(), piece.learned, piece.last) for piece in pieces]


@tables_of_both_kinds
def test_rows_are_documents(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS", 2)
    save(tmp_path / "table", ROWS)
    assert read(tmp_path, "text") == [("one", True, True), ("two", True, True)]
    assert read(tmp_path, "text", "question") == [
        ("1?", False, False),
        ("one", True, True),
        ("2?", False, False),
        ("two", True, True),
    ]


@tables_of_both_kinds
def test_an_unknown_column_is_reported_with_the_known_ones(tmp_path: Path, save: Save) -> None:
    save(tmp_path / "table", ROWS)
    with pytest.raises(TrainingError, match="no column 'body'; columns: 'text', 'question', 'n'"):
        read(tmp_path, "body")


@tables_of_both_kinds
def test_a_row_without_text_is_reported_with_its_number(tmp_path: Path, save: Save) -> None:
    save(tmp_path / "table", {"text": ["one", "two", None]})
    with pytest.raises(TrainingError, match=r"row 3: column 'text' holds None \(null\)"):
        read(tmp_path, "text")
    save(tmp_path / "table", ROWS)
    with pytest.raises(TrainingError, match=r"row 1: column 'n' holds 1 \(int\), not a string"):
        read(tmp_path, "n")


def test_files_of_unknown_formats_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(TrainingError, match=r"failed to read .*a\.parquet"):
        read(tmp_path, "text")
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "state.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"failed to read .*/a: "):
        read(tmp_path, "text")


def test_a_missing_package_is_reported_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_all_but_one(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name)
        return importing(name, *rest)

    importing = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", import_all_but_one)
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(TrainingError, match="needs the package pyarrow") as told:
        read(tmp_path, "text")
    assert told.value.fix == "pip install 'ndctl[data]'"
