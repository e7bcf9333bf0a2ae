"""SGLang behind the rollout protocol on a GPU, with a trained model: exactness, logprobs, weights.

bf16 kernels of different batch shapes round differently, so greedy outputs may part where two tokens are nearly equal:
every difference is classified by the target's own logit margin there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency

from tests.gpu.cases import CASES, SWITCHED
from tests.gpu.reference import Reference, compare_greedy
from tests.gpu.worker import MID_FACTOR

pytestmark = pytest.mark.timeout(600)  # the first test waits for all engines

Probes = dict[str, dict[str, Any]]
DRAFTING = [name for name, case in CASES.items() if case.drafts]
RELEASING = [name for name, case in CASES.items() if case.releases]
KEEPING = [name for name, case in CASES.items() if "drafter.states=engine" in case.overrides]
SWITCHING = [name for name, case in CASES.items() if case.switches]
STRATEGIES = {"off" if d == 0 else f"eagle_{d}_1_{d + 1}" for d in SWITCHED}
ALIKE = 0.05  # of an acceptance length: prompts found in the prefix cache round otherwise, so that some outputs part
LOADING = [name for name, case in CASES.items() if case.drafter_folder]


def found(probes: Probes, case: str, probe: str) -> Any:
    if case not in probes:
        pytest.skip(f"{case} not asked for in LONGTAIL_GPU_CASES")
    got = probes[case]
    assert "log" not in got, f"the engine did not start:\n{got['log']}"
    assert probe in got, f"the worker was stopped before it came to {probe}: raise LONGTAIL_GPU_LIMIT_S"
    value = got[probe]
    assert not (isinstance(value, dict) and "error" in value), value
    return value


def acceptance(rollouts: list[dict[str, Any]]) -> float:
    steps = sum(sum(r["histogram"]) for r in rollouts)
    return 1 + sum(k * n for r in rollouts for k, n in enumerate(r["histogram"])) / max(1, steps)


@pytest.mark.parametrize("case", DRAFTING)
def test_greedy_output_is_that_of_off(case: str, probes: Probes, reference: Reference, results: dict[str, Any]) -> None:
    base, other = found(probes, "off", "greedy"), found(probes, case, "greedy")
    figures = compare_greedy(reference, base, other)
    figures["acceptance_length"] = round(acceptance(other), 3)
    results.setdefault("greedy_against_off", {})[case] = figures
    assert figures["real"] == 0, figures
    assert figures["equal"] + figures["near_ties"] == figures["prompts"]
    assert figures["acceptance_length"] > (1.3 if case != "ngram" else 1.0)


@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_the_trainers(case: str, probes: Probes, reference: Reference, results: dict[str, Any]) -> None:
    probe = found(probes, case, "sampled")
    gaps = []
    for r in probe["rollouts"]:
        assert len(r["logprobs"]) == len(r["ids"]) > 0
        gaps.append((torch.tensor(r["logprobs"]) - reference.logprobs(r)).abs())
    gap = torch.cat(gaps)
    tokens = sum(len(r["ids"]) for r in probe["rollouts"])
    results.setdefault("sampled", {})[case] = {
        "logprob_gap_mean": round(float(gap.mean()), 5), "logprob_gap_max": round(float(gap.max()), 4),
        "acceptance_length": round(acceptance(probe["rollouts"]), 3), "tokens": tokens,
        "seconds": round(probe["seconds"], 2),
    }  # fmt: skip
    assert float(gap.mean()) < 0.02
    assert float(gap.quantile(0.999)) < 0.5


@pytest.mark.parametrize("case", CASES)
def test_samples_are_as_likely_as_the_targets_own(
    case: str, probes: Probes, reference: Reference, results: dict[str, Any]
) -> None:
    """Over all tokens: one that was accepted and should not have been costs many nats. Of each strategy by itself, too:
    the longest chain's draft probabilities once lay where the verification computed (surprise of 300 errors)."""
    rollouts = {case: found(probes, case, "sampled")["rollouts"]}
    if case in SWITCHING:
        forced = found(probes, case, "strategies")["forced"]
        rollouts |= {f"{case} {name}": run["rollouts"] for name, run in forced.items()}
    errors = {name: round(reference.surprise_errors(drawn), 2) for name, drawn in rollouts.items()}
    results.setdefault("surprise_errors", {}).update(errors)
    assert max(map(abs, errors.values())) < 5, errors


