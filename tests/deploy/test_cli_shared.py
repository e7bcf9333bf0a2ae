"""What `longtail train` runs: a configuration, or what a run folder says."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli_shared import training_config
from services.config.load import dump_config, load_config
from services.core.errors import ConfigError
from services.report.remote import RemoteRun


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere" / "night-1"
    folder.mkdir(parents=True)
    first = training_config("pocket-tiny", ["rollout.group_size=4"], tmp_path / "runs", None)
    (folder / "config.yaml").write_text(dump_config(first))
    return folder


def test_resume_takes_everything_from_the_run_folder_and_goes_on_in_it(run_folder: Path) -> None:
    config = training_config(None, [], None, str(run_folder))
    stored = load_config(run_folder / "config.yaml")
    assert (config.run.dir, config.run.id) == (run_folder.parent, "night-1")
    assert config.model_copy(update={"run": stored.run}) == stored and config.rollout.group_size == 4


def test_settings_may_follow_without_a_configuration(run_folder: Path) -> None:
    """The first of them stands where CONFIG would."""
    config = training_config("run.steps=30", ["run.eval_every=5"], None, str(run_folder))
    assert (config.run.steps, config.run.eval_every, config.run.id) == (30, 5, "night-1")


def test_what_contradicts_is_told(run_folder: Path, tmp_path: Path) -> None:
    for arguments, remedy in (
        ((None, [], None, None), "name a configuration: a YAML file or a preset; or a run folder with --resume"),
        (("pocket-tiny", [], None, str(run_folder)), "leave 'pocket-tiny' out"),
        ((None, [], tmp_path, str(run_folder)), "leave --run-dir out"),
        ((None, [], None, str(tmp_path)), "is no run folder"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            training_config(*arguments)


def test_a_url_brings_the_run_folder_along(run_folder: Path, tmp_path: Path) -> None:
    url, there = f"file://{tmp_path}/store", tmp_path / "there"
    place = run_folder / "checkpoints" / "step-0000000003"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no whole step at .*store/night-1: name the URL with"):
        training_config(None, [], there, f"{url}/night-1")
    RemoteRun(url, "night-1").store(3, run_folder, {})
    config = training_config("run.steps=30", [], there, f"{url}/night-1/")
    assert (config.run.dir, config.run.id, config.run.checkpoint_url) == (there, "night-1", url)
    assert config.run.steps == 30 and config.rollout.group_size == 4
    again = training_config(None, ["run.checkpoint_url=memory://x"], there, f"{url}/night-1")
    assert again.run.checkpoint_url == "memory://x" and again.run.dir == there
