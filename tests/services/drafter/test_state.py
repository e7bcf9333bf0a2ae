from __future__ import annotations

import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.config.drafter import DrafterConfig
from services.core.errors import DataError, WeightError
from services.drafter.export import write_drafter_folder
from services.drafter.state import DrafterState, fresh_state, initial_drafter_state, merge_states, new_stamp
from services.models.files import read_config
from services.models.layers import model_spec
from services.models.methods import drafter_method

ARCHITECTURES = {
    ("qwen3", "eagle"): "LlamaForCausalLMEagle",
    ("qwen2", "eagle"): "Qwen2ForCausalLMEagle",
    ("llama", "eagle"): "LlamaForCausalLMEagle",
    ("qwen3", "eagle3"): "LlamaForCausalLMEagle3",
    ("qwen2", "eagle3"): "LlamaForCausalLMEagle3",
    ("llama", "eagle3"): "LlamaForCausalLMEagle3",
}


@pytest.mark.parametrize(("kind", "name"), ARCHITECTURES)
def test_export_and_initial_state_round_trip(model_folder, make_config, make_drafter, kind, name) -> None:
    folder = model_folder(kind, kind == "qwen3", name)
    method = drafter_method(DrafterConfig(method=name), model_spec(read_config(folder)))
    state = pickle.loads(pickle.dumps(initial_drafter_state(make_config(folder, method=name))))
    assert state["total_steps"] == state["updates"] == 0
    expected = make_drafter(method).tensors()
    assert state["tensors"].keys() == method.names().keys()
    assert all(torch.equal(state["tensors"][n], expected[n]) for n in expected)
    config = read_config(folder / "drafter")
    assert config["architectures"] == [ARCHITECTURES[kind, name]] and config["num_hidden_layers"] == 1
    assert config["model_type"] == ("qwen2" if (kind, name) == ("qwen2", "eagle") else "llama")
    assert config["hidden_size"] == method.target.hidden_size and config["tie_word_embeddings"] is False
    assert "layer_types" not in config
    card = (folder / "drafter" / "README.md").read_text()
    assert card.startswith(f"# {method.title} drafter") and method.reads in card
    assert not list((folder / "drafter").glob("*.partial"))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_the_zeros_that_sglangs_eagle_class_wants_are_in_the_file(model_folder, make_config, kind) -> None:
    """Its fc has a bias parameter: a file without one leaves random numbers in it. A bias that is not zero would be
    lost here, and is refused."""
    folder = model_folder(kind)
    file = folder / "drafter" / "model.safetensors"
    tensors = load_file(file)
    assert tensors["fc.bias"].shape == (32,) and not tensors["fc.bias"].any()
    assert "fc.bias" not in initial_drafter_state(make_config(folder))["tensors"]
    without = {n: t for n, t in tensors.items() if n != "fc.bias"}
    save_file(without, file)
    assert initial_drafter_state(make_config(folder))["tensors"].keys() == without.keys()
    save_file(tensors | {"fc.bias": torch.ones(32)}, file)
    with pytest.raises(DataError, match=r"fc\.bias is not zero"):
        initial_drafter_state(make_config(folder))


def change_config(folder, **fields):
    file = folder / "drafter" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            r"has architectures \['LlamaForCausalLMEagle3'\], but drafter.method: eagle and a qwen3 target needs "
            r"\['LlamaForCausalLMEagle'\]",
        ),
        ({"architectures": None}, "has architectures None"),
        ({"hidden_size": 64}, "hidden_size 64, the target has 32"),
        ({"vocab_size": 100}, "vocab_size 100, the target has 24"),
    ],
)
def test_a_drafter_of_another_target_is_named(model_folder, make_config, fields, message) -> None:
    folder = model_folder()
    change_config(folder, **fields)
    with pytest.raises(DataError, match=message):
        initial_drafter_state(make_config(folder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLMEagle"]},
            r"\['LlamaForCausalLMEagle'\], but drafter.method: eagle3 .* needs \['LlamaForCausalLMEagle3'\]",
        ),
        ({"hidden_size": 64}, "hidden_size 64, the target has 32"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
            r"reads target layers \[1, 2, 3\], but this run gives it \[0, 1, 2\]: set drafter.aux_layers",
        ),
        ({"eagle_config": None}, "reads target layers None"),
        ({"draft_vocab_size": 16}, "draft_vocab_size 16, but this run.s drafter has the LM head of the target"),
    ],
)
def test_an_eagle3_drafter_of_another_kind_is_named(model_folder, make_config, fields, message) -> None:
    folder = model_folder(name="eagle3")
    change_config(folder, **fields)
    with pytest.raises(DataError, match=message):
        initial_drafter_state(make_config(folder, method="eagle3"))


