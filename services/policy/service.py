"""PolicyService: the policy trainer behind its contract, built from a model folder."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.config.schema import ClusterConfig
from services.core.checkpoints import CheckpointNote, CheckpointPlan
from services.core.errors import BatchError, ConfigError, GpuMemoryError
from services.core.protocols import Clock
from services.core.types import HiddenStateChunk, MemorySwitch, PolicyStepReport, TrainBatch
from services.models.device import free_cache, pick_device, pick_dtype
from services.models.files import model_dir, read_config
from services.models.hidden import HiddenStates
from services.models.layers import ModelSpec, model_spec
from services.models.methods import drafter_method
from services.models.target import check_tensors, target_names
from services.policy.checkpoint import KIND, DrafterTree, Restored, restore, take_snapshot
from services.policy.gather import gathered
from services.policy.residence import movable
from services.policy.team import ALONE, Team
from services.policy.trainer import PolicyTrainer
from services.weights.checkpoint import CheckpointWriter


class PolicyService:
    """train_step and publish over one PolicyTrainer. `version` is 0 before the first update and only grows. Of a team
    every worker has one, whose calls are made together; the one that leads has the answers and writes checkpoints."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        spec: ModelSpec,
        publish_dtype: torch.dtype,
        writer: CheckpointWriter | None = None,
        restored: Restored | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._trainer, self._clock = trainer, clock
        self._spec = spec
        self._publish_dtype = publish_dtype
        self._writer = writer
        self._restored = restored
        self._last_step = restored.note.step if restored else 0

    @property
    def version(self) -> int:
        return self._trainer.version

    @property
    def device(self) -> torch.device:
        return self._trainer.device

    @property
    def steps_done(self) -> int:
        """The last step whose rollouts were trained on, also when they had no signal and the version stayed."""
        return self._last_step

    def train_step(self, batch: TrainBatch) -> tuple[PolicyStepReport, HiddenStateChunk, list[HiddenStates]]:
        """One update. The hidden states are those of the version before it; see PolicyTrainer.train_step. Raises
        BatchError for a step that was trained on already: a coordinator that took over asks for `steps_done` first;
        GpuMemoryError for one that does not fit."""
        assert not self._trainer.residence.away, "a step while the policy's memory is released"
        if batch.step <= self._last_step:
            raise BatchError(f"the policy has trained on step {self._last_step}, step {batch.step} came after it")
        try:
            step = self._trainer.train_step(batch)
        except torch.OutOfMemoryError as error:
            config = self._trainer.config
            smaller = "" if config.activation_checkpointing else "set policy.activation_checkpointing: true, "
            smaller += "" if config.reshard_after_forward else "set policy.reshard_after_forward: true, "
            raise GpuMemoryError(
                f"step {batch.step} of the policy does not fit its GPU: {smaller}lower policy.micro_batch_tokens "
                f"({config.micro_batch_tokens}), or spread the policy over more GPUs with placement.policy_workers "
                f"({str(error).partition('. ')[0]})"
            ) from error
        self._last_step = batch.step
        free_cache(self._trainer.device)
        return step.report, step.chunk, step.hidden

    @torch.no_grad()
    def publish(self, device: torch.device | str = "cpu") -> tuple[int, dict[str, Tensor]]:
        """(policy_version, copies of all weights on `device` by Hugging Face name); a tied LM head is left out."""
        leads, at_hand = self._trainer.team.leads, self._trainer.residence.at_hand
        # a tied LM head is the embedding
        named = {name: at_hand(p.detach()) for name, p in self._trainer.model.named_parameters()}
        copies = gathered(list(named.values()), self._publish_dtype, leads)
        if not leads:
            list(copies)  # none: it takes part
            return self.version, {}
        tensors = {name: copy.to(device) for name, copy in zip(named, copies, strict=True)}
        # A diverged policy must not reach the engines: refused here, they keep the version they serve.
        check_tensors(tensors, target_names(self._spec), "policy")
        return self.version, tensors

    def switch_memory(self, release: bool) -> MemorySwitch | None:
        """Move all that is kept between steps to host memory, so that a rollout server can have the GPU, or back; None
        when it is there already. Publishing and checkpoints work from where it is. Raises GpuMemoryError when the GPU
        is not free."""
        residence, started = self._trainer.residence, self._clock()
        if residence.away == release:
            return None
        try:
            moved = residence.leave() if release else residence.come_back()
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                "the policy finds no room on the GPU that it shares with a rollout server: lower "
                "rollout.engine.mem_fraction or rollout.engine.kv_tokens, or give the policy GPUs of its own with "
                f"placement.policy: split ({str(error).partition('. ')[0]})"
            ) from error
        return MemorySwitch(release, self._clock() - started, sum(self._trainer.team.gathered(moved)))

    def restored(self) -> tuple[CheckpointNote | None, DrafterTree | None, DrafterTree | None]:
        """(note, live drafter state, served one) of the checkpoint this trainer went on from; None for a new run."""
        found = self._restored
        return (None, None, None) if found is None else (found.note, found.live, found.served)

    def checkpoint(
        self, note: CheckpointNote, live: DrafterTree | None = None, served: DrafterTree | None = None
    ) -> None:
        """Copy the state as it is after step `note.step`, and write it in the background. Raises BatchError when the
        policy has trained on another step last, DataError when an earlier checkpoint could not be written."""
        if note.step != self._last_step:
            raise BatchError(f"a checkpoint of step {note.step} was asked for, the policy is at step {self._last_step}")
        snapshot = take_snapshot(self._trainer, self._spec, note, live, served)
        if self._trainer.team.leads:
            assert self._writer is not None
            self._writer.save(snapshot)

    def flush(self, timeout_s: float) -> None:
        """Returns when every checkpoint is on the disk. Raises WaitTimeoutError and DataError."""
        if self._writer is not None:
            self._writer.wait(timeout_s)


