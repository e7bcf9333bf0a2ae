"""Loads into models that look like SGLang's: all or nothing per part, one model only, versions kept by the model."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.core.errors import WeightError
from services.models.drafter import DrafterMethod
from services.models.eagle import Eagle
from services.models.eagle3 import Eagle3
from services.models.target import target_names
from services.rollout.sglang.loader import (
    TORN,
    LoadOrder,
    load_part,
    parse_order,
    serve_parts,
    served_version,
)
from tests.services.models.tiny import FAMILIES, random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.sglang.fused import FusedModel, same


def policy_of(kind: str, seed: int = 0) -> dict[str, Tensor]:
    return tensors_of(tiny_model(kind, 32, seed, num_hidden_layers=4))


def target(kind: str = "llama") -> FusedModel:
    return FusedModel(target_names(spec_of(tiny_model(kind, 32, num_hidden_layers=4))))


def methods(kind: str) -> list[DrafterMethod]:
    spec = spec_of(tiny_model(kind, 32, num_hidden_layers=4))
    return [Eagle(spec), Eagle3(spec, (0, 1, 2))]


def drafter(method: DrafterMethod) -> FusedModel:
    return FusedModel(method.names() | method.engine_zeros(), "model.")


def drafter_tensors(method: DrafterMethod, seed: int = 0) -> dict[str, Tensor]:
    zeros = {name: torch.zeros(shape) for name, shape in method.engine_zeros().items()}
    return random_drafter(method.target, seed=seed, method=method) | zeros


def load(model: FusedModel, kind: str, version: int, tensors: dict[str, Tensor], part_bytes: int = 2**30) -> None:
    parts = serve_parts(tensors, part_bytes)
    for n, part in enumerate(parts):
        load_part(model, LoadOrder(kind, version, n, len(parts)), part)


# ------------------------------------------------------------------ what is loaded


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("part_bytes", [1, 5_000, 2**30])
def test_every_tensor_arrives_in_its_piece_of_the_fused_parameter(kind: str, part_bytes: int) -> None:
    model = target(kind)
    assert served_version(model) is None
    load(model, "policy", 3, policy_of(kind), part_bytes)
    assert same(model.tensors(), policy_of(kind)) and served_version(model) == 3
    for method in methods(kind):
        draft = drafter(method)
        load(draft, "drafter", 5, drafter_tensors(method), part_bytes)
        assert same(draft.tensors(), drafter_tensors(method)) and served_version(draft) == 5


def test_the_order_of_the_tensors_does_not_matter() -> None:
    model, items = target("qwen2"), list(policy_of("qwen2").items())
    random.Random(3).shuffle(items)
    load(model, "policy", 0, dict(items), 3_000)
    assert same(model.tensors(), policy_of("qwen2"))


@pytest.mark.parametrize("kind", FAMILIES)
def test_row_24_a_whole_version_for_the_other_model_is_refused(kind: str) -> None:
    """EAGLE-3's class would take the target's layer 0 for its own."""
    for method in methods(kind):
        draft, policy = drafter(method), policy_of(kind)
        load(draft, "drafter", 1, drafter_tensors(method))
        with pytest.raises(WeightError, match="the engine's model has no"):
            load(draft, "policy", 2, policy)
        assert same(draft.tensors(), drafter_tensors(method)) and served_version(draft) == 1
        model = target(kind)
        load(model, "policy", 1, policy)
        with pytest.raises(WeightError, match="the engine's model has no"):
            load(model, "drafter", 2, drafter_tensors(method))
        assert same(model.tensors(), policy) and served_version(model) == 1


def test_row_24_the_hazard_is_real() -> None:
    """What the loader guards against: this class, like SGLang's, takes the target's layer 0 without a word."""
    eagle = methods("llama")[0]
    draft = drafter(eagle)
    load(draft, "drafter", 1, drafter_tensors(eagle))
    draft.load_weights(policy_of("llama").items())
    assert not same(draft.tensors(), drafter_tensors(eagle))


def test_a_head_of_the_drafters_own_lies_beside_its_model() -> None:
    """Where a target has its head too: the order, not the name, says whose it is."""
    method = Eagle3(spec_of(tiny_model("llama", 32, num_hidden_layers=4)), (0, 1, 2), (1, 4, 9))
    tensors = random_drafter(method.target, method=method)
    draft = drafter(method)
    load(draft, "drafter", 5, tensors)
    assert same(draft.tensors(), tensors) and served_version(draft) == 5
    shared = drafter(methods("llama")[1])
    with pytest.raises(WeightError, match=r"the engine's model has no \['lm_head.weight'\]"):
        load(shared, "drafter", 1, tensors)


@pytest.mark.parametrize("method", methods("llama"), ids=lambda m: m.name)
def test_a_drafters_name_with_the_targets_prefix_is_unknown(method: DrafterMethod) -> None:
    """Only names without "model." are a drafter's, so that a policy's tensors cannot pass for them one by one."""
    draft = drafter(method)
    name = "layers.0.mlp.down_proj.weight"
    with pytest.raises(WeightError, match="the engine's model has no"):
        load_part(draft, LoadOrder("drafter", 1, 0, 1), [(f"model.{name}", drafter_tensors(method)[name])])
    load_part(draft, LoadOrder("drafter", 1, 0, 1), [(name, drafter_tensors(method)[name])])
    assert torch.equal(draft.tensors()[name], drafter_tensors(method)[name])


# ------------------------------------------------------------------ what is refused


def spoiled(tensors: dict[str, Tensor], name: str, fault: str) -> dict[str, Tensor]:
    value = tensors[name].clone()
    if fault == "unknown":
        return {(f"x.{n}" if n == name else n): t for n, t in tensors.items()}
    value.view(-1)[-1] = torch.nan if fault == "nan" else -torch.inf
    return tensors | {name: value}


@given(
    name=st.sampled_from(sorted(policy_of("llama"))),
    fault=st.sampled_from(["unknown", "nan", "infinity"]),
    part_bytes=st.sampled_from([1, 3_000, 12_000, 2**30]),
)
def test_row_30_a_bad_tensor_stops_its_part_whole(name: str, fault: str, part_bytes: int) -> None:
    """Parts before the bad one are in place, the bad one and those behind it are not, and the version says so: the old
    one if nothing was loaded, otherwise TORN. A later whole version mends it."""
    model, old, new = target(), policy_of("llama"), policy_of("llama", 1)
    load(model, "policy", 1, old)
    bad = spoiled(new, name, fault)
    with pytest.raises(
        WeightError, match=r"policy load refused, nothing changed: .*" + ("no" if fault == "unknown" else "NaN")
    ):
        load(model, "policy", 2, bad, part_bytes)
    parts = serve_parts(bad, part_bytes)
    failed = next(n for n, part in enumerate(parts) if any(t is not new.get(k) for k, t in part))
    loaded = {k for part in parts[:failed] for k, _ in part}
    assert same(model.tensors(), {k: (new if k in loaded else old)[k] for k in old})
    assert served_version(model) == (TORN if failed else 1)
    load(model, "policy", 3, new, part_bytes)
    assert same(model.tensors(), new) and served_version(model) == 3


@pytest.mark.parametrize("kind", ["policy", "drafter"])
def test_row_30_nothing_is_not_a_version(kind: str) -> None:
    model = target() if kind == "policy" else drafter(methods("llama")[0])
    with pytest.raises(WeightError, match=f"{kind} load refused, nothing changed: no tensors"):
        load(model, kind, 1, {})
    assert served_version(model) is None


def test_between_two_parts_a_model_has_no_version() -> None:
    """A part that never comes (its sender died or gave up waiting) must not leave the old version's name on it."""
    model, new = target(), policy_of("llama", 1)
    load(model, "policy", 1, policy_of("llama"))
    parts = serve_parts(new, 5_000)
    assert len(parts) > 3
    for n, part in enumerate(parts):
        load_part(model, LoadOrder("policy", 2, n, len(parts)), part)
        assert served_version(model) == (2 if n == len(parts) - 1 else TORN)


