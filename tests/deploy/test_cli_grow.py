from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.cli_train import train
from services.models.files import drafter_dir, read_config, read_grown
from tests.deploy.tiny_run import make_model_folder, tiny_run

SHAPE = ["--hidden-size=128", "--intermediate-size=96", "--num-layers=3", "--num-heads=8", "--num-kv-heads=4"]


def grow(*args: str | Path):
    return CliRunner().invoke(app, ["grow", *map(str, args)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "small")


def test_target_and_drafter_grow_together(source: Path, tmp_path: Path) -> None:
    done = grow(source, tmp_path / "large", *SHAPE, "--dtype=bfloat16", "--drafter", source.parent / "drafter")
    assert done.exit_code == 0, done.output
    drafter, target = map(json.loads, done.stdout.splitlines())
    assert target["parameters"] > 4 * target["source_parameters"] and target["folder"] == str(tmp_path / "large")
    assert Path(drafter["folder"]) == drafter_dir(str(tmp_path / "large"), "eagle"), "where a run looks for it"
    assert read_grown(tmp_path / "large") and (tmp_path / "large/tokenizer.json").is_file()


def test_more_positions_for_longer_rollouts(source: Path, tmp_path: Path) -> None:
    """In both, and the model still reads in transformers and computes what it did."""
    done = grow(source, tmp_path / "large", *SHAPE, "--drafter", source.parent / "drafter", "--max-positions=512")
    assert done.exit_code == 0, done.output
    folders = (tmp_path / "large", drafter_dir(str(tmp_path / "large"), "eagle"))
    assert [read_config(f)["max_position_embeddings"] for f in folders] == [512, 512]
    ids = torch.arange(3, 15)[None]
    small, large = (AutoModelForCausalLM.from_pretrained(f, local_files_only=True) for f in (source, folders[0]))
    with torch.no_grad():
        assert (small(ids).logits - large(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--max-positions=128"], "--max-positions 128 is below the source's 256"),
        (["--num-heads=4"], "num_kv_heads of at most 2"),
        (["--dtype=float16"], "must be one of float32, bfloat16"),
        (["--drafter-out=x"], "give --drafter too"),
        (["--drafter=nowhere"], "cannot read nowhere/config.json"),
    ],
)
def test_refusals_write_nothing(source: Path, tmp_path: Path, change: list[str], told: str) -> None:
    done = grow(source, tmp_path / "large", *SHAPE, *change)
    assert done.exit_code == 2 and told in done.stderr, done.output
    assert not (tmp_path / "large").exists()


def test_a_model_in_the_way_is_kept(source: Path) -> None:
    done = grow(source, source, *SHAPE)
    assert done.exit_code == 2 and "holds a model" in done.stderr


def test_a_run_on_a_grown_model_says_so(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One whole step, policy and drafter trained, on what was grown."""
    done = grow(source, tmp_path / "large", *SHAPE, "--drafter", source.parent / "drafter")
    assert done.exit_code == 0, done.output
    run = {"steps": 1, "eval_prompts": 0, "compare_prompts": 0, "dir": str(tmp_path / "runs")}
    keep = {"zero_variance": "keep"}  # random weights solve nothing: the policy is to be updated all the same
    config = tiny_run(tmp_path / "large", tmp_path / "runs", placement={"mode": "local"}, run=run, policy=keep)
    train(config, quiet=True)
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_grown(folder) == read_grown(tmp_path / "large")
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert "model grown from" in capsys.readouterr().out
