"""A resolved configuration that is written down loads as the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.load import dump_config, load_config
from services.config.schema import ClusterConfig, ReasoningGymData, SGLangEngine
from services.config.speculation import BucketSelector

WORDS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.sampled_from(
        ("off", "yes", "null", "~", "1e5", "1_0", "010", "0x1f", "1:30", ".inf", "1.", "true", "y", "", "<<", "=")
    ),
)
NUMBERS = st.floats(min_value=1e-12, max_value=1e12)


@given(name=WORDS, template=WORDS, rate=NUMBERS, stops=st.lists(WORDS, max_size=3), params=st.data())
def test_a_dumped_configuration_loads_equal(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    template: str,
    rate: float,
    stops: list[str],
    params: st.DataObject,
) -> None:
    finite = st.floats(allow_nan=False, allow_infinity=False)
    values = st.one_of(st.integers(-(10**20), 10**20), st.booleans(), WORDS, finite)
    source = ReasoningGymData(params=params.draw(st.dictionaries(WORDS, values, max_size=3)), template=template)
    base = ClusterConfig.model_validate(
        {
            "data": {"source": source},
            "policy": {"learning_rate": rate},
            "rollout": {"sampling": {"stop_strings": stops}},
            "run": {"name": name},
        }
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(base), encoding="utf-8")
    assert load_config(path) == base


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "data.source={type: file, path: p.parquet, on_bad_row: skip}",
            "speculation.selector={type: beg_mab, buckets: [{strategies: [{}]}, "
            "{min_running: 5, strategies: [{drafter: suffix, depth: 2, num_draft_tokens: 3}]}]}",
        ],
        [
            "rollout.engine={type: sglang, tp: 2, kv_tokens: 9000}",
            "rollout.engine.engine_args={chunked_prefill_size: 64, log_level: off}",
            "placement={gpus_per_slot: 2, policy_gpus: 1}",
            "speculation.selector.strategy={drafter: eagle, depth: 2, num_draft_tokens: 3}",
        ],
    ],
    ids=["native", "sglang"],
)
def test_every_variant_survives_the_round_trip(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(overrides=overrides)
    several = isinstance(config.speculation.selector, BucketSelector)
    assert several != isinstance(config.rollout.engine, SGLangEngine)
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_config(config), encoding="utf-8")
    assert load_config(dumped) == config
