"""How long versions of a 7B shape travel to a rollout server with an SGLang engine (`longtail bench sglang`).

A publisher actor hands weights (constant numbers) to a rollout actor with such an engine, as the policy trainer and the
drafter trainers do: drafters and policies over the object store, and policies from GPU to GPU where there are two. The
clock runs from the finished weights until the engine says that it serves them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

from actors.clients import TRANSFERS
from actors.rollout import RolloutActor
from deploy.placement import TRAINER_ENV, actor_env
from services.config.schema import ClusterConfig
from services.core.errors import WaitTimeoutError
from services.models.device import pick_device
from services.models.files import model_dir
from services.models.layers import model_spec
from services.models.methods import drafter_method
from services.models.target import target_names
from services.weights.rendezvous import Invitation, Offer
from services.weights.send import Outbox

EPOCH = 1
STORE_7B = 40 * 10**9  # two versions of 15 GB and room
SHAPE_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


class Publisher:
    """Stands for a trainer: holds weights, hands them out as results of a call."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def ready(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def publish(self) -> dict[str, torch.Tensor]:
        return self._tensors


class OfferingPublisher:
    """Stands for the policy trainer with `weights.transport: collective`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: ClusterConfig) -> None:
        device = pick_device("cuda")
        self._outbox = Outbox(config.weights, device)
        self._tensors = {n: torch.full(s, 0.01, dtype=torch.bfloat16, device=device) for n, s in shapes.items()}

    def ready(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def publish(self, version: int) -> Offer:
        return self._outbox.hold(version, self._tensors, ray.get_runtime_context().current_actor)

    def send(self, version: int, invitation: Invitation) -> None:
        self._outbox.send(version, invitation)


def publish_figures(config: ClusterConfig, repeats: int) -> dict[str, Any]:
    """Seconds from a trainer's finished weights to the engine's word that it serves them."""
    with tempfile.TemporaryDirectory() as folder:
        big = _big_config(config, Path(folder))
        spec = model_spec(SHAPE_7B)
        shapes = {"drafter": drafter_method(big.drafter, spec).names(), "policy": target_names(spec)}
        server = ray.remote(RolloutActor).options(num_gpus=1).remote(big, 0)
        publisher_class = ray.remote(Publisher).options(runtime_env={"env_vars": actor_env(config.policy.threads)})
        publishers = {kind: publisher_class.remote(names) for kind, names in shapes.items()}
        waits = [server.process_id.remote(), *(p.ready.remote() for p in publishers.values())]
        sizes = fetch(waits, config.coordinator.start_timeout_s, "the 7B-shaped engine")[1:]
        fetch(server.open_epoch.remote(EPOCH), config.coordinator.call_timeout_s, "the epoch")
        figures: dict[str, Any] = {}
        timeout_s = config.coordinator.call_timeout_s
        for (kind, publisher), size in zip(publishers.items(), sizes, strict=True):
            load, publish = getattr(server, f"load_{kind}"), publisher.publish
            figures[kind] = _publish(load, lambda version, p=publish: p.remote(), range(repeats + 1), size, timeout_s)
            print(json.dumps({"publish": kind, **figures[kind]}), flush=True)
        figures["policy_collective"] = _collective(server, big, shapes["policy"], repeats)
        print(json.dumps({"publish": "policy_collective", "figures": figures["policy_collective"]}), flush=True)
        for actor in (server, *publishers.values()):
            ray.kill(actor)
        return figures


def _collective(
    server: Any, config: ClusterConfig, shapes: Mapping[str, tuple[int, ...]], repeats: int
) -> dict[str, Any] | None:
    """From another GPU to the server's; None where there is no other."""
    if ray.cluster_resources().get("GPU", 0.0) < 2:
        return None
    made = ray.remote(concurrency_groups={TRANSFERS: 2})(OfferingPublisher)
    env = {"env_vars": actor_env(config.policy.threads) | TRAINER_ENV}
    publisher = made.options(num_gpus=1, runtime_env=env).remote(shapes, config)
    size = fetch(publisher.ready.remote(), config.coordinator.start_timeout_s, "the publisher on the other GPU")
    versions = range(repeats + 1, 2 * repeats + 2)  # above those that came over the object store
    timeout_s = config.coordinator.call_timeout_s
    figures = _publish(server.load_policy, publisher.publish.remote, versions, size, timeout_s)
    ray.kill(publisher)
    return figures


def _publish(load: Any, publish: Callable[[int], Any], versions: range, size: int, timeout_s: float) -> dict[str, Any]:
    """The first one, which also opens connections, is told by itself."""
    seconds = []
    for version in versions:
        started = time.monotonic()
        reference = publish(version)
        served = fetch(load.remote(version, reference, EPOCH), timeout_s, "the load")
        seconds.append(time.monotonic() - started)
        assert version in (served.policy, served.drafter)
        del reference
    kept = seconds[1:] or seconds
    return {
        "bytes": size, "seconds": round(median(kept), 3), "spread": [round(min(kept), 3), round(max(kept), 3)],
        "gb_per_s": round(size / median(kept) / 1e9, 2), "first_seconds": round(seconds[0], 3),
    }  # fmt: skip


def _big_config(config: ClusterConfig, folder: Path) -> ClusterConfig:
    """The same run on a 7B-shaped model without weights on disk."""
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir()
    drafter.mkdir()
    shutil.copy(model_dir(config.model.path) / "tokenizer.json", target)
    (target / "config.json").write_text(json.dumps(SHAPE_7B))
    method = drafter_method(config.drafter, model_spec(SHAPE_7B))
    (drafter / "config.json").write_text(json.dumps(method.folder_config(SHAPE_7B)))
    engine = {"load_format": "dummy", "kv_tokens": 16384, "max_running": 8, "mem_fraction": 0.6}
    data = config.model_dump()
    data["model"] |= {"path": str(target), "dtype": "bfloat16"}
    data["rollout"]["engine"] |= engine
    return ClusterConfig.model_validate(data)


def fetch(reference: Any, timeout_s: float, what: str) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}: see the Ray logs") from None