def load_policy_model(path: str, device: torch.device) -> PreTrainedModel:
    """transformers' own class in float32: AdamW's small updates would vanish in bfloat16 weights.

    The padding token's embedding learns like any other: it may be the end of sequence as well, which prompts hold, and
    torch would leave out the gradient through its use as an input.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_dir(path), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    model.config.use_cache = False
    model.get_input_embeddings().padding_idx = None
    torch.nn.Module.to(model, device)  # moves in place
    return model


def build_policy_service(
    config: ClusterConfig,
    clock: Clock = time.monotonic,
    checkpoints: CheckpointPlan | None = None,
    team: Team = ALONE,
) -> PolicyService:
    """Load the policy and set this process's thread count. Raises DataError for a folder that is no usable model and
    for a checkpoint that cannot be gone on from, ConfigError for a checkpoint folder that is not there. A policy that
    is to be sharded, or begins away, is read into host memory, and goes to the device layer by layer."""
    torch.set_num_threads(config.policy.threads)
    spec = model_spec(read_config(model_dir(config.model.path)))
    picked = pick_device(config.model.device)
    device = picked if team.device is None else team.device
    dtype = pick_dtype(config.model.dtype)
    compute = None if dtype == torch.float32 else dtype
    aux_layers = drafter_method(config.drafter, spec).aux_layers
    away = config.placement.lends_memory  # rollout servers, which have the first turn, start beside it
    model = load_policy_model(config.model.path, device if team.mesh is None and not away else torch.device("cpu"))
    if away:
        for parameter in model.parameters():
            parameter.data = movable(parameter.data)
    keep_states = config.drafter.states == "policy" and config.speculation.learned  # else nobody learns from them
    trainer = PolicyTrainer(model, config.policy, clock, compute, aux_layers, keep_states, team, device, away)
    writer, restored = None, None
    if checkpoints is not None:
        writer = _writer(checkpoints.folder) if team.leads else None
        restored = None if checkpoints.start is None else restore(checkpoints.start, trainer, spec)
        trainer.version = max(trainer.version, checkpoints.least_version)
    return PolicyService(trainer, spec, dtype, writer, restored, clock)


def _writer(folder: Path) -> CheckpointWriter:
    """All checkpoints stay: the driver, which knows what was recorded, takes old ones away."""
    if not folder.parent.is_dir():
        raise ConfigError(
            f"the policy trainer does not see the run folder {folder.parent}: put run.dir on a file system that all "
            "machines share, or set run.checkpoint_every=0 to go without checkpoints"
        )
    return CheckpointWriter(folder, KIND, "policy", keep=None)
