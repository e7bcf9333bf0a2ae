"""`longtail bench gain`: the predicted gain against the achieved and the measured one, on the native engine.

A rollout server with the adaptive selector generates the same prompts again and again, with OFF forced and with its
own choice in turn. Before each of the latter it predicts the gain from the lengths of the run before; its spans tell
what it believes to have achieved; what really came of it are the two runs' tokens per second, in processor time of the
server's one thread, so that other work on the machine does not count. The first repeat warms up and is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from deploy.bench_server import EPOCH, loaded_server
from deploy.provenance import provenance
from services.config.schema import ClusterConfig
from services.config.schema import NativeEngine as NativeEngineConfig
from services.config.speculation import AdaptiveSelector, eagle_chain
from services.core.errors import ConfigError
from services.core.gain import Workload
from services.core.types import GroupWork, Prompt, Rollout, SamplingParams, StrategySpan
from services.data.source import load_prompts
from services.models.files import model_dir, read_grown
from services.models.tokenizer import load_tokenizer
from services.report.strategies import by_bucket, gain_of

ADVANCE_S = 0.5


@dataclass(frozen=True)
class Phase:
    """One pass over the prompts. `seconds` of rounds alone, as the spans tell them: prefills are the same either way,
    and not part of what is predicted; `whole_s` with them."""

    rollouts: tuple[Rollout, ...]
    spans: tuple[StrategySpan, ...]
    whole_s: float

    @property
    def tokens(self) -> int:
        return sum(len(r.response_ids) for r in self.rollouts)

    @property
    def seconds(self) -> float:
        return sum(s.rounds_s for s in self.spans)


@dataclass(frozen=True)
class Repeat:
    """`predicted` before the pass; `achieved` by the selector's figures for OFF; `measured`: tokens per second of
    rounds over those of the pass with OFF; `whole`: the same with prefills."""

    predicted: float
    achieved: float
    measured: float
    whole: float


class Bench:
    def __init__(self, config: ClusterConfig, prompts: int) -> None:
        self.config = config = with_adaptive(config)
        self._tokenizer = load_tokenizer(config.model.path)
        self._prompts: Sequence[Prompt] = load_prompts(config, self._tokenizer).heldout[:prompts]
        self._service = loaded_server(config, time.process_time)

    def repeat(self, seed: int) -> Repeat:
        off = self.generate("off", seed)
        predicted = self.predicted(off.rollouts)
        on = self.generate(None, seed)
        achieved = gain_of(on.spans)
        assert achieved is not None, "the adaptive selector predicts each round"
        rates = on.tokens / on.seconds, off.tokens / off.seconds
        return Repeat(predicted, achieved, rates[0] / rates[1], on.tokens / on.whole_s * off.whole_s / off.tokens)

    def generate(self, strategy: str | None, seed: int) -> Phase:
        self._service.set_strategy(strategy, EPOCH)
        size, rollout = self.config.rollout.group_size, self.config.rollout
        sampling = SamplingParams(
            rollout.sampling.temperature, max_tokens=rollout.sampling.max_tokens,
            stop_token_ids=self._tokenizer.eos_token_ids,
        )  # fmt: skip
        works = [
            GroupWork(f"g{g}", p, tuple(range(size)), tuple(10**6 * seed + 100 * g + i for i in range(size)), sampling)
            for g, p in enumerate(self._prompts)
        ]
        started = time.process_time()
        self._service.submit(works, EPOCH)
        rollouts, spans, running = list[Rollout](), list[StrategySpan](), True
        while running:
            report = self._service.advance(ADVANCE_S, EPOCH)
            rollouts += report.finished
            spans += report.spans
            running = bool(report.running or report.waiting)
        return Phase(tuple(rollouts), tuple(spans), time.process_time() - started)

    def predicted(self, before: Sequence[Rollout]) -> float:
        """From the lengths of the pass before, in the order of their prompts."""
        ordered = sorted(before, key=lambda r: (int(r.group_id[1:]), r.index))
        rollout = self.config.rollout
        prompt = sum(len(p.token_ids) for p in self._prompts) / len(self._prompts)
        lengths = tuple(max(1, len(r.response_ids)) for r in ordered)
        temperature = rollout.sampling.temperature
        work = Workload(lengths, rollout.group_size, prompt, rollout.engine.max_running, temperature)
        found = self._service.predict_gain(work)
        assert found is not None, "the adaptive selector has models"
        return found.ratio


def with_adaptive(config: ClusterConfig) -> ClusterConfig:
    """The configuration with an adaptive selector: its own, or one of some chains."""
    if not isinstance(config.rollout.engine, NativeEngineConfig):
        raise ConfigError("bench gain measures the native engine: name a preset of it, such as pocket-demo")
    if isinstance(config.speculation.selector, AdaptiveSelector):
        return config
    chains = AdaptiveSelector(strategies=tuple(eagle_chain(depth) for depth in (2, 3, 5)))
    speculation = config.speculation.model_copy(update={"selector": chains})
    return config.model_copy(update={"speculation": speculation})


def run_bench(
    config: ClusterConfig, repeats: int = 5, prompts: int = 12, say: Callable[[str], None] = print
) -> dict[str, Any]:
    bench = Bench(config, prompts)
    found = [bench.repeat(seed) for seed in range(repeats + 1)][1:]
    last = bench.generate(None, repeats + 1)
    say(_table(found, last))
    names = ("predicted", "achieved", "measured", "whole")
    values = {name: [getattr(r, name) for r in found] for name in names}
    lengths = sorted(len(r.response_ids) for r in last.rollouts)
    return {
        "bench": "gain",
        **provenance(),
        "grown": read_grown(model_dir(bench.config.model.path)),
        "rollouts": len(last.rollouts),
        "max_running": bench.config.rollout.engine.max_running,
        "response_tokens_p50": lengths[len(lengths) // 2],
        "response_tokens_max": lengths[-1],
        **{name: round(median(v), 3) for name, v in values.items()},
        **{f"{name}_range": [round(min(v), 3), round(max(v), 3)] for name, v in values.items()},
        "repeats": [asdict(r) for r in found],
        "strategies": {row.name: {n: round(s, 3) for n, s in row.share.items()} for row in by_bucket(last.spans)},
    }


def _table(found: Sequence[Repeat], last: Phase) -> str:
    lines = ["repeat   predicted  achieved  measured  measured with prefills"]
    for i, r in enumerate(found, start=1):
        lines.append(f"{i:<6}{r.predicted:>12.3f}{r.achieved:>10.3f}{r.measured:>10.3f}{r.whole:>24.3f}")
    for row in by_bucket(last.spans):
        shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(row.share.items(), key=lambda x: -x[1]))
        lines.append(f"{row.name:>7} running: {shares}")
    return "\n".join(lines)
