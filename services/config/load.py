"""From YAML files and command-line overrides to one checked `ClusterConfig`, and back.

Order, later wins: defaults < preset < further files < dotted overrides. Every mistake found is reported at once, with
its path, its value, where it came from, and what is allowed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.config.schema import ClusterConfig
from services.config.tree import (
    TAG,
    Path,
    dotted,
    entries,
    merged,
    numbers_only,
    pick,
    suggestions,
    tag_of,
    variants_at,
)
from services.config.yaml_text import dump_yaml, parse_yaml
from services.core.errors import ConfigError

_COMMAND_LINE = "command line"
_KEY = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")


@dataclass(frozen=True, slots=True)
class _Layer:
    source: str
    values: Mapping[str, Any]


def load_config(
    *files: FilePath | str, overrides: Sequence[str] = (), presets_dir: FilePath | None = None
) -> ClusterConfig:
    """The configuration of `files` (the preset first) with `overrides` such as "rollout.group_size=4" on top.

    A file is a path, or the name of a preset in `presets_dir` without its ".yaml". Raises ConfigError.
    """
    layers = [_read(file, presets_dir) for file in files]
    if overrides:
        layers.append(_Layer(_COMMAND_LINE, _parse_overrides(overrides)))
    return _build(layers)


def parse_config(text: str, source: str) -> ClusterConfig:
    """The configuration that `text` is, as `dump_config` wrote it or a person. Raises ConfigError naming `source`."""
    return _build([_layer(text, source)])


def dump_config(config: ClusterConfig) -> str:
    """YAML text that `load_config` turns into an equal configuration; every value is written out."""
    return dump_yaml(config.model_dump(mode="json"))


def preset_names(presets_dir: FilePath | None) -> list[str]:
    return sorted(p.stem for p in presets_dir.glob("*.yaml")) if presets_dir else []


def _read(file: FilePath | str, presets_dir: FilePath | None) -> _Layer:
    path = FilePath(file)
    names = preset_names(presets_dir)
    if presets_dir is not None and not path.exists() and str(file) in names:
        path = presets_dir / f"{file}.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        known = f"; presets: {', '.join(names)}" if names else ""
        raise ConfigError(f"cannot read configuration {str(file)!r}: {reason}{known}") from error
    return _layer(text, str(file))


def _layer(text: str, source: str) -> _Layer:
    value = parse_yaml(text.removeprefix("\ufeff"), source)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: a configuration is a mapping of sections, not {_kind(value)}")
    return _Layer(source, value)


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not _KEY.match(key):
            raise ConfigError(f"override {override!r} is not of the form section.key=value, e.g. rollout.group_size=4")
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"override {override!r} contradicts an earlier one that sets {parent!r} to {child!r}")
            node = child
        value = parse_yaml(text, f"override {override!r}")
        if isinstance(value, dict) and isinstance(node.get(last), dict):
            value = {**node[last], **value}
        node[last] = value
    return tree


def _build(layers: Sequence[_Layer]) -> ClusterConfig:
    values: dict[str, Any] = {}
    for layer in layers:
        values = merged(ClusterConfig, values, layer.values)
    found = list(entries(values))
    unknown = [entry.path for entry in found if not entry.known]
    problems = [_unknown_text(values, path, layers) for path in unknown]
    booleans = [e for e in found if numbers_only(e.annotation) and isinstance(e.value, bool)]
    problems += [f"{dotted(e.path)} = {e.value!r} must be a number{_origin(e.path, layers)}" for e in booleans]
    gone = [*unknown, *(e.path for e in booleans)]
    try:
        config = ClusterConfig.model_validate(_without(values, gone))
    except ValidationError as error:
        problems += _value_texts(error, values, layers, complete=not gone)
    if not problems:
        return config
    if len(problems) == 1:
        raise ConfigError(problems[0])
    raise ConfigError(f"{len(problems)} mistakes in the configuration:\n" + "\n".join(f"  - {p}" for p in problems))


def _unknown_text(values: Mapping[str, Any], path: Path, layers: Sequence[_Layer]) -> str:
    owner = variants_at(values, path[:-1])
    section = pick(owner, _value_at(values, path[:-1])) if owner else None
    if section is None:  # the tag names no variant
        tags = [t for v in owner if (t := tag_of(v)) is not None]
        given = _value_at(values, path)
        close = difflib.get_close_matches(str(given), tags, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{dotted(path)} = {given!r} must be one of {', '.join(tags)}{hint}{_origin(path, layers)}"
    siblings = tuple(section.model_fields)
    others = [t for v in owner if path[-1] in v.model_fields and (t := tag_of(v)) is not None]
    if others:
        here = f"{dotted(path[:-1])}.{TAG} is {tag_of(section)}"
        return f"{dotted(path)} belongs to type {' or '.join(others)}, but {here}{_origin(path, layers)}"
    meant = suggestions(path, siblings)
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"known here: {', '.join(siblings)}"
    return f"unknown key {dotted(path)}; {hint}{_origin(path, layers)}"


def _value_texts(
    error: ValidationError, values: Mapping[str, Any], layers: Sequence[_Layer], *, complete: bool
) -> list[str]:
    """One line per wrong value. While mistaken keys had to be left out (not `complete`), what is missing and checks
    across keys are not told: they would judge the absence or the default of a key that was only misspelt."""
    texts: dict[Path, list[str]] = {}
    details = [(_plain_path(d["loc"], values), d) for d in error.errors(include_url=False)]
    for path, detail in details:
        across = detail["type"] == "value_error" and isinstance(detail["input"], Mapping)
        if not complete and (across or detail["type"] in ("missing", "too_short")):
            continue
        if detail["type"] == "too_short" and any(p[: len(path)] == path != p for p, _ in details):
            continue  # pydantic counts only the good items; the bad ones are told
        reason, seen = _reason(detail), texts.setdefault(path, [])
        if detail["type"] == "missing":
            seen.append(f"{dotted(path)} is missing")
        elif across:
            seen.append(f"{dotted(path)}: {reason}" if path else reason)
        else:
            seen.append(reason if seen else f"{dotted(path)} = {detail['input']!r} {reason}")
    across_sections = [line for reason in texts.pop((), []) for line in reason.splitlines()]
    one_each = [" or ".join(dict.fromkeys(reasons)) + _origin(path, layers) for path, reasons in texts.items()]
    return one_each + across_sections


def _plain_path(loc: Sequence[str | int], values: Mapping[str, Any]) -> Path:
    """`loc` without the variant tags and value types that pydantic puts between the keys."""
    path: list[str | int] = []
    data: Any = values
    for part in loc:
        if isinstance(data, list) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        elif isinstance(data, Mapping):
            if part not in data and part == data.get(TAG):
                continue
            data = data.get(part)
        else:
            break  # what follows names one of the types tried on a plain value
        path.append(part)
    return tuple(path)


def _reason(detail: ErrorDetails) -> str:
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "literal_error":
        expected = str(detail["ctx"]["expected"])
        close = difflib.get_close_matches(str(detail["input"]), re.findall(r"'([^']*)'", expected), n=1)
        return f"must be {expected}" + (f"; did you mean {close[0]}?" if close else "")
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "must be a mapping of keys to values"
    if detail["type"] == "path_type":
        return "must be a path"
    return text.replace("Input should be", "must be").replace("Input should have", "must have")


def _origin(path: Path, layers: Sequence[_Layer]) -> str:
    """Which file or command line last set `path` (or the closest thing above it)."""
    for length in range(len(path), 0, -1):
        for layer in reversed(layers):
            if _has(layer.values, path[:length]):
                return f" [{layer.source}]"
    return ""


def _has(values: Any, path: Path) -> bool:
    for part in path:
        inside = (isinstance(values, Mapping) and part in values) or (
            isinstance(values, list) and isinstance(part, int) and part < len(values)
        )
        if not inside:
            return False
        values = values[part]
    return True


def _value_at(values: Any, path: Path) -> Any:
    for part in path:
        values = values[part]
    return values


def _without(values: Mapping[str, Any], unknown: Sequence[Path]) -> dict[str, Any]:
    """A copy without the unknown keys; a mapping whose tag is unknown goes as a whole."""
    gone = {path[:-1] if path[-1] == TAG and len(variants_at(values, path[:-1])) > 1 else path for path in unknown}

    def copy(value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return {k: copy(v, (*path, k)) for k, v in value.items() if (*path, k) not in gone}
        if isinstance(value, list):
            return [copy(v, (*path, i)) for i, v in enumerate(value)]
        return value

    result: dict[str, Any] = copy(values, ())
    return result


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else f"the value {value!r}"
