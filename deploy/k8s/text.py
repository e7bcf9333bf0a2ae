"""Kustomize's files and manifests as text: a comment that says what to edit, then YAML."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from deploy.k8s.pods import Manifest


def kustomization(about: str, **fields: object) -> str:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return manifest_text(about, {**head, **fields})


def component(about: str, patches: Sequence[Manifest], files: Sequence[str] = ()) -> str:
    head = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    resources = {"resources": list(files)} if files else {}
    return manifest_text(about, {**head, **resources, "patches": list(patches)})


def manifest_text(about: str, *objects: Manifest) -> str:
    comment = "".join(f"# {line}\n" for line in _wrapped(about))
    return comment + "---\n".join(dump(o) for o in objects)


def _wrapped(text: str, width: int = 110) -> list[str]:
    lines: list[str] = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


class _Dumper(yaml.SafeDumper):
    """Writes equal values out instead of anchors, and texts of several lines as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def dump(value: object) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110)
    return text
