"""The algorithm. Everything else in Longtail serves these lines.

    policy loop     prompts ─> generate ─> score ─> chosen ─> advantages ─> train_step ─> publish ─> load ─┐
                       ^          ^          │                                                             │
                       │          └─ further ┘ prompts for groups without a signal (dynamic sampling)      │
                       └───────────────────────────────────────────────────────────────────────────────────┘

    drafter loop    hidden states of train_step or generate ─> buffer ─> train in idle slots ─> publish ─> load
                    (already computed)                                   (inside generate)

Who waits for whom:

- `generate` hands prompt groups to the rollout servers and yields each group when its last rollout is done. It ends
  when every group has all its rollouts, so the step waits for the longest response: the long tail.
- `score` waits for nobody: reward workers run beside generation, and only `further` waits for the last of them, since
  their rewards decide whether a step draws further prompts. Mostly it does not.
- While the tail is generated, slots with nothing left to generate train the drafter, as many as pays. Nobody waits for
  the drafter: training stops at the next micro-step when `generate` ends, or when work comes back to its slot.
- `publish_drafter` waits for the verdict on rollouts that nobody trained on: only what is better than the served
  drafter goes out.
- `train_step` waits for all rewards. Rollout servers are idle meanwhile; responses are strictly on-policy. A policy
  that shares their GPUs has all slots from here until `load`; where it has GPUs of its own, slots train the drafter.
- `checkpoint` waits for nobody: the policy trainer copies its state and writes the copy while the next step generates.
- `load` waits for every server to say that it serves exactly the published versions. A server that is lost does not
  hold up the others; it loads before it serves again.
- `safe_point` waits while a person has the run paused. No step is under way there.

The verbs are a protocol so that the loop can be read, and tested, without any service.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from services.coordinator.ledger import FinishedGroup
from services.core.types import Group, Prompt, TrainBatch


class Verbs(Protocol):
    @property
    def steps_done(self) -> int:
        """Steps that the policy was trained on before this call; above 0 when the run was taken over or resumed."""

    def safe_point(self) -> None: ...

    def prompts(self, step: int) -> Sequence[Prompt]:
        """The step begins: these are its own."""

    def generate(self, step: int, prompts: Sequence[Prompt]) -> Iterator[FinishedGroup]: ...

    def score(self, group: FinishedGroup) -> None: ...

    def further(self) -> Sequence[Prompt]:
        """What to generate for beside what is scored by now; mostly nothing."""

    def chosen(self) -> Sequence[Group]:
        """The groups of the step to train on, in their order."""

    def advantages(self, groups: Sequence[Group]) -> tuple[float, ...]: ...

    def train_step(self, batch: TrainBatch) -> None: ...

    def publish_policy(self) -> None: ...

    def publish_drafter(self) -> None: ...

    def load(self) -> None: ...

    def evaluate(self, step: int) -> None: ...

    def record(self, step: int) -> None: ...

    def checkpoint(self, step: int) -> None: ...


def train(run: Verbs, steps: int, eval_every: int) -> None:
    """Run up to `steps` steps; held-out evaluation before, after, and every `eval_every` steps (0: not in between)."""

    def evaluate(step: int) -> None:
        if step in (0, steps) or (eval_every and step % eval_every == 0):
            run.evaluate(step)

    run.publish_policy()
    run.publish_drafter()
    run.load()
    evaluate(run.steps_done)
    for step in range(run.steps_done + 1, steps + 1):
        run.safe_point()
        prompts = run.prompts(step)
        while prompts:
            for finished in run.generate(step, prompts):
                run.score(finished)
            prompts = run.further()
        groups = run.chosen()
        rollouts = tuple(rollout for group in groups for rollout in group.rollouts)
        run.train_step(TrainBatch(step, rollouts, run.advantages(groups)))
        run.publish_policy()
        run.publish_drafter()
        run.load()
        run.record(step)
        run.checkpoint(step)
        evaluate(step)
