"""Records to JSON lines and back.

JSON has no NaN or infinity, so a number that is not finite is written as null and its key is named in `not_finite`:
the file stays readable by every tool and the fact is not lost.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def _plain(value: Any, key: str, not_finite: list[str]) -> Any:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        not_finite.append(key)
        return None
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name), f.name, not_finite) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{key}.{k}" if key else str(k), not_finite) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v, key, not_finite) for v in value]
    return str(value)


def to_row(record: Any, **extra: Any) -> Row:
    """A flat JSON object of a dataclass or mapping, `extra` keys first."""
    not_finite: list[str] = []
    body = _plain(record, "", not_finite)
    assert isinstance(body, dict), "a record is a dataclass or a mapping"
    row = {**extra, **body}
    if not_finite:
        row["not_finite"] = sorted(set(not_finite))
    return row


def to_json(row: Row, indent: int | None = None) -> str:
    return json.dumps(row, indent=indent, allow_nan=False)


def write_atomic(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Row | None:
    """The object in `path`, or None when the file is missing or was cut off."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return loaded if isinstance(loaded, dict) else None


def read_lines(path: Path) -> tuple[list[Row], int]:
    """(rows, number of unreadable lines): a process killed while writing can leave one cut line at the end."""
    if not path.exists():
        return [], 0
    rows: list[Row] = []
    bad = 0
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            bad += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad += 1
    return rows, bad


def number(row: Mapping[str, Any], key: str) -> float | None:
    """`row[key]` as a finite float, or None."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
