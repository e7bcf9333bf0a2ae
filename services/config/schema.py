"""The configuration tree. A value lives in exactly one place; derived values are properties; cross-section checks sit
on the root and say the remedy. Standard library and pydantic only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.config.drafter import DrafterConfig
from services.config.engine_args import engine_arg_problems
from services.config.graphs import GraphsConfig, switching_problems
from services.config.placement import PlacementConfig
from services.config.policy import PolicyConfig
from services.config.reward import RewardConfig
from services.config.section import Section
from services.config.speculation import SpeculationConfig
from services.config.warmup import WarmupConfig
from services.config.weights import WeightsConfig
from services.core.types import COLDEST


class ModelConfig(Section):
    """Which policy to train. `path` is a Hugging Face folder, or "pocket" for the model shipped with Longtail."""

    path: str = "pocket"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"


class ReasoningGymData(Section):
    """Problems drawn from reasoning-gym. With `terms`, the number of terms per problem is log-normal (a long tail)."""

    class SkewedTerms(Section):
        median: float = Field(4.0, gt=0)
        sigma: float = Field(0.9, ge=0)
        min: int = Field(2, ge=1)
        max: int = Field(40, ge=1)

        @model_validator(mode="after")
        def _ordered(self) -> ReasoningGymData.SkewedTerms:
            if self.min > self.max:
                raise ValueError(f"min {self.min} exceeds max {self.max}: swap them or widen the range")
            return self

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = "chain_sum"
    params: dict[str, int | float | bool | str] = Field(default_factory=dict)
    terms: SkewedTerms | None = None
    size: int = Field(4000, ge=1)
    template: str = "{question}"  # {question} or any key of the task's metadata, e.g. "{expression}="


class FileData(Section):
    """A JSONL or Parquet prompt set with columns prompt, answer, task, meta."""

    type: Literal["file"] = "file"
    path: Path
    on_bad_row: Literal["strict", "skip"] = "strict"


class DataConfig(Section):
    source: Annotated[ReasoningGymData | FileData, Field(discriminator="type")] = ReasoningGymData()
    heldout_fraction: float = Field(0.1, gt=0, lt=1)
    max_prompt_tokens: int = Field(256, ge=1)
    chat_template: bool = False
    seed: int = 0


class RolloutSampling(Section):
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, lt=1)
    max_tokens: int = Field(512, ge=1)
    stop_token_ids: tuple[int, ...] = ()  # empty: the tokenizer's eos
    stop_strings: tuple[str, ...] = ()


class NativeEngine(Section):
    """The embedded engine: continuous batching over `max_running` KV slots of `max_len` tokens each."""

    type: Literal["native"] = "native"
    max_running: int = Field(32, ge=1)
    max_len: int = Field(768, ge=8)
    threads: int = Field(1, ge=1)
    # Host memory for hidden states (drafter.states: engine) until they are taken: the oldest make way.
    capture_bytes: int = Field(256 * 2**20, ge=2**20)
    graphs: GraphsConfig | None = None  # CUDA graphs of the target's pass ({}: with the defaults); null: none


class SGLangEngine(Section):
    """A stock SGLang engine per slot. `max_len` bounds prompt + response; `tp` GPUs of the slot share the model."""

    type: Literal["sglang"] = "sglang"
    tp: int = Field(1, ge=1)
    max_running: int = Field(64, ge=1)
    max_len: int = Field(4096, ge=8)
    mem_fraction: float = Field(0.8, gt=0, lt=1)  # of the GPU's memory, for weights and KV cache
    kv_tokens: int | None = Field(None, ge=1)  # None: whatever mem_fraction leaves; set it when slots share a GPU
    # auto: FlashAttention-3 for chains in bfloat16 on Hopper (rounds then hardly grow with the context), else Triton
    attention_backend: Literal["auto", "triton", "fa3", "flashinfer"] = "auto"
    # Each rollout's own random numbers, whatever else is in the batch; slower, and only with argmax drafts.
    deterministic: bool = False
    stream_interval: int = Field(32, ge=1)  # tokens between two pieces of news of a running request, roughly
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: start on random weights, the run's arrive anyway
    # Pinned host memory for hidden states (drafter.states: engine): what does not fit is lost to the drafter, and told.
    capture_bytes: int = Field(2**30, ge=2**20)
    graphs: GraphsConfig = GraphsConfig()  # of an engine whose selector has several strategies
    release_memory: bool = False  # the KV cache and the weights can be released while the slot's GPU is lent out
    engine_args: dict[str, int | float | bool | str] = Field(default_factory=dict)  # further arguments of sglang.Engine


class ConsolidateConfig(Section):
    """Consolidation of the tail: the last rollouts of a server go on at another one, so that its slot can train the
    drafter. Never at the expense of the phase: `max_delay` is the part of its remaining time by which it may end later
    (what training in idle slots may cost in all). A slot freed for less than `min_freed_s` hardly gets beyond adopting
    the training state. `worth`: slot seconds won for each that moving costs, because both are estimates."""

    enabled: bool = False
    max_delay: float = Field(0.02, ge=0)
    min_freed_s: float = Field(1.0, ge=0)
    worth: float = Field(2.0, ge=1)


class RolloutConfig(Section):
    engine: Annotated[NativeEngine | SGLangEngine, Field(discriminator="type")] = NativeEngine()
    num_servers: int = Field(2, ge=1)
    group_size: int = Field(8, ge=1)
    prompts_per_step: int = Field(16, ge=1)
    sampling: RolloutSampling = RolloutSampling()
    advance_budget_s: float = Field(0.15, gt=0)
    consolidate: ConsolidateConfig = ConsolidateConfig()


class MetricsConfig(Section):
    """Where the coordinator serves its metrics to Prometheus; `port` 0 takes a free one, told in the run folder's
    metrics_endpoint.json. `host` 0.0.0.0: on every interface of its machine, to be scraped from others."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)


