"""`longtail bench trl`: GRPO by Longtail and by TRL's GRPOTrainer, the same in all but the program.

Both start from the same weights and take the same prompts in the same order, group size, lengths, temperature, loss,
AdamW settings, number of optimizer steps and verifier. Each side is a process of its own, ours the whole `longtail
train` (on Ray, with the configuration's selector and its drafter training), theirs `deploy/trl_side.py`; they take
turns, and the side that begins changes. A step's time is from the end of the step before to its own: generation,
rewards, training, and with us publishing, loading, recording. The first step of each process is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from math import hypot, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from deploy.provenance import provenance
from services.config.load import dump_config
from services.config.policy import Grpo
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError, ServiceLostError, WaitTimeoutError

ROOT = Path(__file__).resolve().parents[1]
RUN_TIMEOUT_S = 3600.0
MIN_STEPS = 4  # two in each half, for their standard errors
GRACE_S = 60.0  # a run that is asked to end closes its processes
OURS, THEIRS = "longtail", "trl"


@dataclass(frozen=True)
class Curve:
    """One process: seconds of each step but the first; mean reward and response tokens of every step."""

    step_s: tuple[float, ...]
    reward: tuple[float, ...]
    response_tokens: tuple[int, ...]


@dataclass(frozen=True)
class TheirSettings:
    """What they are free to choose: responses in a forward pass of training, and threads."""

    micro_batch: int
    threads: int


def run_bench(
    config: ClusterConfig, steps: int, repeats: int, theirs: TheirSettings, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """`ratio`: their median step time divided by ours. `late_reward`: of the second half of the steps."""
    if not installed():
        raise ConfigError("bench trl compares with TRL, which is not installed: pip install trl==1.16.0")
    curves: dict[str, list[Curve]] = {OURS: [], THEIRS: []}
    for repeat in range(repeats):
        fit = fitted(config, steps, config.run.seed + repeat, theirs)
        for side in (OURS, THEIRS) if repeat % 2 == 0 else (THEIRS, OURS):
            curve = _ours(fit) if side == OURS else _theirs(fit, theirs)
            curves[side].append(curve)
            say(f"{side:<9} seed {fit.run.seed}: {median(curve.step_s):6.2f} s a step, {_outcome(curve)}")
    return {
        "bench": "trl",
        **provenance(),
        "trl": version("trl"),
        "transformers": version("transformers"),
        "workload": _workload(fitted(config, steps, config.run.seed, theirs), theirs),
        **compared(curves),
        "curves": {side: [asdict(curve) for curve in found] for side, found in curves.items()},
    }


def installed() -> bool:
    try:
        return bool(version("trl"))
    except PackageNotFoundError:
        return False


def fitted(config: ClusterConfig, steps: int, seed: int, theirs: TheirSettings) -> ClusterConfig:
    """`config` as a GRPO that both can do, with nothing beside training. Raises ConfigError."""
    if not isinstance(config.policy.algorithm, Grpo):
        raise ConfigError("bench trl compares GRPO: set policy.algorithm={type: grpo}")
    rollouts = config.rollout.prompts_per_step * config.rollout.group_size
    if steps < MIN_STEPS or rollouts % theirs.micro_batch:
        raise ConfigError(
            f"TRL's micro-batch {theirs.micro_batch} must divide a step's {rollouts} rollouts, and steps be at least "
            f"{MIN_STEPS}"
        )
    if config.rollout.sampling.stop_strings or config.rollout.sampling.min_p or config.model.dtype != "float32":
        raise ConfigError("bench trl compares in float32 without stop_strings and min_p: leave them out")
    tree = config.model_dump()
    # a group without a signal stays in their mean over responses, and their learning rate is constant here
    tree["policy"] |= {"decay_steps": 0, "inner_epochs": 1, "updates_per_step": 1, "kl_coef": 0.0, "correction": None}
    tree["policy"] |= {"zero_variance": "keep", "truncated": "keep"}
    tree["policy"]["algorithm"] |= {"baseline": "standardised", "aggregation": "sequence", "overlong": None}
    tree["model"]["device"] = "cpu"
    tree["run"] |= {"id": None, "steps": steps, "seed": seed, "checkpoint_every": 0, "eval_prompts": 0}
    tree["run"] |= {"eval_every": 0, "compare_prompts": 0, "tracking": ()}
    return ClusterConfig.model_validate(tree)


def compared(curves: dict[str, list[Curve]]) -> dict[str, Any]:
    """Step times, and rewards in the first and second half of the steps with their standard errors (of step means)."""
    step_s = {side: median(s for curve in found for s in curve.step_s) for side, found in curves.items()}
    halves = {side: _halves(found) for side, found in curves.items()}
    late = {side: _mean(halves[side][1]) for side in halves}
    difference = late[OURS][0] - late[THEIRS][0]
    return {
        "step_s": {side: round(seconds, 3) for side, seconds in step_s.items()},
        "step_s_range": {side: _range([s for c in found for s in c.step_s]) for side, found in curves.items()},
        "ratio": round(step_s[THEIRS] / step_s[OURS], 3),
        "tokens_per_step": {
            side: round(fmean(n for c in found for n in c.response_tokens)) for side, found in curves.items()
        },
        "early_reward": {side: [round(x, 4) for x in _mean(halves[side][0])] for side in halves},
        "late_reward": {side: [round(x, 4) for x in late[side]] for side in late},
        "late_reward_difference": [round(difference, 4), round(hypot(late[OURS][1], late[THEIRS][1]), 4)],
    }


def _halves(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    middle = len(curves[0].reward) // 2
    return [r for c in curves for r in c.reward[:middle]], [r for c in curves for r in c.reward[middle:]]


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """(mean, its standard error)"""
    return fmean(values), stdev(values) / sqrt(len(values))


def _range(values: Sequence[float]) -> list[float]:
    return [round(min(values), 3), round(max(values), 3)]


def _outcome(curve: Curve) -> str:
    return f"reward {curve.reward[0]:.3f} first, {fmean(curve.reward[len(curve.reward) // 2 :]):.3f} in the second half"


def _workload(config: ClusterConfig, theirs: TheirSettings) -> dict[str, Any]:
    return {
        "model": config.model.path,
        "steps": config.run.steps,
        "prompts_per_step": config.rollout.prompts_per_step,
        "group_size": config.rollout.group_size,
        "max_tokens": config.rollout.sampling.max_tokens,
        "temperature": config.rollout.sampling.temperature,
        "learning_rate": config.policy.learning_rate,
        "servers": config.rollout.num_servers,
        "threads": config.policy.threads,
        "selector": config.speculation.selector.type,
        "placement": config.placement.mode,
        "trl_micro_batch": theirs.micro_batch,
        "trl_threads": theirs.threads,
    }


# ---------------------------------------------------------------------------- processes


def _ours(config: ClusterConfig) -> Curve:
    with tempfile.TemporaryDirectory(prefix="longtail-trl-") as place:
        file, runs = Path(place) / "config.yaml", Path(place) / "runs"
        file.write_text(dump_config(config), encoding="utf-8")
        _to_the_end(["deploy", "train", str(file), "run.id=ours", "--run-dir", str(runs), "--quiet"], Path(place))
        lines = (runs / "ours" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return curve_of_run([row for row in map(json.loads, lines) if row["kind"] == "step"])


def curve_of_run(rows: Sequence[dict[str, Any]]) -> Curve:
    """Of the step rows of a run's metrics.jsonl."""
    rewards, tokens = ([row[key] for row in rows] for key in ("reward_mean", "response_tokens"))
    return Curve(_differences([row["at_s"] for row in rows]), tuple(rewards), tuple(tokens))


