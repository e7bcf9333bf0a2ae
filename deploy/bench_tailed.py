"""`longtail bench tailed`: how long a long-tailed batch takes with each strategy, with SGLang's own adaptive depth, and
with our selector, on one GPU.

All engines are alive together and take turns within every repeat; the first repeat warms up and is dropped. A repeat's
prompts and lengths are the same for all: lengths are quantiles of a log-normal distribution, the longest more than ten
times the median, and nothing ends earlier; each goes to a prompt whose worked trace is about as long, so that what is
generated is what the model was warmed up on. Prompts are new in every repeat. The tail is the part with at most 8
unfinished requests. Besides: what switching between OFF and the deepest chain costs 16 requests with long contexts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import ray

from deploy.bench_publish import fetch
from deploy.inputs import load_inputs
from deploy.provenance import provenance
from deploy.session import ray_session
from deploy.tailed_plot import draw
from deploy.tailed_runs import TAIL, SwitchStall, TailRun, fitting, lognormal_lengths
from deploy.tailed_server import OURS, STOCK, TailServer, mode_configs
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from services.core.types import GroupWork, Prompt, SamplingParams
from services.data.traces import chain_sum_trace
from services.models.files import model_dir, read_grown

SIGMA = 0.93  # of log lengths: at 128 rollouts the longest is 11.8 times the median
POOL = 8  # prompts to choose from, for each rollout
STALLED, CONTEXT, ROOM = 16, 4000, 512  # requests, tokens of context each and behind it, while strategies are switched

Runs = dict[str, list[TailRun]]


def run_bench(
    config: ClusterConfig, repeats: int, rollouts: int, out: Path | None, only: str | None = None
) -> dict[str, Any]:
    """Prints a table; `out` takes the result and the plot. `only`: names of modes, where all do not fit one GPU."""
    modes = chosen_modes(mode_configs(config), only)
    stall_context(config)  # refused before anything starts
    with ray_session(config):
        runs, stall = _measure(config, modes, repeats, rollouts)
    result = {
        "bench": "tailed",
        "provenance": provenance(),
        "grown": read_grown(model_dir(config.model.path)),
        "seed": config.run.seed,
        "rollouts": rollouts,
        "temperature": config.rollout.sampling.temperature,
        "repeats": repeats,
        **summary(runs),
        "switch": asdict(stall)
        | {"on_steps": stall.on_steps, "off_steps": stall.off_steps, "context": stall_context(config)},
        "runs": {mode: asdict(_middle(found)) for mode, found in runs.items()},
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tailed.json").write_text(json.dumps(result) + "\n")
        (out / "tailed.svg").write_text(draw({mode: _middle(found) for mode, found in runs.items()}))
    print(table(result), flush=True)
    return result


def chosen_modes(modes: Mapping[str, ClusterConfig], only: str | None) -> dict[str, ClusterConfig]:
    names = list(modes) if only is None else only.split(",")
    if unknown := [n for n in names if n not in modes]:
        raise ConfigError(f"--modes has {', '.join(unknown)}: it takes {', '.join(modes)}")
    if not {"off", OURS} < set(names):
        raise ConfigError(f"--modes must have off, {OURS} and one more: they are compared")
    return {name: config for name, config in modes.items() if name in names}


def _measure(
    config: ClusterConfig, modes: Mapping[str, ClusterConfig], repeats: int, rollouts: int
) -> tuple[Runs, SwitchStall]:
    server = ray.remote(TailServer)
    share = 1.0 / len(modes)
    servers = {m: server.options(num_gpus=share, num_cpus=1).remote(c, m) for m, c in modes.items()}
    timeout_s = config.coordinator.call_timeout_s
    try:
        fetch([s.ready.remote() for s in servers.values()], config.coordinator.start_timeout_s, "the engines to start")
        runs: Runs = {mode: [] for mode in modes}
        for repeat, work in enumerate(_batches(config, repeats + 1, rollouts)):
            order = list(modes) if repeat % 2 else list(modes)[::-1]
            for mode in order:
                found = fetch(servers[mode].run.remote(work), timeout_s, mode)
                print(json.dumps({"repeat": repeat, "mode": mode, "seconds": round(found.seconds, 3)}), flush=True)
                if repeat:
                    runs[mode].append(found)
        return runs, _stall(servers[OURS], config)
    finally:
        for one in servers.values():
            ray.kill(one)


def _batches(config: ClusterConfig, count: int, rollouts: int) -> list[list[GroupWork]]:
    prompts, sampling = iter(load_inputs(config).train), config.rollout.sampling
    lengths = lognormal_lengths(rollouts, sampling.max_tokens, SIGMA)
    batches = []
    for repeat in range(count):
        pool = list(islice(prompts, POOL * rollouts))
        if len(pool) < POOL * rollouts:
            raise ConfigError(
                f"{count} batches take {POOL * rollouts * count} prompts to choose from: raise data.source.size"
            )
        chosen = fitting(lengths, [len(chain_sum_trace(p.text, Random(0))) for p in pool])
        params = [SamplingParams(temperature=sampling.temperature, max_tokens=n) for n in lengths]
        batches.append([_work(repeat, i, pool[at], s) for i, (at, s) in enumerate(zip(chosen, params, strict=True))])
    return batches


def _work(repeat: int, i: int, prompt: Prompt, sampling: SamplingParams) -> GroupWork:
    return GroupWork(f"{repeat}.{i}", prompt, (0,), (1000 * repeat + i,), sampling)


def stall_context(config: ClusterConfig) -> int:
    """Tokens of context while strategies are switched: CONTEXT, or what the engine's `max_len` leaves."""
    context = min(CONTEXT, config.rollout.engine.max_len - ROOM)
    if context < 1:
        raise ConfigError(f"rollout.engine.max_len must hold {ROOM} tokens behind a context: raise it")
    return context