class CoordinatorConfig(Section):
    lease_s: float = Field(30.0, gt=0)
    # Of all rollout servers together: with so many that rollout.advance_budget_s would bring more, each reports less
    # often, up to a quarter of lease_s. An answer over Ray costs the coordinator about a millisecond.
    reports_per_s: float = Field(400.0, gt=0)
    call_timeout_s: float = Field(120.0, gt=0)
    # An SGLang engine compiles kernels at its first start on a new model shape: minutes.
    start_timeout_s: float = Field(180.0, gt=0)
    max_restarts: int = Field(3, ge=0)
    metrics: MetricsConfig | None = MetricsConfig()  # null: none


Tracker = Literal["tensorboard", "wandb", "mlflow"]


class RunConfig(Section):
    """`id` is the run folder's name under `dir`; None: made of `name`, the time and a random token. A run whose id is
    there already goes on from its last checkpoint, so that starting it again is always safe. A checkpoint is written
    every `checkpoint_every` steps and at the end (0: never); the newest `keep_last` stay, and the `keep_best` with the
    highest held-out reward of those written at an evaluation. `checkpoint_url`: checkpoints and records are copied to
    URL/ID as well, in the background, and a run whose folder is not on this machine goes on from there;
    `upload_timeout_s`: how long the end of a run waits for the last copy."""

    name: str = "run"
    id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$")
    dir: Path = Path("runs")
    checkpoint_every: int = Field(5, ge=0)
    keep_last: int = Field(2, ge=1)
    keep_best: int = Field(0, ge=0)
    checkpoint_url: str | None = Field(None, pattern=r"^[a-z][a-z0-9+.-]*://.+")
    upload_timeout_s: float = Field(600.0, gt=0)
    steps: int = Field(20, ge=1)
    seed: int = 0
    eval_prompts: int = Field(128, ge=0)
    eval_every: int = Field(0, ge=0)  # 0: before and after only
    compare_prompts: int = Field(0, ge=0)  # speculation off against on, same prompts and seeds, at the end
    compare_repeats: int = Field(3, ge=1)
    tracking: tuple[Tracker, ...] = ("tensorboard",)  # beside the JSONL files of the run folder

    @model_validator(mode="after")
    def _something_to_copy(self) -> RunConfig:
        if self.checkpoint_url is not None and not self.checkpoint_every:
            raise ValueError(
                "checkpoint_url has nothing to copy with checkpoint_every 0: raise it, or leave the URL out"
            )
        return self


