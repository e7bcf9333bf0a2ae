"""What a rendering is told beside the configuration, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.core.errors import ConfigError

# DNS-1035, and short enough for the names that the operator makes of it.
_RUN_ID = re.compile(r"^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$")
_DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_IMAGE_NAME = re.compile(r"^(?P<name>[^\s@]+?)(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?$")


OVERLAYS = ("job", "job-http", "job-kueue", "job-volcano", "cluster", "service", "serving")
IMAGE = "longtail"  # what the manifests call the image; kustomize's `images` puts registry and tag in
DEFAULT_IMAGE = "longtail:0.1.0"
DEFAULT_NAMESPACE = "longtail"


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """`retries`: how often a failed job is started again, in a new RayCluster, to go on where it was."""

    run_id: str
    image: str = DEFAULT_IMAGE
    namespace: str = DEFAULT_NAMESPACE
    retries: int = 1
    slots_per_pod: int = 1

    def __post_init__(self) -> None:
        if not _RUN_ID.match(self.run_id):
            raise ConfigError(
                f"run id {self.run_id!r} names Kubernetes objects: lower-case letters, digits and dashes, at most 47, "
                "beginning with a letter; give another with --run-id"
            )
        if not _DNS_LABEL.match(self.namespace):
            raise ConfigError(f"namespace {self.namespace!r}: lower-case letters, digits and dashes, at most 63")
        if not _IMAGE_NAME.match(self.image):
            raise ConfigError(f"image {self.image!r} is not of the form registry/name:tag or registry/name@sha256:...")
        if self.retries < 0:
            raise ConfigError(f"{self.retries} retries: give 0 or more")

    @property
    def images(self) -> list[dict[str, str]]:
        """For kustomize: what the manifests call longtail is this image."""
        match = _IMAGE_NAME.match(self.image)
        assert match is not None
        image = {"name": IMAGE, "newName": match["name"]}
        if match["digest"]:
            return [{**image, "digest": match["digest"]}]
        return [{**image, "newTag": match["tag"] or "latest"}]
