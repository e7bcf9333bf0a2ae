"""The configuration as it travels into the cluster: a ConfigMap, in which every path lies on the volume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.k8s.pods import CACHE, DATA, RUN_METRICS, TMP
from services.config.schema import ClusterConfig, FileData
from services.core.errors import ConfigError


def cluster_config(config: ClusterConfig) -> ClusterConfig:
    """`config` for the pods: on the cluster's Ray, actors by role, files on the volume. Raises ConfigError for folders
    that pods cannot write to."""
    _check_folders(config)
    values: dict[str, Any] = config.model_dump(mode="json")
    values["placement"] |= {"address": "auto", "role_labels": True}
    values["coordinator"]["metrics"] = {"host": "0.0.0.0", "port": RUN_METRICS}  # for the PodMonitors
    values["run"]["dir"] = f"{DATA}/runs"
    if config.model.path != "pocket":
        values["model"]["path"] = _on_volume(config.model.path)
    if isinstance(config.data.source, FileData):
        values["data"]["source"]["path"] = _on_volume(str(config.data.source.path))
    return ClusterConfig.model_validate(values)


def _check_folders(config: ClusterConfig) -> None:
    """The root file system is read-only; what every slot must see lies on the volume."""
    folders = (
        ("drafter.checkpoint_dir", config.drafter.checkpoint_dir, (DATA,)),
        ("drafter.spill_dir", config.drafter.spill_dir, (DATA, CACHE, TMP)),
    )
    for key, folder, places in folders:
        if folder is not None and not any(folder.is_relative_to(place) for place in places):
            raise ConfigError(f"{key} {folder} is not writable in a pod: name a folder under {' or '.join(places)}")


def moved_paths(config: ClusterConfig) -> list[tuple[str, str]]:
    """(path in the configuration, path in the pods) of what somebody has to copy to the volume."""
    moved = cluster_config(config)
    pairs = [(config.model.path, moved.model.path)]
    if isinstance(config.data.source, FileData) and isinstance(moved.data.source, FileData):
        pairs.append((str(config.data.source.path), str(moved.data.source.path)))
    return [(a, b) for a, b in pairs if a != b]


def _on_volume(path: str) -> str:
    """A relative path keeps its parts; an absolute one is taken as the cluster's own."""
    return path if Path(path).is_absolute() else f"{DATA}/{Path(path).as_posix()}"
