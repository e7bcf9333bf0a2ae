from __future__ import annotations

import pytest

from deploy.modes import drafting_strategies, in_mode, modes_of
from deploy.provenance import ROOT
from services.config.load import load_config
from services.config.speculation import BucketSelector, eagle_chain

PRESETS = {name: load_config(name, presets_dir=ROOT / "deploy" / "presets") for name in ("pocket-demo", "pocket-tiny")}


@pytest.mark.parametrize("name", PRESETS)
def test_every_mode_of_the_engine_is_a_configuration_that_runs(name: str) -> None:
    config = PRESETS[name]
    modes = {mode: in_mode(config, mode) for mode in modes_of(config)}
    assert list(modes) == ["off", "static", "suffix", "tlt", "full"]
    assert {m: c.drafter.training.when for m, c in modes.items()} == {
        "off": "auto", "static": "never", "suffix": "auto", "tlt": "always", "full": "auto",
    }  # fmt: skip
    assert [s.drafter for s in modes["off"].speculation.strategies] == ["off"]
    assert {m for m, c in modes.items() if c.drafter.training.beside_policy is False} == {"tlt"}
    assert {m: c.drafter.training.every for m, c in modes.items() if c.drafter.training.every > 1} == {"tlt": 10}
    assert modes["full"].speculation.selector.type == "adaptive"
    for changed in modes.values():
        as_before = {"speculation": config.speculation, "drafter": config.drafter}
        assert changed.model_copy(update=as_before) == config, "nothing else differs"


def test_the_reference_speculates_with_few_requests_only() -> None:
    selector = in_mode(PRESETS["pocket-demo"], "tlt").speculation.selector
    assert isinstance(selector, BucketSelector)
    assert [(b.min_running, b.strategies[0].drafter) for b in selector.buckets] == [(1, "eagle"), (33, "off")]


def test_the_best_fixed_strategy_can_be_given() -> None:
    config = PRESETS["pocket-demo"]
    assert in_mode(config, "static", eagle_chain(5)).speculation.strategies == (eagle_chain(5),)
    assert all(s.drafter != "off" for s in drafting_strategies(config))


def test_modes_without_a_drafter_ask_no_engine_for_states() -> None:
    modes = {mode: in_mode(PRESETS["pocket-demo"], mode).drafter.states for mode in modes_of(PRESETS["pocket-demo"])}
    assert modes == {"off": "policy", "static": "engine", "suffix": "policy", "tlt": "engine", "full": "engine"}
    for strategy in drafting_strategies(PRESETS["pocket-demo"]):
        states = in_mode(PRESETS["pocket-demo"], "static", strategy).drafter.states
        assert states == ("engine" if strategy.learned else "policy"), strategy