@pytest.mark.parametrize("case", CASES)
def test_samples_have_the_native_engines_distribution(
    case: str, probes: Probes, reference: Reference, results: dict[str, Any]
) -> None:
    """Chi-square over three-token continuations; one in a thousand falls below 0.001 by chance."""
    drawn = found(probes, case, "distribution")
    values = []
    for ours, theirs in zip(reference.draws, drawn, strict=True):
        counts = Counter(ours), Counter(tuple(ids) for ids in theirs)
        cells = [c for c in counts[0] | counts[1] if counts[0][c] + counts[1][c] >= 10]
        table = [[c[cell] for cell in cells] + [sum(n for k, n in c.items() if k not in cells)] for c in counts]
        kept = [pair for pair in zip(*table, strict=True) if sum(pair)]
        assert len(kept) > 2, "the prefix is too certain to say anything"
        values.append(round(float(chi2_contingency(list(zip(*kept, strict=True))).pvalue), 4))
    results.setdefault("chi_square_p", {})[case] = values
    assert min(values) > 0.001, values


@pytest.mark.parametrize("case", LOADING)
def test_drafter_loads_in_place_and_refuses(
    case: str, probes: Probes, reference: Reference, results: dict[str, Any]
) -> None:
    got = found(probes, case, "loads")
    lengths = {name: round(v["acceptance_length"], 3) for name, v in got.items() if isinstance(v, dict) and "ids" in v}
    results.setdefault("loads", {})[case] = lengths | {
        "drafter_load_s": round(got["drafter_load_s"], 3), "policy_load_s": round(got["policy_load_s"], 3)
    }  # fmt: skip
    assert all("refused" in reason for reason in got["refused"].values()), got["refused"]
    assert got["served_after_refusals"] == {"policy": 0, "drafter": 0}
    assert lengths["after_refusals"] == pytest.approx(lengths["first"], rel=ALIKE)
    assert lengths["zeroed"] < 1.2 < lengths["first"]
    assert lengths["restored"] == pytest.approx(lengths["first"], rel=ALIKE)
    assert lengths["after_policy"] == pytest.approx(lengths["first"], rel=ALIKE), "a policy load touched the drafter"
    assert got["served"] == {"policy": 1, "drafter": 2}


@pytest.mark.parametrize("case", CASES)
def test_a_policy_loaded_mid_response(case: str, probes: Probes, reference: Reference, results: dict[str, Any]) -> None:
    """Rows 32, 33, 36: nothing dropped, both versions on every rollout, and after the load every logprob is the new
    policy's over the whole context, so no key or value of the old one is left."""
    got = found(probes, case, "mid_response")
    assert got["versions"]["policy"] == 2
    gaps: dict[str, list[torch.Tensor]] = {"before_load": [], "after_load": [], "after_load_if_old": []}
    for r, at in zip(got["rollouts"], got["tokens_at_load"], strict=True):
        assert r["finish"] in ("stop", "length") and r["policy_versions"][-1] == 2 and len(r["policy_versions"]) == 2
        told = torch.tensor(r["logprobs"])
        new, old = reference.logprobs(r, MID_FACTOR), reference.logprobs(r)
        gaps["before_load"].append((told - old).abs()[:at])
        # Only the end: SGLang goes on while the load is prepared, up to 300 tokens further than its news.
        end = slice(max(at + 300, len(told) - 128), None)
        gaps["after_load"].append((told - new).abs()[end])
        gaps["after_load_if_old"].append((told - old).abs()[end])
    assert sum(len(values) for values in gaps["after_load"]) >= 256, "too few tokens behind the load"
    means = {name: round(float(torch.cat(values).mean()), 5) for name, values in gaps.items()}
    results.setdefault("mid_response", {})[case] = means
    assert means["before_load"] < 0.02 and means["after_load"] < 0.02
    assert means["after_load_if_old"] > 5 * means["after_load"], "the two policies are too alike to tell them apart"


@pytest.mark.parametrize("case", CASES)
def test_a_cached_prefix_changes_nothing(
    case: str, probes: Probes, reference: Reference, results: dict[str, Any]
) -> None:
    """Row 21: the drafter's keys and values of a prefix hit are there too."""
    got = found(probes, case, "prefix")
    cold, figures = got["cold"], {"acceptance_cold": round(acceptance(got["cold"]), 3)}
    for name, base in (("warm", cold), ("together", [r for r in cold for _ in range(3)])):
        figures[name] = compare_greedy(reference, base, got[name])
        figures[name]["acceptance"] = round(acceptance(got[name]), 3)
    results.setdefault("prefix", {})[case] = figures
    for name in ("warm", "together"):
        assert figures[name]["real"] == 0, f"{name}: margins {figures[name]['margins']}"
        assert figures[name]["acceptance"] > 0.9 * figures["acceptance_cold"]