def _theirs(config: ClusterConfig, chosen: TheirSettings) -> Curve:
    with tempfile.TemporaryDirectory(prefix="longtail-trl-") as place:
        file, result = Path(place) / "config.yaml", Path(place) / "result.json"
        file.write_text(dump_config(config), encoding="utf-8")
        settings = [str(chosen.micro_batch), str(chosen.threads)]
        _to_the_end(["deploy.trl_side", str(file), str(result), *settings], Path(place))
        found = json.loads(result.read_text(encoding="utf-8"))
    return Curve(_differences(found["ended_s"]), tuple(found["reward"]), tuple(found["response_tokens"]))


def _differences(ends: Sequence[float]) -> tuple[float, ...]:
    return tuple(b - a for a, b in pairwise(ends))


def _to_the_end(module_and_arguments: Sequence[str], place: Path) -> None:
    """Run a module in `place`. What it says goes to a file: a pipe would stay open in processes that it leaves."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = place / "told.txt"
    with told.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *module_and_arguments],
            cwd=place,
            env={**os.environ, "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise WaitTimeoutError(f"{module_and_arguments[0]} did not end within {RUN_TIMEOUT_S:.0f} s") from None
        finally:
            _end(process)
    if code:
        raise ServiceLostError(module_and_arguments[0], f"exit code {code}: {told.read_text(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Also when we are interrupted ourselves; nothing is done to a process that has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
