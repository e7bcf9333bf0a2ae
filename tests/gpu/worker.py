"""One engine, one process: `python -m tests.gpu.worker CASE MODEL PROMPTS OUT` runs every probe and writes JSON.

A process each, because an SGLang engine that fails takes its process with it, and because several start side by side.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from services.config.naming import strategy_name
from services.core.errors import LongtailError, WeightError
from services.core.types import GroupWork, Prompt, Rollout, SamplingParams
from services.models.files import read_tensors
from services.rollout.service import RolloutService, build_rollout_service
from tests.gpu.cases import CASES, Case, case_config

EPOCH = 1
STATES_SHOWN = 12
MID_FACTOR = 0.7
MID_LEAST, MID_TOKENS = 8, 64  # responses under way, and tokens each has, when the policy changes
PREFIX_TOKENS = 600


class Probe:
    """The service of one case and what the probes found."""

    def __init__(self, case: Case, model: Path, prompts: dict[str, Any], states_file: Path) -> None:
        self.case, self.prompts, self.states_file = case, prompts, states_file
        started = time.monotonic()
        config = case_config(case, model)
        self.names = sorted({strategy_name(s) for s in config.speculation.strategies})
        self.longest = strategy_name(max(config.speculation.strategies, key=lambda s: s.depth))
        self.service: RolloutService = build_rollout_service(config, 0)
        self.found: dict[str, Any] = {"case": case.name, "start_s": time.monotonic() - started}
        self.target = read_tensors(model / "target")
        self.target.pop("lm_head.weight", None) if self._tied(model) else None
        self.service.open_epoch(EPOCH)
        self.service.load_policy(0, self.target, EPOCH)
        if case.drafter_folder:
            zeros = ("fc.bias",)
            tensors = read_tensors(model / case.drafter_folder)
            self.drafter = {name: t for name, t in tensors.items() if name not in zeros}
            self.service.load_drafter(0, self.drafter, EPOCH)

    @staticmethod
    def _tied(model: Path) -> bool:
        return bool(json.loads((model / "target" / "config.json").read_text()).get("tie_word_embeddings"))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seed: int = 0, limit_s: float = 120.0
    ) -> list[Rollout]:
        """One response per prompt, in prompt order."""
        self.submit(prompts, sampling, seed)
        return self.collect(len(prompts), limit_s)

    def submit(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seed: int = 0, keep_states: bool = False
    ) -> None:
        work = [
            GroupWork(str(i), Prompt(str(i), "", tuple(ids), "", "t"), (0,), (seed + i,), sampling, keep_states)
            for i, ids in enumerate(prompts)
        ]
        self.service.submit(work, EPOCH)

    def collect(self, count: int, limit_s: float = 120.0) -> list[Rollout]:
        finished: list[Rollout] = []
        deadline = time.monotonic() + limit_s
        while len(finished) < count:
            assert time.monotonic() < deadline, f"{len(finished)} of {count} rollouts after {limit_s} s"
            finished.extend(self.service.advance(0.2, EPOCH).finished)
        return sorted(finished, key=lambda r: int(r.group_id))


def greedy(probe: Probe) -> Any:
    sampling = SamplingParams(temperature=0.0, max_tokens=512, stop_token_ids=(probe.prompts["eos"],))
    return [_short(r) for r in probe.generate(probe.prompts["heldout"], sampling)]


def sampled(probe: Probe) -> Any:
    sampling = SamplingParams(temperature=1.0, max_tokens=1024, stop_token_ids=(probe.prompts["eos"],))
    started = time.monotonic()
    rollouts = probe.generate(probe.prompts["heldout"], sampling)
    return {"seconds": time.monotonic() - started, "rollouts": [_short(r) for r in rollouts]}


def distribution(probe: Probe) -> Any:
    """Many responses of three tokens to a few prefixes, for the comparison with the native engine."""
    sampling = SamplingParams(temperature=1.0, max_tokens=3)
    found = []
    for prefix in probe.prompts["prefixes"]:
        rollouts = probe.generate([prefix] * probe.prompts["draws"], sampling)
        found.append([list(r.response_ids) for r in rollouts])
    return found


def states(probe: Probe) -> Any:
    """Hidden states that the engine kept while it drew responses at temperature 1, twice each prompt, so that half of
    them found their prompt in the prefix cache; a dozen of the sequences go into a file for the comparison."""
    if "drafter.states=engine" not in probe.case.overrides:
        return None
    sampling = SamplingParams(temperature=1.0, max_tokens=512, stop_token_ids=(probe.prompts["eos"],))
    prompts = [ids for ids in probe.prompts["heldout"] for _ in range(2)]
    started = time.monotonic()
    probe.submit(prompts, sampling, seed=4000, keep_states=True)
    rollouts = probe.collect(len(prompts))
    generated = time.monotonic()
    chunk, kept = probe.service.take_states(0, EPOCH)
    found = {"seconds": generated - started, "take_seconds": time.monotonic() - generated, "rollouts": len(rollouts)}
    some = kept[:: max(1, len(kept) // STATES_SHOWN)][:STATES_SHOWN]
    torch.save([(s.input_ids, s.hidden, int((~s.loss_mask).sum())) for s in some], probe.states_file)
    return found | asdict(chunk) | {"file": str(probe.states_file)}


def loads(probe: Probe) -> Any:
    """Drafter loads in place, refusals, and what is served after each. An engine that switches at random keeps its
    longest chain meanwhile: acceptance lengths would say more of the depths drawn than of the drafter."""
    if not probe.case.drafter_folder:
        return None
    if probe.case.switches:
        probe.service.set_strategy(probe.longest, EPOCH)
    sampling = SamplingParams(temperature=0.0, max_tokens=128, stop_token_ids=(probe.prompts["eos"],))
    prompts, service = probe.prompts["heldout"][:16], probe.service
    found: dict[str, Any] = {}

    def measure(name: str) -> None:
        rollouts = probe.generate(prompts, sampling)
        steps = sum(r.acceptance.verify_steps for r in rollouts)
        accepted = sum(r.acceptance.num_accepted_tokens for r in rollouts)
        found[name] = {"ids": [list(r.response_ids) for r in rollouts], "acceptance_length": 1 + accepted / steps}

    measure("first")
    # Zeroing a norm as well makes what is drafted independent of the input.
    zero = {name: torch.zeros_like(t) for name, t in probe.drafter.items()}
    found["refused"] = {
        "nan": _refused(lambda: service.load_drafter(1, zero | {"fc.weight": zero["fc.weight"] * torch.nan}, EPOCH)),
        "names": _refused(lambda: service.load_drafter(1, {f"x.{n}": t for n, t in zero.items()}, EPOCH)),
        "shape": _refused(lambda: service.load_drafter(1, zero | {"fc.weight": zero["fc.weight"][:, 1:]}, EPOCH)),
        "none": _refused(lambda: service.load_drafter(1, {}, EPOCH)),
        "policy_nan": _refused(
            lambda: service.load_policy(1, {n: t * torch.nan for n, t in probe.target.items()}, EPOCH)
        ),
    }
    found["served_after_refusals"] = asdict(service.open_epoch(EPOCH))
    measure("after_refusals")
    service.load_drafter(1, zero, EPOCH)
    measure("zeroed")
    started = time.monotonic()
    service.load_drafter(2, probe.drafter, EPOCH)
    found["drafter_load_s"] = time.monotonic() - started
    measure("restored")
    started = time.monotonic()
    service.load_policy(1, probe.target, EPOCH)
    found["policy_load_s"] = time.monotonic() - started
    measure("after_policy")
    found["served"] = asdict(service.open_epoch(EPOCH))
    if probe.case.switches:
        service.set_strategy(None, EPOCH)
    return found


def mid_response(probe: Probe) -> Any:
    """Long generations under way, then another policy (first layer's norm scaled, so that every key and value
    changes) and a drafter: nothing may be dropped, and tokens after the load must be the new policy's. A response that
    ends before the load (the engine stops at the model's own end of sequence) says nothing and is left out."""
    sampling = SamplingParams(temperature=1.0, max_tokens=768)
    prompts = 2 * probe.prompts["long"]
    probe.submit(prompts, sampling, seed=777)
    at_load: dict[str, int] = {}
    ended = 0
    while sum(n >= MID_TOKENS for n in at_load.values()) < MID_LEAST:
        report = probe.service.advance(0.02, EPOCH)
        ended += len(report.finished)
        at_load = {r.rollout_id: r.num_tokens for r in report.running}
        assert ended < len(prompts), "all responses ended before enough of them were under way"
    changed = dict(probe.target)
    changed["model.layers.0.input_layernorm.weight"] = changed["model.layers.0.input_layernorm.weight"] * MID_FACTOR
    versions = probe.service.load_policy(2, changed, EPOCH)
    if probe.case.drafter_folder:
        versions = probe.service.load_drafter(3, probe.drafter, EPOCH)
    rest = probe.collect(len(prompts) - ended)
    rollouts = [r for r in rest if len(r.policy_versions) > 1]
    assert len(rollouts) >= MID_LEAST, f"only {len(rollouts)} of {len(prompts)} responses went on after the load"
    probe.service.load_policy(3, probe.target, EPOCH)
    return {
        "versions": asdict(versions),
        "tokens_at_load": [at_load.get(r.rollout_id, 0) for r in rollouts],
        "rollouts": [_short(r) for r in rollouts],
    }


def prefix(probe: Probe) -> Any:
    """Some 500 tokens of context each, first with an empty prefix cache (a policy load empties it), then again, then
    several of the same context at once."""
    sampling = SamplingParams(temperature=0.0, max_tokens=96)
    longest = sorted(probe.found["sampled"]["rollouts"], key=lambda r: len(r["ids"]))[-8:]
    contexts = [(r["prompt_ids"] + r["ids"][:-8])[:PREFIX_TOKENS] for r in longest]  # some way before the end
    probe.service.load_policy(4, probe.target, EPOCH)
    cold = probe.generate(contexts, sampling)
    warm = probe.generate(contexts, sampling)
    together = probe.generate([c for c in contexts for _ in range(3)], sampling)
    return {
        "cold": [_short(r) for r in cold],
        "warm": [_short(r) for r in warm],
        "together": [_short(r) for r in together],
    }


def memory(probe: Probe) -> Any:
    """The same prompts before and after the engine's memory was lent out and taken back."""
    if not probe.case.releases:
        return None
    sampling = SamplingParams(temperature=0.0, max_tokens=128, stop_token_ids=(probe.prompts["eos"],))
    prompts, service = probe.prompts["heldout"][:16], probe.service
    before = [_short(r) for r in probe.generate(prompts, sampling)]
    released = service.switch_memory(True, EPOCH)
    resumed = service.switch_memory(False, EPOCH)
    after = [_short(r) for r in probe.generate(prompts, sampling)]
    return {"released": asdict(released), "resumed": asdict(resumed), "before": before, "after": after}


def strategies(probe: Probe) -> Any:
    """Each strategy forced for a batch, and what the server says ran; what its selector chose when it was free."""
    if not probe.case.switches:
        return None
    sampling = SamplingParams(temperature=1.0, max_tokens=96)
    prompts, service = probe.prompts["heldout"][:16], probe.service
    found: dict[str, Any] = {"forced": {}, "spans": []}
    for name in probe.names:
        service.set_strategy(name, EPOCH)
        probe.submit(prompts, sampling)
        rollouts, told = [], []
        while len(rollouts) < len(prompts):
            report = service.advance(0.2, EPOCH)
            rollouts += report.finished
            told.append(report.strategy)
        found["forced"][name] = {"rollouts": [_short(r) for r in rollouts], "told": told[-1]}
    service.set_strategy(None, EPOCH)
    probe.submit(prompts, sampling)
    done = 0
    while done < len(prompts):
        report = service.advance(0.2, EPOCH)
        done += len(report.finished)
        found["spans"] += [asdict(s) for s in report.spans]
    return found


def stop_strings(probe: Probe) -> Any:
    sampling = SamplingParams(temperature=0.0, max_tokens=512, stop_strings=("#",))
    return [{**_short(r), "text": r.text} for r in probe.generate(probe.prompts["heldout"][:8], sampling)]


def _refused(load: Callable[[], Any]) -> str:
    try:
        load()
    except WeightError as error:
        return str(error)
    return ""


def _short(rollout: Rollout) -> dict[str, Any]:
    return {
        "prompt_ids": list(rollout.prompt_ids),
        "ids": list(rollout.response_ids),
        "logprobs": list(rollout.rollout_logprobs),
        "finish": str(rollout.finish_reason),
        "policy_versions": list(rollout.policy_versions),
        "drafter_versions": list(rollout.drafter_versions),
        "histogram": list(rollout.acceptance.histogram),
        "proposed": rollout.acceptance.proposed,
        "steps": dict(rollout.acceptance.steps_by_strategy),
        "accepted": dict(rollout.acceptance.accepted_by_strategy),
    }


PROBES: dict[str, Callable[[Probe], Any]] = {
    "greedy": greedy, "sampled": sampled, "states": states, "loads": loads, "distribution": distribution,
    "mid_response": mid_response,
    "strategies": strategies, "stop_strings": stop_strings, "prefix": prefix, "memory": memory,
}  # fmt: skip


def main(case_name: str, model: str, prompts: str, out: str) -> None:
    states_file = Path(out).with_suffix(".states.pt")
    probe = Probe(CASES[case_name], Path(model), json.loads(Path(prompts).read_text()), states_file)
    for name, run in PROBES.items():
        started = time.monotonic()
        try:
            probe.found[name] = run(probe)
        except (LongtailError, AssertionError) as error:  # the others are still worth having
            probe.found[name] = {"error": f"{type(error).__name__}: {error}"}
            probe.service.open_epoch(EPOCH)
        probe.found.setdefault("seconds", {})[name] = time.monotonic() - started
        Path(out).write_text(json.dumps(probe.found))


if __name__ == "__main__":
    main(*sys.argv[1:])
