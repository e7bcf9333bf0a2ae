"""Rows of prompt sets on disk, read one at a time: a row is either the object it holds or the reason why it cannot be
read. JSONL is read as bytes, so that one bad byte costs one line and not the file; Parquet strings likewise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from services.core.errors import DataError

UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
PARQUET_COLUMNS = ("prompt", "answer", "task", "meta")
BATCH_ROWS = 4096

Row = dict[str, Any] | str  # the object, or why there is none


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(line, row) from a .jsonl or .parquet file; lines (rows, in Parquet) count from 1.

    Raises DataError when the file as a whole cannot be read.
    """
    readers = {".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows, ".parquet": _parquet_rows, ".pq": _parquet_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown kind of prompt set: name it .jsonl or .parquet")
    if not path.is_file():
        raise DataError(f"{path} is not a file: check data.source.path")
    try:
        yield from reader(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):  # splits at \n only: other line ends may stand inside strings
            yield line, _json_row(raw)


def _json_row(raw: bytes) -> Row:
    if raw.startswith(UTF8_BOM):
        return "starts with a byte order mark (BOM): save the file as UTF-8 without one"
    if raw.startswith(UTF16_BOMS):
        return "starts with a UTF-16 byte order mark (BOM): save the file as UTF-8"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start + 1} of the line"
    if not text.strip():
        return "empty line"
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        return "bad JSON: nested too deeply"
    except ValueError as error:  # JSONDecodeError, NaN, integers beyond the interpreter's digit limit
        return f"bad JSON: {error}"
    return value if isinstance(value, dict) else f"not an object but {_kind(value)}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if not {"prompt", "answer"} <= set(names):
            raise DataError(f"{path} has the columns {names}: a prompt set needs 'prompt' and 'answer'")
        present = [name for name in PARQUET_COLUMNS if name in names]
        line = 0
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=present):
            columns = {name: _as_bytes(batch.column(name)) for name in present}
            for index in range(batch.num_rows):
                line += 1
                yield line, _parquet_row(columns, index)


def _as_bytes(column: pa.Array) -> tuple[pa.Array, bool]:
    """Text columns as bytes, to be decoded row by row: pyarrow does not check UTF-8, and fails per column."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary()), True
    return column, False


def _parquet_row(columns: dict[str, tuple[pa.Array, bool]], index: int) -> Row:
    row: dict[str, Any] = {}
    for name, (column, is_text) in columns.items():
        try:
            value = column[index].as_py()
            row[name] = value.decode("utf-8") if is_text and value is not None else value
            if name == "meta" and is_text and value is not None:
                row[name] = json.loads(row[name])  # Parquet has no free-form objects, so meta may be JSON text
        except UnicodeDecodeError as error:
            return f"invalid UTF-8 in {name} at byte {error.start + 1}"
        except ValueError as error:
            return f"meta holds bad JSON: {error}"
    return row
