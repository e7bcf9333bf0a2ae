"""SmolLM2-135M-Instruct where it was made: the tests of a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "models" / "smollm2-135m"
needs_smollm2 = pytest.mark.skipif(
    not (FOLDER / "config.json").is_file(), reason=f"{FOLDER.name} is not there: run `make smollm2`"
)