@pytest.mark.parametrize("case", RELEASING)
def test_memory_lent_and_taken_back(case: str, probes: Probes, reference: Reference, results: dict[str, Any]) -> None:
    """Row 24: weights of policy and drafter survive. The bytes are the GPU's, on which other engines run too."""
    got = found(probes, case, "memory")
    before, after = got["before"], got["after"]
    results.setdefault("memory", {})[case] = {
        "released": got["released"], "resumed": got["resumed"],
        "acceptance_length": [round(acceptance(before), 3), round(acceptance(after), 3)],
    }  # fmt: skip
    assert compare_greedy(reference, before, after)["real"] == 0
    assert acceptance(after) == pytest.approx(acceptance(before), abs=0.1)
    assert got["released"]["num_bytes"] > 10**9


@pytest.mark.parametrize("case", SWITCHING)
def test_every_round_is_counted_under_the_strategy_that_ran(case: str, probes: Probes, results: dict[str, Any]) -> None:
    """Another strategy every round, drawn at random: no round is lost, none is counted twice."""
    total: Counter[str] = Counter()
    for r in found(probes, case, "sampled")["rollouts"]:
        assert sum(r["steps"].values()) + sum(r["accepted"].values()) == len(r["ids"]) - 1
        assert sum(n for name, n in r["steps"].items() if name != "off") == sum(r["histogram"])
        total.update(r["steps"])
    assert total.keys() == STRATEGIES and min(total.values()) > 0.1 * sum(total.values()), total
    results.setdefault("switching", {})[case] = {"steps": dict(total)}


@pytest.mark.parametrize("case", SWITCHING)
def test_a_forced_strategy_runs_alone(case: str, probes: Probes, results: dict[str, Any]) -> None:
    got = found(probes, case, "strategies")
    assert got["forced"].keys() == STRATEGIES
    figures = results.setdefault("switching", {}).setdefault(case, {})
    for name, run in got["forced"].items():
        assert run["told"] == name
        for r in run["rollouts"]:
            assert r["steps"].keys() <= {name}, "a round of another strategy"
        figures[f"acceptance_{name}"] = round(acceptance(run["rollouts"]), 3)
    spans = got["spans"]
    assert {s["strategy"] for s in spans} == STRATEGIES and all(s["reason"] == "explored at random" for s in spans)
    assert sum(s["rounds"] for s in spans) > 20


@pytest.mark.parametrize("case", CASES)
def test_stop_strings_end_a_response(case: str, probes: Probes) -> None:
    for r in found(probes, case, "stop_strings"):
        assert r["finish"] == "length" or (r["finish"] == "stop" and "#" not in r["text"])
        assert len(r["logprobs"]) == len(r["ids"])


@pytest.mark.parametrize("case", KEEPING)
def test_kept_states_are_the_trainers(case: str, probes: Probes, reference: Reference, results: dict[str, Any]) -> None:
    """Against the trainer's model, whose kernels round differently; and against the neighbours' states, which a shift
    by one would have brought."""
    got = found(probes, case, "states")
    assert got["num_missing"] == 0 and got["lost_bytes"] == 0 and got["num_sequences"] > 0.9 * got["rollouts"]
    gaps, shifted, spread, largest = [], [], [], 0.0
    for ids, hidden, num_prompt in torch.load(got["file"]):
        assert hidden.shape[0] == len(ids) > num_prompt
        wanted, kept = reference.states(ids.tolist()), hidden.float()
        gaps.append((kept - wanted).abs().mean(-1))
        largest = max(largest, float((kept - wanted).abs().max()))
        shifted.append((kept[1:] - wanted[:-1]).abs().mean(-1))
        spread.append(wanted.flatten())
    std = float(torch.cat(spread).std())
    gap, other = float(torch.cat(gaps).mean()) / std, float(torch.cat(shifted).mean()) / std
    results.setdefault("states", {})[case] = {
        "gap_mean_over_std": round(gap, 5), "gap_max_over_std": round(largest / std, 3),
        "shifted_mean_over_std": round(other, 4), "sequences": got["num_sequences"], "bytes": got["num_bytes"],
        "take_seconds": round(got["take_seconds"], 3), "rollout_seconds": round(got["seconds"], 2),
    }  # fmt: skip
    assert gap < 0.05
    assert other > 5 * gap
