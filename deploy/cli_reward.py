"""`longtail reward`: what a run's verifier makes of given responses, before a run is paid for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli_shared import config_of, errors_told
from services.config.reward import RewardConfig
from services.config.schema import ClusterConfig
from services.core.errors import DataError, RewardError
from services.core.types import AcceptanceStats, FinishReason, Prompt, Reward, Rollout, SamplingParams

reward_app = typer.Typer(help="Look at rewards.", no_args_is_help=True)
KEYS = {"prompt": str, "answer": str, "response": str, "finished": bool, "task": str, "meta": dict}
NEEDED = ("answer", "response")
SHOWN_CHARS = 60


@reward_app.callback()
def _group() -> None:
    """Keeps `test` a command of its own."""


@reward_app.command("test")
def reward_test(
    file: Annotated[
        Path, typer.Argument(help='JSONL: {"answer", "response", and maybe "prompt", "finished", "task", "meta"}.')
    ],
    config: Annotated[str, typer.Option(help="Whose verifier to use: a YAML file or preset.")] = "pocket-demo",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")] = None,
) -> None:
    """Print what each row scores, and why. A row that cannot be read, or a verification that fails, is an error."""
    with errors_told():
        test(file, config_of(config, settings or []))


def test(file: Path, config: ClusterConfig) -> None:
    """Raises DataError for rows that cannot be read, before anything is scored, and RewardError at the end when a
    verification failed."""
    from services.reward.service import build_reward_service

    rows = list(_rows(file))
    service = build_reward_service(config)
    try:
        rewards = service.score([prompt for _, prompt, _ in rows], [rollout for *_, rollout in rows])
    finally:
        service.close()
    told = Counter[str]()
    for (line, prompt, rollout), reward in zip(rows, rewards, strict=True):
        verdict, why = explain(config.reward, prompt, rollout, reward)
        told[verdict] += 1
        print(f"{file}:{line}: {reward.value:g} {verdict}{': ' + why if why else ''}")
    print(f"{len(rows)} rows: " + ", ".join(f"{count} {verdict}" for verdict, count in told.most_common()))
    if told["error"]:
        raise RewardError(f"{told['error']} of {len(rows)} verifications failed: see the lines above")


def explain(config: RewardConfig, prompt: Prompt, rollout: Rollout, reward: Reward) -> tuple[str, str]:
    """(verdict, why)."""
    from services.reward.verifiers import found_answer

    if reward.error is not None:
        return "error", reward.error
    verdict = "correct" if reward.correct else "partly correct" if reward.value else "wrong"
    if config.verifier in ("function", "http"):
        return verdict, ""
    found = found_answer(config, rollout)
    if found is None:
        return "without an answer", _missing(config, rollout)
    if config.verifier == "code":
        return verdict, f"{len(found.splitlines())} lines of code, {'passed' if reward.correct else 'failed'} the tests"
    return verdict, f"found {_shown(found)}, the answer is {_shown(prompt.answer)}"


def _missing(config: RewardConfig, rollout: Rollout) -> str:
    if rollout.text.count("<think>") > rollout.text.count("</think>"):
        return "the thinking never ends"
    if config.verifier == "code":
        return "no closed block of code between ``` lines"
    if not config.answer_marker:
        return "the response was cut off, and reward.answer_marker is empty"
    return f"nothing behind the marker {config.answer_marker!r} (reward.answer_marker)"


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


def _rows(file: Path) -> Iterator[tuple[int, Prompt, Rollout]]:
    from services.data.rows import read_rows

    problems, good = [], []
    for line, row in read_rows(file):
        problem = row if isinstance(row, str) else _problem(row)
        if problem is not None:
            problems.append(f"{file}:{line}: {problem}")
        else:
            assert isinstance(row, dict)
            good.append((line, *_record(line, row)))
    if problems or not good:
        raise DataError("\n".join(problems) or f"{file} holds no row")
    yield from good


def _problem(row: dict[str, Any]) -> str | None:
    missing = [key for key in NEEDED if key not in row]
    if missing:
        return f"{' and '.join(missing)} missing: a row needs {' and '.join(NEEDED)}"
    unknown = [key for key in row if key not in KEYS]
    if unknown:
        return f"unknown key {unknown[0]!r}: known are {', '.join(KEYS)}"
    wrong = [key for key, value in row.items() if not isinstance(value, KEYS[key])]
    return f"{wrong[0]} must be a {KEYS[wrong[0]].__name__}" if wrong else None


def _record(line: int, row: dict[str, Any]) -> tuple[Prompt, Rollout]:
    prompt = Prompt(f"row{line}", row.get("prompt", ""), (0,), row["answer"], row.get("task", ""), row.get("meta", {}))
    reason = FinishReason.STOP if row.get("finished", True) else FinishReason.LENGTH
    ids, logprobs = (0,), (0.0,)
    rollout = Rollout(
        f"row{line}", prompt.id, 0, 0, (0,), ids, logprobs, row["response"], reason, SamplingParams(), (0,), (),
        AcceptanceStats(),
    )  # fmt: skip
    return prompt, rollout
