"""What `longtail bench resume` compares and refuses. (The bench itself kills real runs for minutes.)"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from deploy import bench_resume
from deploy.bench_resume import KILLED, WHOLE, fitted
from services.config.load import load_config
from services.core.checkpoints import step_folder
from services.core.errors import ConfigError
from services.report.rollouts_file import rollouts_path

PRESETS = Path(bench_resume.__file__).parent / "presets"


def test_what_depends_on_the_clock_is_refused_or_switched_off() -> None:
    config = fitted(load_config("pocket-tiny", presets_dir=PRESETS), 5, online=False)
    assert config.drafter.training.when == "never" and config.run.steps >= 15 and config.run.checkpoint_every
    with pytest.raises(ConfigError, match=r"speculation\.selector\.type=fixed"):
        fitted(load_config("pocket-demo", presets_dir=PRESETS), 5, online=False)
    crowded = load_config("pocket-tiny", overrides=["rollout.prompts_per_step=20"], presets_dir=PRESETS)
    with pytest.raises(ConfigError, match="40 rollouts do not fit into 16 places"):
        fitted(crowded, 5, online=False)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of one step that are the same but for the clock."""
    for run, at in ((WHOLE, 1.0), (KILLED, 9.0)):
        folder = tmp_path / run
        (folder / "rollouts").mkdir(parents=True)
        rows: list[dict[str, Any]] = [
            {"group_id": "a", "index": i, "response_ids": [1, i], "started_s": at, "finished_s": at + i} for i in (0, 1)
        ]
        pq.write_table(pa.Table.from_pylist(rows), rollouts_path(folder / "rollouts", 1))
        place = step_folder(folder / "checkpoints", 1)
        place.mkdir(parents=True)
        save_file({"policy/w": torch.ones(3)}, place / "state.safetensors")
    return tmp_path


def test_equal_runs_have_no_difference(runs: Path) -> None:
    assert list(bench_resume._differences(runs, 1)) == []


def test_one_bit_of_one_weight_is_a_difference(runs: Path) -> None:
    file = step_folder(runs / KILLED / "checkpoints", 1) / "state.safetensors"
    save_file({"policy/w": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}, file)
    assert list(bench_resume._differences(runs, 1)) == ["policy/w"]
    shutil.rmtree(file.parent)
    save_to = step_folder(runs / KILLED / "checkpoints", 2)
    save_to.mkdir()
    save_file({"policy/w": torch.ones(3)}, save_to / "state.safetensors")
    assert list(bench_resume._differences(runs, 1)) == ["the last checkpoint"]


def test_another_token_is_a_difference_and_a_missing_rollout_is_lost(runs: Path) -> None:
    config = fitted(load_config("pocket-tiny", presets_dir=PRESETS), 1, online=True)
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": 1}),
            "rollout": config.rollout.model_copy(update={"prompts_per_step": 1, "group_size": 2}),
        }
    )
    assert bench_resume._lost(runs / KILLED, config) == 0
    file = rollouts_path(runs / KILLED / "rollouts", 1)
    rows = pq.read_table(file).to_pylist()
    rows[1] |= {"index": 0}
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert list(bench_resume._differences(runs, 1)) == ["rollouts of step 1"]
    assert bench_resume._lost(runs / KILLED, config) == 2, "one is missing, one is there twice"
    file.unlink()
    assert bench_resume._lost(runs / KILLED, config) == 2
    row = {"kind": "step", "step": 1, "num_rollouts": 6, "sampling_rounds": 2}
    (runs / KILLED / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert bench_resume._lost(runs / KILLED, config) == 6 and bench_resume._rounds(runs / KILLED) == [2]