# ------------------------------------------------------------------ parts and orders


@given(
    sizes=st.lists(st.integers(1, 40), max_size=30),
    part_bytes=st.integers(1, 400),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_parts_keep_the_order_and_the_limit(sizes: list[int], part_bytes: int, dtype: torch.dtype) -> None:
    tensors = {f"t{n}": torch.zeros(size, dtype=dtype) for n, size in enumerate(sizes)}
    parts = serve_parts(tensors, part_bytes)
    assert [pair for part in parts for pair in part] == list(tensors.items())
    weights = [sum(t.numel() * t.element_size() for _, t in part) for part in parts]
    assert all(w <= part_bytes or len(part) == 1 for w, part in zip(weights, parts, strict=True))
    assert all(parts) or parts == [[]], "an empty part would be refused; nothing at all still has to be"
    first = [part[0][1].numel() * part[0][1].element_size() for part in parts[1:]]
    assert all(w + more > part_bytes for w, more in zip(weights, first, strict=False)), "no part ends early"


@given(
    st.builds(
        LoadOrder,
        st.sampled_from(["policy", "drafter"]),
        st.integers(0, 10**9),
        st.integers(0, 999),
        st.integers(1, 999),
    )
)
def test_an_order_survives_its_journey(order: LoadOrder) -> None:
    assert parse_order(order.text()) == order


@pytest.mark.parametrize(
    "other", [None, "", "auto", "direct", "flattened_bucket", "longtail", "longtailed/x", "pkg.fn"]
)
def test_other_load_formats_are_not_ours(other: str | None) -> None:
    assert parse_order(other) is None
