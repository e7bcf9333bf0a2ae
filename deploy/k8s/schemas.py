"""Manifests against schemas: those of KubeRay and of the Prometheus operator ship with this package, those of
Kubernetes itself come from the package kubernetes-validate.

A CRD's schema is looser than the API server, which prunes fields it does not know, fills defaults before it looks at
`required`, and takes null where a field is nullable: `closed` says the same in JSON Schema, and refuses unknown fields.
"""

from __future__ import annotations

import difflib
import json
import lzma
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from services.core.errors import ConfigError

KUBERNETES = "1.34"  # the schemas of this version
_PACKED = Path(__file__).parent / "schemas" / "custom-resources.json.xz"
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": _TEXTS,
        "annotations": _TEXTS,
        "finalizers": {"type": "array", "items": {"type": "string"}},
    },
}


def schema_problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    """One line per mistake, with the path of the field. Of a kind of Kubernetes itself the first mistake only."""
    kind = f"{manifest['apiVersion']}/{manifest['kind']}"
    if kind in packed_schemas():
        for error in sorted(_validator(kind).iter_errors(manifest), key=lambda e: list(map(str, e.absolute_path))):
            yield _line(error)
    else:
        yield from _built_in_problems(manifest, kind)


@cache
def packed_schemas() -> dict[str, dict[str, Any]]:
    """apiVersion/kind -> OpenAPI v3 schema."""
    schemas: dict[str, dict[str, Any]] = json.loads(lzma.decompress(_PACKED.read_bytes()))
    return schemas


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = closed(packed_schemas()[kind])
    schema["properties"] |= {"metadata": _METADATA, "apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    schema["required"] = ["metadata", "spec"]
    return jsonschema.Draft202012Validator(schema)


def closed(schema: Any) -> Any:
    """A structural OpenAPI schema as strict JSON Schema."""
    if not isinstance(schema, dict):
        return schema
    result = {k: v for k, v in schema.items() if not k.startswith("x-") and k not in ("nullable", "default", "format")}
    for several in ("anyOf", "oneOf", "allOf"):
        if several in result:
            result[several] = [closed(child) for child in result[several]]
    for named in ("properties", "$defs"):
        if named in result:
            result[named] = {name: closed(child) for name, child in result[named].items()}
    for one in ("items", "additionalProperties"):
        if one in result:
            result[one] = closed(result[one])
    if "required" in result:
        filled = {name for name, child in schema.get("properties", {}).items() if "default" in child}
        result["required"] = [name for name in result["required"] if name not in filled]
    if schema.get("x-kubernetes-int-or-string"):
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if result.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return {"anyOf": [result, {"type": "null"}]} if schema.get("nullable") else result


def _line(error: jsonschema.ValidationError) -> str:
    where = dotted(error.absolute_path) or "the manifest"
    schema = error.schema if isinstance(error.schema, dict) else {}
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = list(schema.get("properties", {}))
        unknown = [name for name in error.instance if name not in known]
        return "; ".join(f"{where}: unknown field {name}{_meant(name, known)}" for name in unknown)
    if error.validator == "type":
        return f"{where}: {_short(error.instance)} must be of type {error.validator_value}"
    return f"{where}: {error.message}"


def dotted(path: Any) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _meant(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _built_in_problems(manifest: Mapping[str, Any], kind: str) -> Iterator[str]:
    try:
        import kubernetes_validate as kubernetes
    except ModuleNotFoundError:
        raise ConfigError(
            "the schemas of Kubernetes are not installed: pip install 'longtail-rl[k8s]' (kubernetes-validate)"
        ) from None
    try:
        kubernetes.validate(dict(manifest), KUBERNETES, strict=True)
    except kubernetes.SchemaNotFoundError:
        known = sorted(k.rpartition("/")[2] for k in packed_schemas())
        yield f"{kind} is neither a kind of Kubernetes {KUBERNETES} nor one of {', '.join(known)}: it cannot be checked"
    except kubernetes.ValidationError as error:
        yield _line(error)
