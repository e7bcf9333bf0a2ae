"""What a warm-up starts from and imitates: a new model or one that is there, worked sums or a user's traces."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedModel

from deploy.warmup_target import Example, new_model, repeated, trace_examples
from services.config.schema import ClusterConfig
from services.data.source import PromptSets
from services.data.trace_files import TraceRules, read_traces
from services.data.traces import CHARACTERS
from services.models.convert import TOKENIZER_FILES
from services.models.files import model_dir, read_config
from services.models.layers import model_spec
from services.models.tokenizer import EOS, Tokenizer, character_tokenizer, load_tokenizer
from services.policy.service import load_policy_model

VOCAB_MULTIPLE = 16  # unused rows at the end of the embedding; kernels like round sizes
MIN_POSITIONS = 2048
DRAFT_ROOM = 64  # positions beyond the longest rollout, which an engine keeps for a verify step's draft tokens


@dataclass(frozen=True)
class Lessons:
    """`train` never ends; `heldout` may be empty."""

    train: Iterator[Example]
    heldout: tuple[Example, ...]


def starting_tokenizer(config: ClusterConfig, folder: Path) -> Tokenizer:
    """That of the model to go on from; else a new one, written to `folder`. Raises DataError for a model folder that
    cannot be used."""
    if config.warmup.start == "model":
        model_spec(read_config(model_dir(config.model.path)))  # what no run could take is told before it is trained
        return load_tokenizer(config.model.path)
    folder.mkdir(parents=True, exist_ok=True)
    core = character_tokenizer(CHARACTERS)
    core.save(str(folder / "tokenizer.json"))
    return Tokenizer(core, folder, (EOS,))


def starting_model(config: ClusterConfig, tokenizer: Tokenizer, device: torch.device) -> PreTrainedModel:
    """In float32: the model to go on from, or random weights from torch's global seed."""
    if config.warmup.start == "model":
        return load_policy_model(config.model.path, device)
    vocab = -(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return new_model(config.warmup, vocab, positions_for(config.rollout.engine.max_len)).to(device)


def positions_for(max_len: int) -> int:
    """`max_position_embeddings` of a new model: a power of two with room for a rollout of `max_len` and what is drafted
    behind it. A larger number costs nothing, rotary positions have no weights."""
    return max(MIN_POSITIONS, 1 << (max_len + DRAFT_ROOM - 1).bit_length())


def lessons(config: ClusterConfig, prompts: PromptSets, tokenizer: Tokenizer) -> Lessons:
    """Raises DataError for traces that cannot be learnt from."""
    most, seed, file = config.warmup.eval_prompts, config.run.seed, config.warmup.traces
    if file is None:
        unseen = islice(trace_examples(prompts.heldout, tokenizer, seed), min(most, len(prompts.heldout)))
        return Lessons(trace_examples(prompts.train, tokenizer, seed), tuple(unseen))
    rules = TraceRules(tokenizer, config.data.chat_template, config.rollout.engine.max_len)
    sets = read_traces(file, rules, config.data.heldout_fraction)
    held = tuple(Example(trace.ids, trace.prompt_len) for trace in sets.heldout[:most])
    return Lessons(repeated(sets.train, seed), held)


def save_target(model: PreTrainedModel, config: ClusterConfig, folder: Path) -> None:
    """The weights, and beside them the tokenizer of the model that was gone on from, byte for byte."""
    model.save_pretrained(folder)
    if config.warmup.start == "model":
        for name in TOKENIZER_FILES:
            file = model_dir(config.model.path) / name
            if file.is_file():
                shutil.copy(file, folder / name)
