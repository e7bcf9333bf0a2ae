"""Values: zeros from the start, and nothing lost between taking them out and putting them back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.coordinator.telemetry.labels import LabelValues
from services.coordinator.telemetry.table import BY_NAME, METRICS, sample_names
from services.coordinator.telemetry.values import Values
from tests.services.coordinator.world import tiny_config

LABELS = LabelValues(tiny_config())


def values() -> Values:
    return Values(LABELS, "r1")


def scraped(values: Values) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    class Once:
        def collect(self) -> object:
            return values.families(values.take())

    registry = CollectorRegistry()
    registry.register(Once())  # type: ignore[arg-type]
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def test_every_counter_and_histogram_is_there_from_the_start_at_zero() -> None:
    found = scraped(values())
    names = {name for name, _ in found}
    assert names == {n for m in METRICS if m.kind != "gauge" for n in sample_names(m)}
    assert set(found.values()) == {0.0}
    roles = {dict(labels)["role"] for name, labels in found if name == "longtail_slot_seconds_total"}
    assert roles == {"rollout", "draining", "idle", "drafting", "policy", "lost", "reward"}


def test_every_series_has_the_run() -> None:
    assert all(("run_id", "r1") in labels for _, labels in scraped(values()))


COUNTS = st.dictionaries(
    st.sampled_from([m.name for m in METRICS if m.kind == "counter"]), st.floats(0, 1e12), max_size=8
)
SIZES = st.lists(st.floats(0, 1e6), max_size=8)


@given(COUNTS, SIZES)
def test_put_back_is_what_was_taken(counts: dict[str, float], sizes: list[float]) -> None:
    """Row 76, through JSON as the run folder keeps it."""
    before, after = values(), values()
    for name, amount in counts.items():
        before.inc(name, amount, *LABELS.series(BY_NAME[name].labels)[0])
    for size in sizes:
        before.observe("longtail_response_tokens", size)
    before.set("longtail_reward_mean", 0.25)
    after.put_back(json.loads(json.dumps(before.take())))
    assert scraped(after) == scraped(before)
    after.observe("longtail_response_tokens", 5.0)
    assert scraped(after)["longtail_response_tokens_count", frozenset({("run_id", "r1")})] == len(sizes) + 1


def test_values_of_another_configuration_are_left_out() -> None:
    before = Values(LabelValues(tiny_config(rollout={"num_servers": 3})), "r1")
    before.inc("longtail_generated_tokens_total", 7, "slot 0")
    before.inc("longtail_generated_tokens_total", 7, "slot 2")
    state = {**before.take(), "longtail_gone_total": (1.0,), "longtail_response_tokens": (1.0, 2.0)}
    after = values()
    after.put_back(state)
    assert after.total("longtail_generated_tokens_total", "slot 0") == 7
    assert after.total("longtail_response_tokens") == 0, "of other buckets"
    assert not any(("slot", "slot 2") in labels for _, labels in scraped(after))


@given(st.lists(st.floats(0, 2000), max_size=30))
def test_histograms_count_as_prometheus_does(seconds: list[float]) -> None:
    v = values()
    for one in seconds:
        v.observe("longtail_load_seconds", one)
    found = scraped(v)
    for bound in BY_NAME["longtail_load_seconds"].buckets:
        key = ("longtail_load_seconds_bucket", frozenset({("run_id", "r1"), ("le", str(bound))}))
        assert found[key] == sum(one <= bound for one in seconds)
    assert found["longtail_load_seconds_sum", frozenset({("run_id", "r1")})] == pytest.approx(sum(seconds))


def test_what_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(KeyError):
        values().inc("longtail_unheard_total", 1)
    with pytest.raises(AssertionError, match="no series"):
        values().inc("longtail_generated_tokens_total", 1, "slot 7")
    with pytest.raises(AssertionError, match="only grows"):
        values().inc("longtail_steps_total", -1)


def test_names_follow_prometheus() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("longtail_") and metric.help.strip()
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        for unit in ("seconds", "bytes", "joules"):
            assert (metric.unit == unit) == (f"_{unit}" in metric.name), metric.name


class Comparing(str):
    """A label value that counts how often it is compared with another."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Comparing.compared += 1
        return str.__eq__(self, other)


def test_a_value_is_set_without_a_look_at_the_other_slots_series() -> None:
    """A thousand slots set theirs at every change of a lease."""
    many = Values(LabelValues(tiny_config(rollout={"num_servers": 500})), "r1")
    many.set("longtail_slot_state", 3, Comparing("slot 499"))
    assert many.total("longtail_slot_state", "slot 499") == 3 and 0 < Comparing.compared < 5
    with pytest.raises(AssertionError, match="no series"):
        many.set("longtail_slot_state", 3, "slot 500")
