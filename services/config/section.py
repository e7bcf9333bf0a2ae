"""What every section of the configuration has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} would mean another folder in each process: give an absolute path")
    return path


# A folder that processes on several machines look into.
SharedFolder = Annotated[Path, AfterValidator(_absolute)]
