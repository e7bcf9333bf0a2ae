"""A folder of drafters that were found better while they were served, which all servers of the model see.

    ROOT/policy-12-1f0c9a3b7d2e/drafter-10/{config.json,model.safetensors,README.md}

Each is a drafter folder as `longtail serve --drafter` takes it. A version appears as a whole and once: who comes second
with the same number is told so. Versions of other policies lie apart, told by their small tensors.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from torch import Tensor

from services.drafter.export import write_drafter_folder
from services.drafter.state import read_drafter
from services.models.drafter import DrafterMethod
from services.weights.learning import NewDrafter

PREFIX = "drafter-"
KEPT = 3  # versions of a policy: somebody may be reading the last but one


def policy_mark(policy: Mapping[str, Tensor]) -> str:
    """The same for the same weights, from the norms and biases alone: an optimizer step changes those as well."""
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(policy):
        if policy[name].dim() == 1:
            digest.update(name.encode() + policy[name].detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


class Shelf:
    """The versions of one policy."""

    def __init__(self, root: Path, method: DrafterMethod, target_config: Mapping[str, Any], policy: str) -> None:
        self._folder = root / policy
        self._method, self._target_config = method, target_config

    def put(self, drafter: NewDrafter, total_steps: int) -> bool:
        """False when there is such a version already, or a newer one. Raises OSError."""
        if max(self._versions(), default=-1) >= drafter.version:
            return False
        place = self._folder / f"{PREFIX}{drafter.version}"
        partial = self._folder / f".partial-{token_hex(4)}"
        try:
            write_drafter_folder(drafter.tensors, self._method, self._target_config, partial, total_steps)
            if not self._moved(partial, place):
                return False
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        for old in sorted(self._versions())[:-KEPT]:
            shutil.rmtree(self._folder / f"{PREFIX}{old}", ignore_errors=True)
        return True

    @staticmethod
    def _moved(partial: Path, place: Path) -> bool:
        """Renaming to a folder that has something in it fails: of several who try, one succeeds."""
        try:
            os.rename(partial, place)
        except OSError:
            if place.is_dir():
                return False
            raise
        return True

    def newer(self, version: int) -> NewDrafter | None:
        """The newest above `version`. Raises DataError and WeightError for one that cannot be loaded."""
        newest = max(self._versions(), default=version)
        if newest <= version:
            return None
        return NewDrafter(newest, read_drafter(self._folder / f"{PREFIX}{newest}", self._method))

    def _versions(self) -> list[int]:
        names = [place.name.removeprefix(PREFIX) for place in self._folder.glob(f"{PREFIX}*")]
        return [int(name) for name in names if name.isdigit()]
