"""Looks at this machine."""

from __future__ import annotations

import platform
import socket
from pathlib import Path

import torch

from deploy.node_facts import Question, look


def test_versions_and_memory_are_this_machines() -> None:
    seen = look(Question())
    assert seen.versions["python"] == platform.python_version()
    assert seen.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert seen.cuda == torch.version.cuda and seen.versions["longtail"] == "present"
    assert seen.memory_bytes > 2**28


def test_a_taken_port_is_seen_and_a_free_one_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert look(Question(ports=(port,))).ports_taken == (port,)
    assert look(Question(ports=(port,))).ports_taken == ()


def test_folders_are_judged_where_they_would_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    new, under_a_file = look(Question(folders=(str(tmp_path / "a/b"), str(tmp_path / "file/c")))).folders
    assert new.problem is None and new.free_bytes > 0
    assert under_a_file.problem == f"{tmp_path / 'file'} is no folder"


def test_model_files_with_their_sizes(tmp_path: Path) -> None:
    assert look(Question(model=str(tmp_path))).model_bytes is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    seen = look(Question(model=str(tmp_path)))
    assert seen.model_bytes == 5 and seen.model_files == (("config.json", 2), ("model.safetensors", 5))
