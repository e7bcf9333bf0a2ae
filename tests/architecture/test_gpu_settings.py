"""What the GPU tests start is accepted where there is no GPU: a setting that is refused would cost a rented machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.serving import ServeArguments, config_of_server
from deploy.serving_source import ModelSource
from tests.deploy.tiny_run import make_model_folder
from tests.gpu import test_serve
from tests.gpu.cases import CASES, Case, case_config


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_the_engines_of_the_gpu_tests(case: Case, tmp_path: Path) -> None:
    assert case_config(case, tmp_path).rollout.engine.type == "sglang"


def test_the_served_engine(tmp_path: Path) -> None:
    source = ModelSource(path=str(make_model_folder(tmp_path)))
    args = ServeArguments(source=source, settings=test_serve.SETTINGS, name="m", max_waiting=400)
    assert config_of_server(args).rollout.engine.type == "sglang"
