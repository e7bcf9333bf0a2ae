from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.bench_packing import BUDGETS, padded_rows, run_bench
from deploy.provenance import ROOT
from services.config.load import load_config


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 200))
def test_padded_rows_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    plans = padded_rows(lengths, budget)
    assert [i for p in plans for i in p.members] == [i for i, n in enumerate(lengths) if n]
    for plan in plans:
        assert plan.width == max(lengths[i] for i in plan.members)
        assert len(plan.rows) == 1 or plan.width * len(plan.rows) <= budget


def test_the_bench_counts_the_same_tokens_both_ways() -> None:
    overrides = ["data.source.size=64", "rollout.prompts_per_step=3", "rollout.group_size=2"]
    found = run_bench(load_config("pocket-demo", overrides=overrides, presets_dir=ROOT / "deploy" / "presets"), 1)
    assert [c["places"] for c in found["cells"]] == list(BUDGETS)
    assert found["ratio"] == found["cells"][-1]["ratio"] > 0 and found["sequences"] == 6
    for cell in found["cells"]:
        assert cell["packed"]["places_per_token"] >= 1 and cell["padded"]["places_per_token"] >= 1