@pytest.mark.parametrize(("made", "asked"), [("eagle", "eagle3"), ("eagle3", "eagle")])
def test_row_25_method_and_folder_must_agree(model_folder, make_config, made, asked) -> None:
    """SGLang under the wrong algorithm drafts nonsense: acceptance 1.0 and no word about it."""
    folder = model_folder("llama", False, made)
    with pytest.raises(DataError, match=f"drafter.method: {asked} .* set drafter.method"):
        initial_drafter_state(make_config(folder, method=asked))


def test_zero_matching_tensors_are_refused(model_folder, make_config) -> None:
    """Row 30: SGLang's and transformers' loaders skip unknown names and succeed with nothing loaded."""
    folder = model_folder()
    file = folder / "drafter" / "model.safetensors"
    save_file({f"midlayer.{n}": t for n, t in load_file(file).items()}, file)
    with pytest.raises(WeightError, match=r"0 of .* tensors match"):
        initial_drafter_state(make_config(folder))


def test_a_damaged_file_and_a_missing_folder_are_named(model_folder, make_config) -> None:
    folder = model_folder()
    file = folder / "drafter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged or truncated"):
        initial_drafter_state(make_config(folder))
    for f in (folder / "drafter").iterdir():
        f.unlink()
    (folder / "drafter").rmdir()
    with pytest.raises(DataError, match=r"no drafter at .*longtail warmup"):
        initial_drafter_state(make_config(folder))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_export_refuses_foreign_tensors(model_folder, tmp_path, make_method, make_drafter, name) -> None:
    folder = model_folder()
    config = read_config(folder)
    method = make_method(name)
    tensors = dict(make_drafter(method).tensors())
    tensors["lm_head.weight"] = torch.zeros(24, 32)
    with pytest.raises(WeightError, match="lm_head"):
        write_drafter_folder(tensors, method, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fresh_state_copies(make_method, make_drafter) -> None:
    drafter = make_drafter(make_method())
    state = fresh_state(drafter.tensors(), drafter.method)
    with torch.no_grad():
        drafter.tensors()["fc.weight"].zero_()
    assert state["tensors"]["fc.weight"].abs().sum() > 0


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_head_of_its_own_that_the_run_does_not_know_of_is_refused(model_folder, make_config, name) -> None:
    """Its rows would mean other tokens (rows 26 and 27). Drafters made here share the target's head, so there is no
    mapping to lose, and none is written."""
    folder = model_folder("qwen3", True, name)
    config = make_config(folder, method=name)
    file = folder / "drafter" / "model.safetensors"
    tensors = load_file(file)
    assert not {"d2t", "t2d"} & tensors.keys()
    vocab = read_config(folder)["vocab_size"]
    assert read_config(folder / "drafter").get("draft_vocab_size") is None or name == "eagle"
    for mapping in ({"d2t": torch.zeros(vocab, dtype=torch.int64)}, {"t2d": torch.ones(vocab, dtype=torch.bool)}):
        save_file(tensors | mapping, file)
        with pytest.raises(DataError, match=r"reduced vocabulary.*longtail drafter import"):
            initial_drafter_state(config)
    save_file(tensors, file)
    place = folder / "drafter" / "config.json"
    place.write_text(json.dumps(read_config(folder / "drafter") | {"draft_vocab_size": vocab // 2}))
    with pytest.raises(DataError, match="name its folder in drafter"):
        initial_drafter_state(config)


def made_up(seed: int, total_steps: int, updates: int) -> DrafterState:
    rng = torch.Generator().manual_seed(seed)
    draw = lambda: {"a": torch.randn(3, 2, generator=rng), "b": torch.randn(4, generator=rng)}  # noqa: E731
    moments = {"exp_avg": draw(), "exp_avg_sq": draw()} if updates else {"exp_avg": {}, "exp_avg_sq": {}}
    return DrafterState(tensors=draw(), optimizer=moments, total_steps=total_steps, updates=updates, stamp=new_stamp())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(0, 1000))
def test_a_merge_is_the_weighted_average(micro_steps: list[int], begun: int) -> None:
    states = [made_up(i, begun + n, begun + n) for i, n in enumerate(micro_steps)]
    merged, weight = merge_states(states, micro_steps), sum(micro_steps)
    for pick in (lambda s: s["tensors"], lambda s: s["optimizer"]["exp_avg"], lambda s: s["optimizer"]["exp_avg_sq"]):
        for name, value in pick(merged).items():
            expected = sum(n * pick(s)[name] for n, s in zip(micro_steps, states, strict=True)) / weight
            assert torch.allclose(value, expected, atol=1e-5)
    assert (merged["total_steps"], merged["updates"]) == (begun + weight, begun + max(micro_steps))


def test_a_state_without_moments_counts_as_zeros() -> None:
    learned, not_yet = made_up(0, 12, 2), made_up(1, 12, 0)
    merged = merge_states([learned, not_yet], [2, 2])
    assert torch.allclose(merged["optimizer"]["exp_avg"]["a"], learned["optimizer"]["exp_avg"]["a"] / 2)
    with pytest.raises(AssertionError, match="different beginnings"):
        merge_states([made_up(0, 12, 2), made_up(1, 13, 2)], [2, 2])
