"""The prompt sets of a run, complete and checked before anything else starts."""

from __future__ import annotations

from dataclasses import dataclass

from services.config.schema import ClusterConfig, FileData, ReasoningGymData
from services.core.errors import DataError
from services.core.types import Prompt
from services.data.files import BadRow, read_file
from services.data.prompts import PromptTokenizer, TokenLimit
from services.data.split import split_prompts


@dataclass(frozen=True, slots=True)
class PromptSets:
    """`train` and `heldout` share no prompt; `skipped` lists the rows left out of a file read in skip mode."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    skipped: tuple[BadRow, ...] = ()


def load_prompts(config: ClusterConfig, tokenizer: PromptTokenizer) -> PromptSets:
    """Both prompt sets of `config.data`, each prompt with the ids that rollout will feed.

    Raises DataError: bad rows in strict mode, prompts over the limit, an empty side, a task the verifier cannot score,
    or fewer training prompts than a step needs.
    """
    data = config.data
    skipped: tuple[BadRow, ...] = ()
    limit = TokenLimit(tokenizer, data.max_prompt_tokens, data.chat_template)
    if isinstance(data.source, FileData):
        read = read_file(data.source.path, limit, data.source.on_bad_row)
        prompts, skipped = read.prompts, read.bad
    else:
        prompts = _generated(data.source, data.seed, limit)
    if config.reward.verifier == "task":
        _check_scorable(prompts)
    sides = split_prompts(prompts, data.heldout_fraction)
    if len(sides.train) < config.rollout.prompts_per_step:
        raise DataError(
            f"a step needs rollout.prompts_per_step = {config.rollout.prompts_per_step} different prompts, but only "
            f"{len(sides.train)} are for training: add prompts or lower prompts_per_step"
        )
    return PromptSets(sides.train, sides.heldout, skipped)


def _generated(source: ReasoningGymData, seed: int, limit: TokenLimit) -> tuple[Prompt, ...]:
    from services.data.tasks import generate_problems  # reasoning-gym takes seconds to import; files may not need it

    outcomes = [limit.prompt(problem) for problem in generate_problems(source, seed)]
    faults = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if faults:
        # Dropping the longest problems in silence would cut off the tail that was asked for.
        raise DataError(
            f"{len(faults)} of {len(outcomes)} generated problems cannot be prompts, the first because: {faults[0]}. "
            "Raise data.max_prompt_tokens or narrow data.source"
        )
    return tuple(outcome for outcome in outcomes if isinstance(outcome, Prompt))


def _check_scorable(prompts: tuple[Prompt, ...]) -> None:
    from services.data.tasks import known_tasks

    unknown = sorted({prompt.task for prompt in prompts} - known_tasks())
    if unknown:
        raise DataError(
            f"reward.verifier 'task' needs reasoning-gym task names, but the prompts have {unknown[:10]}: "
            "set reward.verifier to exact or math, or correct the task column"
        )
