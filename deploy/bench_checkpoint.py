"""`longtail bench checkpoint`: how long drafter training stands still for a checkpoint.

Selective and asynchronous, as the drafter trainer does it (a copy of what is trained and of its moments, written in the
background), against everything the trainer holds written at once before training goes on. Random weights of the size
below. `slowed_ms` is what a micro-step beside the background write takes longer; it belongs to the cost.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from deploy.provenance import provenance
from services.config.schema import ClusterConfig
from services.drafter.checkpoint import checkpoint_writer, flat_state, snapshot_of
from services.drafter.head import EMBED, HEAD, target_head
from services.drafter.state import fresh_state
from services.drafter.trainer import DrafterTrainer
from services.models.device import pick_device
from services.models.drafter import Drafter
from services.models.hidden import HiddenStates
from services.models.layers import ModelSpec, model_spec
from services.weights.checkpoint import CheckpointWriter

HIDDEN, INTERMEDIATE, HEADS, VOCAB = 512, 1408, 8, 32000  # of the target
SEQUENCE, SEQUENCES = 96, 4
WRITE_LIMIT_S = 120.0


def run_bench(config: ClusterConfig, repeats: int) -> dict[str, Any]:
    """Medians in milliseconds; `stall_ratio`: the selective asynchronous stall through the synchronous full one."""
    torch.set_num_threads(config.drafter.threads)
    trainer = _trainer(config)
    states = _states(trainer)
    times: dict[str, list[float]] = {"selective_async": [], "full_sync": [], "micro_step": [], "beside_write": []}
    with tempfile.TemporaryDirectory() as folder:
        writer = checkpoint_writer(Path(folder) / "kept", "bench")
        for repeat in range(repeats + 1):
            found = _round(trainer, states, writer, Path(folder) / "full.safetensors")
            if repeat:
                for name, value in found.items():
                    times[name].append(value)
    ms = {name: round(1000 * median(values), 2) for name, values in times.items()}
    result = {
        "bench": "checkpoint",
        **provenance(),
        "threads": config.drafter.threads,
        "repeats": repeats,
        "shape": {"hidden_size": HIDDEN, "vocab_size": VOCAB},
        "bytes": {"selective": _bytes(_selective(trainer)), "full": _bytes(_full(trainer))},
        "ms": ms,
        "slowed_ms": round(ms["beside_write"] - ms["micro_step"], 2),
        "stall_ratio": round(median(times["selective_async"]) / median(times["full_sync"]), 4),
    }
    print(json.dumps({k: result[k] for k in ("bytes", "ms", "slowed_ms", "stall_ratio")}))
    return result


def _round(
    trainer: DrafterTrainer, states: list[HiddenStates], writer: CheckpointWriter, file: Path
) -> dict[str, float]:
    found = {"micro_step": _timed(lambda: trainer.train_micro_step(states))}
    found["full_sync"] = _timed(lambda: _write_full(trainer, file))
    found["selective_async"] = _timed(lambda: writer.save(snapshot_of(trainer.state(), trainer.method)))
    found["beside_write"] = _timed(lambda: trainer.train_micro_step(states))
    writer.wait(WRITE_LIMIT_S)
    return found


def _timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _write_full(trainer: DrafterTrainer, file: Path) -> None:
    save_file(_full(trainer), file)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _selective(trainer: DrafterTrainer) -> dict[str, torch.Tensor]:
    return flat_state(trainer.state())


def _full(trainer: DrafterTrainer) -> dict[str, torch.Tensor]:
    head = trainer.head
    return _selective(trainer) | {EMBED: head.embed.cpu(), HEAD: head.head.cpu()}


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _spec() -> ModelSpec:
    return model_spec(
        {
            "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 8,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": VOCAB,
        }
    )  # fmt: skip


def _trainer(config: ClusterConfig) -> DrafterTrainer:
    spec, device = _spec(), pick_device(config.model.device)
    trainer = DrafterTrainer(spec, config.drafter.model_copy(update={"method": "eagle", "aux_layers": ()}), 1.0, device)
    torch.manual_seed(config.run.seed)
    weights = {name: torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5 for name in (EMBED, HEAD)}
    trainer.load_head(target_head(weights, spec, 0, device))
    network = Drafter(trainer.method)
    network.reset(torch.Generator().manual_seed(config.run.seed))
    trainer.load_state(fresh_state(network.tensors(), trainer.method))
    return trainer


def _states(trainer: DrafterTrainer) -> list[HiddenStates]:
    mask = torch.ones(SEQUENCE, dtype=torch.bool)
    return [
        HiddenStates(torch.randint(VOCAB, (SEQUENCE,)), torch.randn(SEQUENCE, HIDDEN), mask, 0)
        for _ in range(SEQUENCES)
    ]
