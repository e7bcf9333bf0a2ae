"""A CRD's schema, read as strictly as an API server reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest

from deploy.k8s.schemas import closed, packed_schemas


def valid(schema: object, value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(closed(schema)).is_valid(value))


def test_unknown_fields_are_refused_unless_they_are_preserved() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert valid(schema, {"a": "x"}) and not valid(schema, {"b": "x"})
    assert valid({**schema, "x-kubernetes-preserve-unknown-fields": True}, {"b": "x"})
    named = {"type": "object", "additionalProperties": {"type": "string"}}
    assert valid(named, {"any": "x"}) and not valid(named, {"any": 1})


def test_what_has_a_default_need_not_be_there() -> None:
    schema = {
        "type": "object",
        "required": ["a", "b"],
        "properties": {"a": {"type": "string"}, "b": {"type": "integer", "default": 3}},
    }
    assert valid(schema, {"a": "x"}) and not valid(schema, {"b": 3})


def test_numbers_or_text_and_null() -> None:
    schema = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert valid(schema, 8) and valid(schema, "8Gi") and not valid(schema, 1.5)
    assert valid({"type": "string", "nullable": True}, None) and not valid({"type": "string"}, None)


def test_fields_deep_within_lists_are_closed_too() -> None:
    inner = {"type": "object", "properties": {"name": {"type": "string"}}}
    schema = {"type": "object", "properties": {"items": {"type": "array", "items": inner}}}
    assert not valid(schema, {"items": [{"nmae": "x"}]})


def test_every_schema_that_ships_is_one() -> None:
    for schema in packed_schemas().values():
        jsonschema.Draft202012Validator.check_schema(closed(schema))
    assert {"ray.io/v1/RayJob", "ray.io/v1/RayCluster", "ray.io/v1/RayService"} <= packed_schemas().keys()


@pytest.mark.skipif("KUBERAY_SCHEMAS" not in os.environ, reason="KUBERAY_SCHEMAS names no folder of schemas")
@pytest.mark.parametrize("name", ["raycluster", "rayjob", "rayservice", "raycronjob"])
def test_packed_schemas_are_those_of_the_crds(name: str) -> None:
    crd = json.loads((Path(os.environ["KUBERAY_SCHEMAS"]) / f"{name}.v1.json").read_text(encoding="utf-8"))
    schema = crd["openAPIV3Schema"]
    schema["properties"].pop("status", None)
    assert packed_schemas()[f"{crd['apiVersion']}/{crd['kind']}"] == schema
