"""`rollouts/step_00001.parquet`: every rollout of a step, one row each, prompts repeated (Parquet dictionaries keep
that small). Column names follow the fields of `core.types.Rollout` and `Reward`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.core.types import Group, Prompt, Reward, Rollout

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("group_id", pa.string()),
        ("index", pa.int32()),
        ("prompt_id", pa.string()),
        ("task", pa.string()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("response", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("response_len", pa.int32()),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("logprob_convention", pa.string()),
        ("reward", pa.float64()),
        ("correct", pa.bool_()),
        ("reward_error", pa.string()),
        ("finish_reason", pa.string()),
        ("policy_versions", pa.list_(pa.int32())),
        ("drafter_versions", pa.list_(pa.int32())),
        ("seed", pa.int64()),
        ("temperature", pa.float64()),
        ("top_k", pa.int32()),
        ("top_p", pa.float64()),
        ("min_p", pa.float64()),
        ("server", pa.string()),
        ("acceptance_histogram", pa.list_(pa.int32())),
        ("proposed", pa.int64()),
        ("steps_by_strategy", pa.map_(pa.string(), pa.int64())),
        ("started_s", pa.float64()),
        ("finished_s", pa.float64()),
    ]
)


def _utf8(text: str) -> str:
    """A lone surrogate has no UTF-8 form; the ids beside the text stay the truth."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _row(step: int, prompt: Prompt, rollout: Rollout, reward: Reward) -> dict[str, Any]:
    return {
        "step": step,
        "group_id": rollout.group_id,
        "index": rollout.index,
        "prompt_id": rollout.prompt_id,
        "task": prompt.task,
        "prompt": _utf8(prompt.text),
        "answer": _utf8(prompt.answer),
        "response": _utf8(rollout.text),
        "prompt_ids": tuple(rollout.prompt_ids),
        "response_ids": tuple(rollout.response_ids),
        "response_len": len(rollout.response_ids),
        "rollout_logprobs": tuple(rollout.rollout_logprobs),
        "logprob_convention": rollout.logprob_convention,
        "reward": reward.value,
        "correct": reward.correct,
        "reward_error": None if reward.error is None else _utf8(reward.error),
        "finish_reason": rollout.finish_reason.value,
        "policy_versions": rollout.policy_versions,
        "drafter_versions": rollout.drafter_versions,
        "seed": rollout.seed,
        "temperature": rollout.sampling.temperature,
        "top_k": rollout.sampling.top_k,
        "top_p": rollout.sampling.top_p,
        "min_p": rollout.sampling.min_p,
        "server": rollout.server,
        "acceptance_histogram": rollout.acceptance.histogram,
        "proposed": rollout.acceptance.proposed,
        "steps_by_strategy": list(rollout.acceptance.steps_by_strategy.items()),
        "started_s": rollout.started_s,
        "finished_s": rollout.finished_s,
    }


def rollouts_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:05d}.parquet"


def write_rollouts(folder: Path, step: int, groups: Sequence[Group]) -> Path:
    """Write one step's rollouts; the file appears whole or not at all."""
    rows = [
        _row(step, group.prompt, rollout, reward)
        for group in groups
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
    ]
    path = rollouts_path(folder, step)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), temporary, compression="zstd")
    os.replace(temporary, path)
    return path


def read_columns(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Some columns of a rollouts file, one mapping per rollout."""
    rows: list[dict[str, Any]] = pq.read_table(path, columns=list(columns)).to_pylist()
    return rows
