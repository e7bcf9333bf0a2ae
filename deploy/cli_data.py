"""`longtail data check`: every bad row of a prompt set, with the tokenizer, template and limits of a configuration."""

from __future__ import annotations

from pathlib import Path

from services.config.schema import ClusterConfig, FileData
from services.core.errors import ConfigError, DataError
from services.data.files import check_file
from services.models.tokenizer import load_tokenizer


def check(file: Path, config: ClusterConfig, mode: str | None) -> None:
    """Print bad rows and the count. Raises DataError when a run with this file would not start."""
    source = config.data.source
    mode = mode or (source.on_bad_row if isinstance(source, FileData) else "strict")
    if mode not in ("strict", "skip"):
        raise ConfigError(f"--mode {mode!r} must be strict or skip")
    data = config.data
    result = check_file(file, load_tokenizer(config.model.path), data.max_prompt_tokens, data.chat_template)
    for bad in result.bad:
        print(f"{file}:{bad.line}: {bad.reason}")
    good = result.rows - len(result.bad)
    print(f"{file}: {result.rows} rows, {good} usable, {len(result.bad)} bad")
    if not good:
        raise DataError(f"{file} holds no usable prompt")
    if result.bad and mode == "strict":
        raise DataError(f"{len(result.bad)} bad rows: fix them, or leave them out with data.source.on_bad_row=skip")