class ClusterConfig(Section):
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    reward: RewardConfig = RewardConfig()
    policy: PolicyConfig = PolicyConfig()
    drafter: DrafterConfig = DrafterConfig()
    weights: WeightsConfig = WeightsConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    placement: PlacementConfig = PlacementConfig()
    run: RunConfig = RunConfig()
    warmup: WarmupConfig = WarmupConfig()

    @property
    def policy_in_team(self) -> bool:
        """Whether a team of workers trains the policy, which may be a team of one."""
        return self.placement.policy_workers > 1 or self.policy.optimizer_offload

    @property
    def warmup_methods(self) -> tuple[Literal["eagle", "eagle3"], ...]:
        """The drafters that `longtail warmup` makes, in order."""
        return self.warmup.drafter_methods or (self.drafter.method,)

    @model_validator(mode="after")
    def _possible(self) -> ClusterConfig:
        problems = [*self._engine_problems(), *self._training_problems(), *self._placement_problems()]
        problems += [*self._states_problems(), *self._weights_problems(), *self._policy_team_problems()]
        problems += self._colocation_problems() if self.placement.colocated else []
        if problems:
            raise ValueError("\n".join(problems))  # one a line: the loader tells each by itself
        return self

    def _engine_problems(self) -> Iterator[str]:
        engine = self.rollout.engine
        need = self.data.max_prompt_tokens + self.rollout.sampling.max_tokens
        if need > engine.max_len:
            yield (
                f"data.max_prompt_tokens + rollout.sampling.max_tokens = {need} does not fit "
                f"rollout.engine.max_len = {engine.max_len}: raise max_len to {need} or lower max_tokens"
            )
        if self.rollout.group_size > engine.max_running:
            yield (
                f"rollout.group_size {self.rollout.group_size} exceeds rollout.engine.max_running "
                f"{engine.max_running}: raise max_running or lower group_size"
            )
        lossy = self.speculation.acceptance != "exact" or self.speculation.accept_threshold != 1.0
        if lossy and not self.speculation.allow_lossy:
            yield (
                "speculation.acceptance and accept_threshold change the sampling distribution: leave them at 'exact' "
                "and 1.0, or set speculation.allow_lossy: true to accept biased rollouts"
            )
        yield from self._native_problems() if isinstance(engine, NativeEngine) else self._sglang_problems(engine)

    def _native_problems(self) -> Iterator[str]:
        drafters = {s.drafter for s in self.speculation.strategies}
        if self.drafter.method == "eagle3" and self.speculation.learned:
            yield (
                "the native engine does not run EAGLE-3 drafters: drafter.method: eagle3 needs "
                "rollout.engine.type: sglang; or set drafter.method: eagle"
            )
        if "ngram" in drafters:
            yield "drafter 'ngram' is SGLang's: take 'suffix' with the native engine, or rollout.engine.type: sglang"

    def _sglang_problems(self, engine: SGLangEngine) -> Iterator[str]:
        sampling, chosen = self.rollout.sampling, self.speculation.strategies
        switches = len(set(chosen)) > 1
        if switches:
            yield from switching_problems(chosen)
        for s in dict.fromkeys(chosen):
            if s.searched:
                instead = "ngram" if s.drafter == "suffix" else "eagle"
                yield f"drafter '{s.drafter}' is the native engine's: take '{instead}' with rollout.engine.type: sglang"
            if s.budget is not None:
                yield "budget in a strategy is the native engine's: leave it out with rollout.engine.type: sglang"
            if s.drafter == "eagle" and s.sampled and s.topk > 1:
                yield "SGLang samples drafts in chains only: set topk: 1, or sampled: false for an argmax tree"
            if s.drafter == "eagle" and s.sampled and engine.deterministic:
                yield "rollout.engine.deterministic needs argmax drafts: set sampled: false in the strategy"
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            yield (
                "SGLang reports logprobs without top_k, top_p and min_p, and its verification ignores min_p: leave "
                "them off in rollout.sampling, or use the native engine"
            )
        if engine.kv_tokens is not None and engine.kv_tokens <= engine.max_len:
            yield (
                f"rollout.engine.kv_tokens {engine.kv_tokens} cannot hold one request of max_len {engine.max_len}: "
                "raise kv_tokens or lower max_len"
            )
        if self.speculation.acceptance != "exact":
            yield "speculation.acceptance 'threshold' is the native engine's: leave it at 'exact' with SGLang"
        if self.run.compare_prompts and not switches:
            yield "run.compare_prompts switches strategies, an SGLang engine with a fixed one does not: set it to 0"
        yield from engine_arg_problems(engine.engine_args)

    def _states_problems(self) -> Iterator[str]:
        if self.drafter.states == "policy":
            return
        if all(s.drafter != "eagle" for s in self.speculation.strategies):
            yield "drafter.states: engine needs a strategy with drafter 'eagle'; or set drafter.states: policy"
        if self.drafter.method != "eagle":
            yield (
                f"drafter.states: engine: an engine with an {self.drafter.method} drafter keeps the states of the aux "
                "layers without the last one, which the drafter is trained towards: set drafter.states: policy"
            )

    def _weights_problems(self) -> Iterator[str]:
        weights, lease_s = self.weights, self.coordinator.lease_s
        if weights.transport == "object_store":
            return
        if self.placement.mode == "local":
            yield (
                "weights.transport: collective connects processes, and placement.mode: local has one: set "
                "weights.transport: object_store"
            )
        slowest = max(weights.connect_timeout_s, weights.part_timeout_s)
        if slowest >= lease_s:
            yield (
                f"coordinator.lease_s {lease_s:g} ends before a stuck transfer does ({slowest:g} s): lower "
                "weights.connect_timeout_s and weights.part_timeout_s, or raise lease_s"
            )

    def _policy_team_problems(self) -> Iterator[str]:
        place = self.placement
        if self.policy_in_team and place.mode == "local":
            yield (
                "placement.policy_workers and policy.optimizer_offload need worker processes, and placement.mode: "
                "local has none: set placement.mode: ray, or policy_workers: 1 and optimizer_offload: false"
            )
        if place.policy_workers > 1 and place.policy_gpus not in (0, 1) and not place.colocated:
            yield (
                f"placement.policy_gpus {place.policy_gpus:g}: each of {place.policy_workers} policy workers computes "
                "on one GPU of its own, as NCCL demands: set it to 1, or to 0 for CPUs"
            )
        if self.policy.optimizer_offload and not place.policy_gpus:
            yield (
                "policy.optimizer_offload makes room on a GPU, and placement.policy_gpus is 0: set optimizer_offload: "
                "false, or give the policy a GPU"
            )
        if self.policy_in_team and not (place.policy_gpus or place.policy_cpus):
            yield "placement.policy_cpus 0: Ray places a team of policy workers by what each asks for: set it above 0"

    @property
    def trains_drafter(self) -> bool:
        """Whether idle slots train the drafter at all."""
        return self.speculation.learned and self.drafter.training.when != "never"

    @property
    def drafts_beside_policy(self) -> bool:
        """Whether they do so also while the policy is trained."""
        wanted = self.drafter.training.beside_policy
        return self.trains_drafter and (self.placement.policy_lies_apart if wanted is None else wanted)

    def _colocation_problems(self) -> Iterator[str]:
        if self.drafter.training.beside_policy:
            yield (
                "drafter.training.beside_policy: true, but with placement.policy: colocated the policy has the slots' "
                "GPUs while it is trained: leave beside_policy out, or set placement.policy: split"
            )
        yield from self.placement.sharing_problems(self.rollout.num_servers)
        engine = self.rollout.engine
        if isinstance(engine, SGLangEngine) and engine.release_memory == self.placement.resident:
            yield (
                "placement.policy: colocated takes turns on a GPU's memory: set rollout.engine.release_memory: true; "
                "or leave it false and set placement.resident: true, where a GPU has room for both at once"
            )

    def _training_problems(self) -> Iterator[str]:
        if self.rollout.group_size < 2:
            yield "group-relative advantages need rollout.group_size >= 2"
        if self.rollout.sampling.temperature < COLDEST:
            yield f"training needs varied rollouts: set rollout.sampling.temperature above 0, to {COLDEST:g} or more"
        if self.model.path == "pocket" and self.data.chat_template:
            yield "the pocket model has no chat template: set data.chat_template: false or name another model.path"

    @property
    def _least_slot_gpus(self) -> float:
        engine = self.rollout.engine
        assert isinstance(engine, SGLangEngine)
        return 0.01 if engine.tp == 1 else engine.tp

    def _placement_problems(self) -> Iterator[str]:
        place = self.placement
        if place.resident and not place.colocated:
            yield "placement.resident is about placement.policy: colocated: leave it out with split"
        for key, gpus in (("gpus_per_slot", place.gpus_per_slot), ("policy_gpus", place.policy_gpus)):
            if gpus > 1 and gpus != int(gpus):
                yield f"placement.{key} {gpus:g}: Ray hands out parts of one GPU, or several whole ones: round it"
        if place.role_labels and place.address is None:
            yield (
                "placement.role_labels needs a cluster whose nodes carry the labels, a private Ray has none: set "
                "placement.address: auto, or leave role_labels out"
            )
        if place.mode == "local":
            if place.address is not None:
                yield "placement.address names a Ray cluster: set placement.mode: ray, or leave address out"
        elif isinstance(self.rollout.engine, SGLangEngine) and place.gpus_per_slot < self._least_slot_gpus:
            yield (
                f"an SGLang engine with tp {self.rollout.engine.tp} needs GPUs in its slot: set "
                "placement.gpus_per_slot to tp (below 1 when slots share a GPU) and placement.policy_gpus above 0"
            )
        elif self.model.device == "cuda" and not (place.gpus_per_slot and place.policy_gpus):
            yield (
                "model.device: cuda, but Ray hides the GPUs from an actor that asks for none: set "
                "placement.gpus_per_slot and placement.policy_gpus above 0, or model.device: cpu"
            )
