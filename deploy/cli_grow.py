"""`longtail grow`: a model folder, and its drafter's, at a larger shape that computes the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from services.core.errors import ConfigError
from services.models.grow_files import GrowOptions, grow_drafter, grow_target, refuse_occupied

DTYPES = ("float32", "bfloat16")


def grow_model(
    source: Path, folder: Path, options: GrowOptions, drafter: Path | None, drafter_out: Path | None
) -> None:
    """Print what was written as JSON, one line a folder. The drafter is `source`'s; it goes to `folder`/drafter, where
    a run looks for it, unless `drafter_out` says otherwise."""
    if options.dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {options.dtype!r} must be one of {', '.join(DTYPES)}")
    if drafter_out is not None and drafter is None:
        raise ConfigError("--drafter-out says where to, but not which drafter to grow: give --drafter too")
    drafter_out = folder / "drafter" if drafter_out is None else drafter_out
    for out in (folder, drafter_out):
        refuse_occupied(out)
    if drafter is not None:  # first: what is wrong with it should show before gigabytes are written
        print(json.dumps(asdict(grow_drafter(drafter, drafter_out, source, options))))
    print(json.dumps(asdict(grow_target(source, folder, options))))
