"""A run's drafter on its way out, and a published one on its way into a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deploy.cli_shared import PRESETS_DIR as PRESETS
from deploy.drafter_export import CACHE, Destination, Measuring, export_drafter, import_drafter
from deploy.drafter_run import read_run_drafter
from services.config.load import load_config
from services.core.errors import ConfigError, DataError
from services.drafter.export import write_drafter_folder
from services.drafter.layouts import LAYOUTS, Layout
from services.drafter.published import read_published
from services.drafter.state import initial_drafter_state
from services.models.eagle import Eagle
from services.models.eagle3 import Eagle3
from services.models.files import read_config
from tests.deploy.drafter_world import make_run, make_target, spec_of
from tests.services.models.tiny import random_drafter

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    target = make_target(place / "target")
    method = Eagle(spec_of(target))
    write_drafter_folder(random_drafter(method.target), method, read_config(target), place / "drafter")
    return make_run(place / "runs", target, place / "drafter")


def told() -> list[str]:
    return []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_served_drafter_goes_out_and_comes_in_again(run: Path, tmp_path: Path, layout: Layout) -> None:
    found = export_drafter(run, Destination(layout, tmp_path / "out"), None, None, "apache-2.0", told().append)
    assert found.step == 3 and found.origin.total_steps == 77
    read = read_published(tmp_path / "out", found.target)
    kept = load_file(run / "checkpoints" / "step-0000000003" / "state.safetensors")
    for name, tensor in read.tensors.items():
        assert torch.equal(tensor, kept[f"drafter/live/tensors/{name}"]), name
    card = (tmp_path / "out" / "README.md").read_text()
    for line in ("license: apache-2.0", "run: one", "feed1234", "drafter version: 5", "77 micro-steps", "not measured"):
        assert line in card, line


def test_the_policy_goes_with_it(run: Path, tmp_path: Path) -> None:
    """Another one than the run began with: this is what the drafter drafts for."""
    found = export_drafter(
        run, Destination("sglang", tmp_path / "out", policy=tmp_path / "policy"), 3, None, None, told().append
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32).state_dict()
    began = load_file(found.target / "model.safetensors")
    assert (tmp_path / "policy" / "tokenizer.json").is_file()
    for name, tensor in began.items():
        assert torch.equal(loaded[name], found.policy[name]) and not torch.equal(loaded[name], tensor), name


def test_what_is_measured_is_in_the_card_and_is_kept(run: Path, tmp_path: Path) -> None:
    measuring, lines = Measuring(prompts=3, depth=2, max_tokens=12, costs="cpu-pocket"), told()
    export_drafter(run, Destination("sglang", tmp_path / "a"), None, measuring, None, lines.append)
    card = (tmp_path / "a" / "README.md").read_text()
    assert "## Measured on 3 held-out prompts" in card and "recorded, cpu-pocket; at temperature 1" in card
    kept = json.loads((run / CACHE).read_text())
    (measured,) = kept.values()
    assert [row["temperature"] for row in measured["acceptance"]] == [0.0, 0.6, 1.0]
    assert [row["running"] for row in measured["speed"]] == [1, 8, 32]
    for row in measured["acceptance"]:
        assert row["how"] == "engine" and len(row["rates"]) <= 2 and 1 <= row["acceptance_length"] <= 3
    lines.clear()
    export_drafter(run, Destination("hf", tmp_path / "b"), None, measuring, None, lines.append)
    assert lines == [f"measured before: {run / CACHE}"], "nothing is generated again"
    tables = [text.partition("## Measured")[2].partition("## Start")[0] for text in (
        card, (tmp_path / "b" / "README.md").read_text())]  # fmt: skip
    assert tables[0] == tables[1]


def test_what_cannot_be_exported_is_told_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    to = Destination("sglang", tmp_path / "out")
    with pytest.raises(DataError, match=r"no checkpoint of step 2; kept are those after 3"):
        export_drafter(run, to, 2, None, None, told().append)
    with pytest.raises(ConfigError, match="no run folder"):
        export_drafter(tmp_path, to, None, None, None, told().append)
    assert not to.folder.exists()
    to.folder.mkdir()
    (to.folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="name another folder"):
        export_drafter(run, to, None, None, None, told().append)
    assert [f.name for f in to.folder.iterdir()] == ["config.json"]


def test_a_run_without_checkpoints_has_its_drafter_folder(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (bare / name).write_text((run / name).read_text())
    with pytest.raises(DataError, match="has no drafter"):
        read_run_drafter(bare)
    target = Path(load_config(bare / "config.yaml").model.path)
    method = Eagle(spec_of(target))
    tensors = random_drafter(method.target, seed=4)
    write_drafter_folder(tensors, method, read_config(target), bare / "drafter")
    lines = told()
    found = export_drafter(bare, Destination("sglang", tmp_path / "out"), None, Measuring(), None, lines.append)
    assert found.origin.total_steps == 9 and found.policy is None and "nothing is measured" in lines[0]
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(DataError, match="leave --policy out"):
        export_drafter(
            bare, Destination("sglang", tmp_path / "two", policy=tmp_path / "p"), None, None, None, lines.append
        )


def test_a_published_drafter_becomes_a_warm_start(tmp_path: Path) -> None:
    """With a head of its own, and with layers that are not the default: the settings say so, and a run takes them."""
    target = make_target(tmp_path / "target", layers=6)
    method = Eagle3(spec_of(target), (0, 2, 3), (1, 4, 7, 9))
    tensors = random_drafter(method.target, method=method)
    write_drafter_folder(tensors, method, read_config(target), tmp_path / "published")
    settings = import_drafter(tmp_path / "published", str(target), tmp_path / "own")
    assert settings == [
        f"drafter.path={tmp_path / 'own'}", "drafter.method=eagle3", "drafter.aux_layers=[0,2,3]"
    ]  # fmt: skip
    config = load_config("reasoner-sglang", overrides=[f"model.path={target}", *settings], presets_dir=PRESETS)
    state = initial_drafter_state(config)
    assert all(torch.equal(state["tensors"][name], tensor) for name, tensor in tensors.items())
    with pytest.raises(ConfigError, match="name another folder"):
        import_drafter(tmp_path / "published", str(target), tmp_path / "own")


def test_a_drafter_of_another_target_is_not_brought_in(run: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other")
    config = read_config(other)
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 16}))
    drafter = read_run_drafter(run).config.drafter.path
    with pytest.raises(DataError, match="has vocab_size 2"):
        import_drafter(drafter, str(other), tmp_path / "out")
    assert not (tmp_path / "out").exists()
