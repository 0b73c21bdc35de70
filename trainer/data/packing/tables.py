"""Documents out of Parquet files and of datasets that save_to_disk wrote.

Both are read a slice of rows at a time. The libraries are optional: the extra `data`.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.contract.files.data_files import File
from orchestrator.errors import TrainingError
from trainer.data.packing.documents import Columns, Piece, no_column, reading, row_pieces

ROWS = 1000
"""Rows that are held at a time."""


def read_parquet(file: File, columns: Columns) -> Iterator[Piece]:
    """A document per row."""
    parquet, arrow = needed("pyarrow.parquet", file.path), needed("pyarrow", file.path)
    with reading(file.path, arrow.ArrowException), parquet.ParquetFile(file.path) as table:
        check_columns(columns, table.schema_arrow.names, file.path)
        slices = (
            {name: part[name].to_pylist() for name in columns.names}
            for part in table.iter_batches(batch_size=ROWS, columns=columns.names)
        )
        yield from rows_of(slices, columns, file, table.metadata.num_rows)


def read_dataset(file: File, columns: Columns) -> Iterator[Piece]:
    """A document per row; only the rows at hand are in memory."""
    datasets, arrow = needed("datasets", file.path), needed("pyarrow", file.path)
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


def check_columns(columns: Columns, there: Sequence[str], path: str) -> None:
    for column in columns.names:
        if column not in there:
            raise no_column(column, list(there), path)


def needed(package: str, path: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as exc:
        raise TrainingError(
            f"{path} cannot be read without the package {package.partition('.')[0]}",
            fix="pip install 'ndctl[data]'",
        ) from exc
