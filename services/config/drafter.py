"""The configuration section `drafter`: the drafter, its training and when idle slots train it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.config.section import Section, SharedFolder


class DrafterTraining(Section):
    """When idle slots train the drafter: `auto` as long as it pays, `always` (steps whose number `every` divides) or
    `never`. Training rests after `patience` trainings in a row that each added less than `min_gain` (relative) to the
    acceptance length on held-out rollouts; it goes on when acceptance drops by `drift` below its recent level, or when
    the training of one step in `probe_every` adds `min_gain` again. `beside_policy`: also while the policy is trained,
    which leaves all slots idle; None: where the policy has GPUs of its own, so that it loses nothing by it."""

    when: Literal["auto", "always", "never"] = "auto"
    every: int = Field(1, ge=1)
    beside_policy: bool | None = None
    min_gain: float = Field(0.002, ge=0)
    patience: int = Field(3, ge=1)
    drift: float = Field(0.03, gt=0)
    probe_every: int = Field(8, ge=1)

    @model_validator(mode="after")
    def _every_step_or_when_it_pays(self) -> DrafterTraining:
        if self.every > 1 and self.when != "always":
            raise ValueError(
                f"every: {self.every} goes with when: always; {self.when!r} does not count steps: leave one of them out"
            )
        return self


class DrafterConfig(Section):
    """The drafter and its online training in idle slots. `path`: the folder of the drafter to begin with, as `longtail
    drafter import` writes it; none: the one that belongs to the model folder. `aux_layers` (EAGLE-3): the target layers
    whose outputs it reads, counted from 0; empty: three chosen by the target's depth. `states`: the hidden states to
    learn from come from the policy trainer's forward pass, or from the engines, which computed them while they
    generated."""

    method: Literal["eagle", "eagle3"] = "eagle"
    path: SharedFolder | None = None
    aux_layers: tuple[int, ...] = ()
    training: DrafterTraining = DrafterTraining()
    states: Literal["policy", "engine"] = "policy"
    learning_rate: float = Field(3e-4, gt=0)
    grad_clip: float = Field(0.5, gt=0)
    # What training minimises: cross-entropy with the target's distribution, or of the share of accepted drafts alpha
    # (at the run's temperature) 1 - alpha or -log alpha. Total variation is what `longtail bench losses` found best.
    loss: Literal["cross_entropy", "total_variation", "acceptance_likelihood"] = "total_variation"
    # Of cross-entropy, added to a loss about acceptance: 1 - alpha hardly pulls where the drafter knows nothing yet.
    acceptance_ce_weight: float = Field(0.1, ge=0)
    feature_weight: float = Field(0.2, ge=0)  # smooth-L1 on hidden states; EAGLE-3 matches distributions only
    unroll: int = Field(4, ge=1)  # draft depths trained on, each fed with the one before
    unroll_decay: float = Field(0.8, gt=0, le=1)
    pack_tokens: int = Field(1024, ge=64)
    buffer_bytes: int = Field(256 * 2**20, ge=2**16)
    # Hidden states more than this many policy versions behind the newest are dropped: each version moves the target a
    # little, and what an old one taught is wrong by now. Several are kept, because long responses are rare in each.
    max_staleness: int = Field(8, ge=0)
    # What memory does not hold goes to files under this folder (of each machine its own, best a local disk), up to
    # `spill_bytes` per slot; none: it is dropped.
    spill_dir: SharedFolder | None = None
    spill_bytes: int = Field(4 * 2**30, ge=2**16)
    micro_step_budget_s: float = Field(1.0, gt=0)  # one call of a trainer; a slot that is wanted cuts it short
    round_s: float = Field(5.0, gt=0)  # the slots that train are brought together about this often
    threads: int = Field(1, ge=1)
    # Its training state is kept here, a folder that every slot sees, and a run that finds one there goes on from it.
    checkpoint_dir: SharedFolder | None = None

    @model_validator(mode="after")
    def _layers(self) -> DrafterConfig:
        ids = self.aux_layers
        if ids and self.method != "eagle3":
            raise ValueError(f"method {self.method} reads the last hidden state only: leave aux_layers out")
        # rising: engines hand the states over in the order of the layers, whatever the order here
        if ids and (len(ids) != 3 or list(ids) != sorted(set(ids)) or ids[0] < 0):
            raise ValueError(f"aux_layers {list(ids)} must be three different ids from 0 up, in rising order")
        return self
