from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.core.errors import DataError
from services.drafter.spill import SpillFolder, encode, remove_abandoned
from services.models.hidden import HiddenStates

ROOT = Path(__file__).resolve().parents[3]
OWNER = """
import sys
from pathlib import Path
from services.drafter.spill import SpillFolder
folder = SpillFolder(Path(sys.argv[1]), 1000)
folder.write(b"x" * 10, 0)
print(folder.folder, flush=True)
sys.stdin.read()
"""


def owner(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process that has a folder under `root` until its input ends."""
    command = [sys.executable, "-c", OWNER, str(root)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    spill = SpillFolder(tmp_path, 10**6)
    hidden, aux = torch.randn(7, 4).to(dtype), torch.randn(7, 12).to(dtype)
    states = HiddenStates(torch.arange(7), hidden.t().contiguous().t(), torch.arange(7) > 3, 5, aux)
    back = spill.read(spill.write(encode(states), 5))
    for a, b in ((back.input_ids, states.input_ids), (back.hidden, hidden), (back.loss_mask, states.loss_mask)):
        assert torch.equal(a, b) and a.dtype == b.dtype
    assert back.aux is not None and torch.equal(back.aux, aux) and back.policy_version == 5


def test_folders_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    killed, its = owner(tmp_path)
    alive, other = owner(tmp_path)
    try:
        assert (its / "00000000").is_file() and (other / "00000000").is_file()
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(120)
        assert its.is_dir(), "a killed process cleans nothing"
        mine = SpillFolder(tmp_path, 1000)
        assert sorted(tmp_path.iterdir()) == sorted([other, mine.folder])
        assert remove_abandoned(tmp_path) == [], "not even one's own"
        assert (other / "00000000").is_file()
        alive.communicate(timeout=120)
        assert alive.returncode == 0 and not other.exists(), "one that ends by itself leaves nothing"
    finally:
        for process in (killed, alive):
            process.kill()
            process.wait(120)
    mine.close()
    mine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_folder_goes_with_its_object(tmp_path: Path) -> None:
    SpillFolder(tmp_path, 1000).write(b"abc", 0)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "longtail-buffer-notes").write_text("mine")
    (tmp_path / "longtail-buffer-mine").mkdir()
    (tmp_path / "longtail-buffer-mine" / "notes").write_text("mine")
    (tmp_path / "models").mkdir()
    (tmp_path / "longtail-buffer-0").mkdir()  # of one that died before it had a lock
    SpillFolder(tmp_path, 1000).close()
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert left == ["longtail-buffer-mine", "longtail-buffer-mine/notes", "longtail-buffer-notes", "models"]


def test_a_place_that_is_no_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"spill_dir .*file cannot be used"):
        SpillFolder(tmp_path / "file", 1000)


def test_a_failed_write_leaves_nothing_and_counts_nothing(tmp_path: Path) -> None:
    spill = SpillFolder(tmp_path, 1000)
    (spill.folder / "00000000").mkdir()  # the rename fails
    with pytest.raises(OSError):
        spill.write(b"abc", 0)
    assert spill.num_bytes == 0 and sorted(p.name for p in spill.folder.iterdir()) == ["00000000", "lock"]
    assert spill.write(b"abc", 0).num_bytes == spill.num_bytes == 3
