"""YAML as configuration files mean it.

PyYAML follows YAML 1.1, where `drafter: off` is False, `1e-4` is text, `1:30` is 90 and a repeated key silently wins.
Here only true/false are booleans, exponents make a float, and a repeated key is an error, as in YAML 1.2.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from services.core.errors import ConfigError

_MAX_DEPTH = 32
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  (PyYAML's own class attribute, emptied)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _at(key_node, f"key {key!r} is not text")
            if key in mapping:
                raise _at(key_node, f"key {key!r} appears twice")
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # equal values are written out, never as anchors


for _tag, _regex, _first in (
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", _NULL, ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regex, list(_first))
# The dumper quotes what either reading would not give back as text.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _at(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def parse_yaml(text: str, source: str) -> object:
    """The value that one YAML document holds (None when empty). ConfigError names `source`, line and reason."""
    try:
        value: object = yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{where}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    _refuse_endless(value, source, 0)
    return value


def dump_yaml(value: object) -> str:
    """YAML text, in the given key order, that `parse_yaml` reads back to an equal value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=10**6)
    return text


def _refuse_endless(value: object, source: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{source}: nested deeper than {_MAX_DEPTH} levels (an alias that contains itself?)")
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_endless(child, source, depth + 1)
