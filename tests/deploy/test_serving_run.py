"""What a run leaves behind is served: newest checkpoint, best, or any other, each with its own drafter."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deploy.serving import ServeArguments
from deploy.serving_source import ModelSource, checkpoint_of, read_weights, serving_config
from services.config.speculation import SpeculationConfig
from services.core.checkpoints import step_of
from services.core.errors import ConfigError, DataError
from services.core.types import ServedVersions
from services.models.files import drafter_dir, read_tensors
from tests.deploy.served_run import make_served_run
from tests.deploy.serving_app import WAIT_S, served_here


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_run(tmp_path_factory.mktemp("served"))


def source(run: Path, **changes: object) -> ModelSource:
    return ModelSource.model_validate({"path": str(run), **changes})


def test_which_checkpoint_is_served(run: Path) -> None:
    for asked, step in (("newest", 3), ("best", 2), (1, 1)):
        assert step_of(checkpoint_of(source(run, checkpoint=asked))) == step
    with pytest.raises(DataError, match="there are those of 1, 2, 3"):
        checkpoint_of(source(run, checkpoint=9))


def test_the_weights_are_those_of_the_checkpoint(run: Path) -> None:
    config = serving_config(source(run))
    found = [read_weights(source(run, checkpoint=step), config) for step in (1, 3)]
    assert [w.versions for w in found] == [ServedVersions(1, 11), ServedVersions(3, 13)]
    name = "model.embed_tokens.weight"
    stored = read_tensors(checkpoint_of(source(run)))  # with all that training needs
    assert torch.equal(found[1].policy[name], stored[f"policy/{name}"])
    assert not torch.equal(found[0].policy[name], found[1].policy[name])
    assert found[1].drafter is not None
    exported = read_tensors(drafter_dir(config.model.path, "eagle"))
    assert found[1].drafter.keys() == exported.keys() - {"fc.bias"}  # zeros, for SGLang alone
    other = read_weights(source(run, drafter=str(drafter_dir(config.model.path, "eagle"))), config)
    assert other.versions == ServedVersions(3, 0)


def test_without_a_strategy_that_drafts_no_drafter_is_served(run: Path) -> None:
    config = serving_config(source(run)).model_copy(update={"speculation": SpeculationConfig()})
    assert read_weights(source(run), config).versions == ServedVersions(3, None)


def test_a_run_is_served_and_swapped_to_another_checkpoint(run: Path) -> None:
    args = ServeArguments(source=source(run, checkpoint=1))
    with served_here(args) as made:
        client = made.client()
        ask: dict[str, Any] = {"model": run.name, "prompt": "12+34=", "max_tokens": 8, "temperature": 0}
        assert client.completions.create(**ask).system_fingerprint == "policy-1-drafter-11"
        newest = read_weights(source(run), serving_config(args.source))
        asyncio.run(made.generator.swap(newest, WAIT_S))
        assert client.completions.create(**ask).system_fingerprint == "policy-3-drafter-13"
        assert client.models.list().data[0].to_dict()["versions"] == "policy-3-drafter-13"


def test_what_cannot_be_served_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        serving_config(ModelSource(path=str(tmp_path)))
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    with pytest.raises(DataError, match="no checkpoint yet"):
        checkpoint_of(source(tmp_path))
    with pytest.raises(DataError, match="no drafter at"):
        read_weights(source(run, drafter=str(tmp_path / "none")), serving_config(source(run)))


def test_a_model_folder_is_served_with_the_drafter_that_its_settings_name(tmp_path: Path) -> None:
    shipped = drafter_dir("pocket", "eagle")
    other = tmp_path / "other"
    shutil.copytree(shipped, other)
    tensors = {name: 2 * tensor for name, tensor in read_tensors(shipped).items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    model = ModelSource(path="pocket")
    served, named = (
        read_weights(model, serving_config(model, settings)).drafter for settings in ([], [f"drafter.path={other}"])
    )
    assert served is not None and named is not None
    assert torch.equal(named["fc.weight"], 2 * served["fc.weight"])
