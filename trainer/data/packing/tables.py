"""Reads documents from Parquet files and from datasets that `save_to_disk` wrote.

Both are read in slices of rows. The libraries are optional (the extra `data`).
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.contract.files.data_files import File
from orchestrator.errors import TrainingError
from trainer.data.packing.documents import Columns, Piece, no_column, reading, row_pieces

ROWS = 1000
"""Rows in memory at a time."""


def read_parquet(file: File, columns: Columns) -> Iterator[Piece]:
    """One document per row."""
    parquet, arrow = (
        import_optional("pyarrow.parquet", file.path),
        import_optional("pyarrow", file.path),
    )
    with reading(file.path, arrow.ArrowException), parquet.ParquetFile(file.path) as table:
        check_columns(columns, table.schema_arrow.names, file.path)
        slices = (
            {name: part[name].to_pylist() for name in columns.names}
            for part in table.iter_batches(batch_size=ROWS, columns=columns.names)
        )
        yield from rows_of(slices, columns, file, table.metadata.num_rows)


def read_dataset(file: File, columns: Columns) -> Iterator[Piece]:
    """One document per row; only one slice is in memory."""
    datasets, arrow = import_optional("datasets", file.path), import_optional("pyarrow", file.path)
    with reading(file.path, arrow.ArrowException, ValueError):
        table = datasets.load_from_disk(file.path, keep_in_memory=False)
    check_columns(columns, table.column_names, file.path)
    slices = table.select_columns(columns.names).with_format(None).iter(batch_size=ROWS)
    yield from rows_of(slices, columns, file, len(table))


def rows_of(
    slices: Iterator[Mapping[str, Sequence[Any]]], columns: Columns, file: File, num_rows: int
) -> Iterator[Piece]:
    number = 0
    for part in slices:
        for values in zip(*(part[name] for name in columns.names), strict=True):
            number += 1
            row = dict(zip(columns.names, values, strict=True))
            where = f"{file.path}: row {number}"
            yield from row_pieces(row, columns, where, file.size / num_rows)


def check_columns(columns: Columns, existing: Sequence[str], path: str) -> None:
    for column in columns.names:
        if column not in existing:
            raise no_column(column, list(existing), path)


def import_optional(package: str, path: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as exc:
        raise TrainingError(
            f"reading {path} needs the package {package.partition('.')[0]}",
            fix="pip install 'ndctl[data]'",
        ) from exc
