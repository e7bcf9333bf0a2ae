"""The shape of the configuration tree: which keys a section has, which variant a mapping means, what was misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from services.config.schema import ClusterConfig

Path = tuple[str | int, ...]
TAG = "type"  # the discriminator of every variant in the schema
KINDS = (TAG, "drafter")  # keys that say what a mapping is: a strategy with another drafter is another strategy


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def sections_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The section classes that a field's annotation allows: one, several variants, or none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    if get_origin(annotation) in (tuple, list, dict) or not get_args(annotation):
        return ()
    return tuple(section for arg in get_args(annotation) for section in sections_of(arg))


def item_sections_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The section classes of a list field's items."""
    if get_origin(annotation) not in (tuple, list):
        return ()
    return tuple(section for arg in get_args(annotation) for section in sections_of(arg))


def tag_of(section: type[BaseModel]) -> str | None:
    field = section.model_fields.get(TAG)
    return str(field.default) if field is not None else None


def default_variant(owner: type[BaseModel], name: str) -> str | None:
    """The tag that a mapping without one gets: the tag of the field's default, when the field is a variant."""
    field = owner.model_fields[name]
    if len(sections_of(field.annotation)) < 2:
        return None
    default = field.get_default(call_default_factory=True, validated_data={})
    return tag_of(type(default)) if isinstance(default, BaseModel) else None


def pick(variants: tuple[type[BaseModel], ...], value: Mapping[str, Any]) -> type[BaseModel] | None:
    """The class that `value` means, or None when its tag names no variant."""
    if len(variants) == 1:
        return variants[0]
    return next((v for v in variants if tag_of(v) == value.get(TAG)), None)


def merged(section: type[BaseModel], base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, key by key. Default tags are written out, so that files can leave them out; another
    variant (or a strategy with another drafter) replaces the old one's mapping, whose keys mean nothing to it; an empty
    section changes nothing."""
    result = dict(base)
    for name, value in over.items():
        known = name in section.model_fields
        result[name] = _merged_field(section, name, base.get(name), value) if known else value
    return result


def _merged_field(owner: type[BaseModel], name: str, old: Any, new: Any) -> Any:
    annotation = owner.model_fields[name].annotation
    variants, items = sections_of(annotation), item_sections_of(annotation)
    if new is None and variants and type(None) not in get_args(annotation):
        new = {}  # a section whose keys are all commented out
    if isinstance(new, list) and len(items) == 1:
        return [merged(items[0], {}, item) if isinstance(item, Mapping) else item for item in new]
    if not isinstance(new, Mapping):
        return new
    if not isinstance(old, Mapping):
        tag = default_variant(owner, name)
        old = {} if tag is None else {TAG: tag}
    if any(kind in new and new[kind] != old.get(kind) for kind in KINDS):
        old = {}  # its other keys belong to what it was
    section = pick(variants, {**old, **new}) if variants else None
    return {**old, **new} if section is None else merged(section, old, new)


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a configuration: its value, and the annotation of its field (None: the schema has no such key)."""

    path: Path
    value: Any
    annotation: Any
    known: bool = True


def entries(value: Mapping[str, Any]) -> Iterator[Entry]:
    """Every key down to plain values. A tag that names no variant is an unknown entry, and nothing below it is told."""
    yield from _entries(ClusterConfig, value, ())


def _entries(section: type[BaseModel], value: Mapping[str, Any], path: Path) -> Iterator[Entry]:
    for name, child in value.items():
        here = (*path, name)
        field = section.model_fields.get(name)
        if field is None:
            yield Entry(here, child, None, known=False)
            continue
        variants, items = sections_of(field.annotation), item_sections_of(field.annotation)
        if isinstance(child, Mapping) and variants:
            chosen = pick(variants, child)
            if chosen is None:
                yield Entry((*here, TAG), child.get(TAG), None, known=False)
            else:
                yield from _entries(chosen, child, here)
        elif isinstance(child, list) and len(items) == 1:
            for i, item in enumerate(child):
                if isinstance(item, Mapping):
                    yield from _entries(items[0], item, (*here, i))
        else:
            yield Entry(here, child, field.annotation)


def numbers_only(annotation: Any) -> bool:
    """Whether a field takes numbers and nothing else (pydantic would read true as 1 there)."""
    return annotation in (int, float)


def variants_at(value: Mapping[str, Any], path: Path) -> tuple[type[BaseModel], ...]:
    """The section classes allowed at `path` (its last part may be unknown to the schema: then none)."""
    variants: tuple[type[BaseModel], ...] = (ClusterConfig,)
    data: Any = value
    items: tuple[type[BaseModel], ...] = ()
    for part in path:
        if isinstance(part, int):
            variants, data = items, data[part]
            continue
        section = pick(variants, data) if variants and isinstance(data, Mapping) else None
        field = section.model_fields.get(part) if section is not None else None
        if field is None:
            return ()
        variants, items = sections_of(field.annotation), item_sections_of(field.annotation)
        data = data.get(part) if isinstance(data, Mapping) else None
    return variants


@cache
def all_keys() -> tuple[tuple[str, str], ...]:
    """(key, dotted path) of every key in the tree, all variants included, lists without their index."""
    return tuple(_all_keys(ClusterConfig, ()))


def _all_keys(section: type[BaseModel], path: Path) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        here = (*path, name)
        yield name, dotted(here)
        for child in (*sections_of(field.annotation), *item_sections_of(field.annotation)):
            yield from _all_keys(child, here)


def suggestions(path: Path, siblings: tuple[str, ...], limit: int = 3) -> list[str]:
    """Dotted paths that the last part of `path` was probably meant to be, likeliest first: a neighbour spelt much like
    it, the same key elsewhere in the tree, or a key elsewhere spelt much like it."""
    name, parent = str(path[-1]), path[:-1]
    found = [dotted((*parent, key)) for key in difflib.get_close_matches(name, siblings, n=2, cutoff=0.6)]
    found += [full for key, full in all_keys() if key == name]
    if not found:
        names = sorted({key for key, _ in all_keys()})
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        found = [full for key, full in all_keys() if key in close]
    return list(dict.fromkeys(found))[:limit]