def _stall(server: Any, config: ClusterConfig) -> SwitchStall:
    ids, context = [i for p in load_inputs(config).train for i in p.token_ids], stall_context(config)
    contexts = [[ids[(n * 37 + k) % len(ids)] for k in range(context)] for n in range(STALLED)]
    found: SwitchStall = fetch(server.stall.remote(contexts), config.coordinator.call_timeout_s, "switching")
    return found


def _middle(found: Sequence[TailRun]) -> TailRun:
    """The run with the median time."""
    return sorted(found, key=lambda r: r.seconds)[len(found) // 2]


def summary(runs: Runs) -> dict[str, Any]:
    """Medians by mode; ratios are medians of the repeats' own ratios. `ours_vs_best`: above 1, ours is faster than the
    fastest other mode; `tail_vs_off`: tokens per second in the tail, ours over OFF."""
    modes = {
        mode: {
            "seconds": round(median(r.seconds for r in found), 3),
            "spread": [round(min(r.seconds for r in found), 3), round(max(r.seconds for r in found), 3)],
            "tokens_per_s": round(median(r.tokens / r.seconds for r in found), 1),
            "acceptance_length": _median([r.acceptance_length for r in found]),
            "tail_s": round(median(r.tail_s for r in found), 3),
            "tail_tokens_per_s": round(median(r.tail_rate for r in found), 1),
        }
        for mode, found in runs.items()
    }
    best = min((m for m in runs if m != OURS), key=lambda m: modes[m]["seconds"])
    pairs = zip(runs[best], runs[OURS], strict=True)
    tails = zip(runs["off"], runs[OURS], strict=True)
    return {
        "modes": modes,
        "best_other": best,
        "ours_vs_best": round(median(b.seconds / o.seconds for b, o in pairs), 4),
        "tail_vs_off": round(median(o.tail_rate / b.tail_rate for b, o in tails), 4),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(median(known), 3) if known else None


def table(result: Mapping[str, Any]) -> str:
    lines = [f"{'mode':18}{'seconds':>9}{'tokens/s':>10}{'accepted':>9}{'tail s':>8}{'tail tok/s':>11}"]
    for mode, m in result["modes"].items():
        length = "-" if m["acceptance_length"] is None else f"{m['acceptance_length']:.2f}"
        lines.append(
            f"{mode:18}{m['seconds']:9.2f}{m['tokens_per_s']:10.0f}{length:>9}{m['tail_s']:8.2f}"
            f"{m['tail_tokens_per_s']:11.0f}"
        )
    lines.append(
        f"ours against {result['best_other']}: {result['ours_vs_best']:.3f}x; with at most {TAIL} unfinished requests "
        f"against off: {result['tail_vs_off']:.2f}x; {STOCK} drafts argmax tokens"
    )
    switch = result["switch"]
    lines.append(
        f"switching at {STALLED} x {switch['context']} tokens: on costs {switch['on_steps']:.2f} decode steps, off "
        f"{switch['off_steps']:.2f}"
    )
    return "\n".join(lines)
